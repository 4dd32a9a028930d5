"""Which parameters move, and how fast, by patterns over their names. Floor 5.

Names are those of checkpoints, with layers numbered over the whole model, so a pattern means the same on every layout.
In a pattern `*` stands for any text, `?` for one character.
"""

import difflib
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from megatron_parm.errors import ConfigError

_LAYER = re.compile(r"\.layers\.(\d+)\.")
SHOWN = 3


def require_matches(flag: str, patterns: Iterable[str], names: Sequence[str]) -> None:
    """Raise ConfigError, with the nearest names, for a pattern that matches none of the whole model's `names`."""
    for pattern in patterns:
        if any(fnmatchcase(name, pattern) for name in names):
            continue
        near = difflib.get_close_matches(pattern, names, n=SHOWN, cutoff=0.4) or sorted(names)[:SHOWN]
        raise ConfigError(
            f"{flag} {pattern}: no parameter has such a name; the nearest are {', '.join(near)} (* stands for any text)"
        )


def is_matched(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of `patterns` matches `name`."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def depth_factor(name: str, num_layers: int, decay: float) -> float:
    """`decay` to the power of the layers between a parameter and the head: 1 for the head and the final norm.

    The last layer has `decay`, the embedding `decay` to the power of all layers and one more. Source: Clark et al. 2020
    (ELECTRA), Bao et al. 2021 (BEiT).
    """
    found = _LAYER.search(name)
    if found is not None:
        return decay ** (num_layers - int(found[1]))
    return decay ** (num_layers + 1) if name.startswith("embedding.") else 1.0


def rate_factor(name: str, factors: Sequence[tuple[str, float]], num_layers: int, decay: float) -> float:
    """What the learning rate of a parameter is multiplied by: by its depth, and by the last of `factors` it matches."""
    chosen = [factor for pattern, factor in factors if fnmatchcase(name, pattern)]
    return depth_factor(name, num_layers, decay) * (chosen[-1] if chosen else 1.0)
