"""Cuts the sequences of one dataset into train, valid and test. Floor 4. Source: formats C.3."""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Literal

from megatron_parm.errors import ConfigError

SPLIT_NAMES = ("train", "valid", "test")
Rounding = Literal["core", "classic"]


def parse_split(text: str) -> tuple[float, float, float]:
    """The three fractions of `--split`, from one to three weights such as "969,30,1"; they add up to one."""
    try:
        weights = [float(part) for part in text.replace("/", ",").split(",") if part.strip()]
    except ValueError:
        weights = []
    good = 1 <= len(weights) <= 3 and all(math.isfinite(weight) and weight >= 0 for weight in weights)
    total = sum(weights) if good else 0.0
    if not good or not 0 < total < math.inf:
        raise ConfigError(
            f"--split {text!r} must be one to three weights, none negative and not all zero, such as 969,30,1"
        )
    train, valid, test = [weight / total for weight in [*weights, 0.0, 0.0][:3]]
    return train, valid, test


def split_bounds(fractions: Sequence[float], count: int, rounding: Rounding = "core") -> list[tuple[int, int]]:
    """The half-open range of sequences of each split.

    `core` rounds the cumulated fractions, as Megatron-Core does; `classic` rounds each part and takes the surplus from
    all upper bounds, as Megatron 2.0 to 23.08 did: for resuming old runs.
    """
    if rounding == "core":
        edges = [round(edge * float(count)) for edge in accumulate(fractions, initial=0.0)]
        return [
            (start, stop if fraction > 0 else start)
            for (start, stop), fraction in zip(pairwise(edges), fractions, strict=True)
        ]
    edges = list(accumulate((round(fraction * float(count)) for fraction in fractions), initial=0))
    surplus = edges[-1] - count
    edges = [0] + [edge - surplus for edge in edges[1:]]
    return list(pairwise(edges))


def require_sequences(bounds: tuple[int, int], split_name: str, split: str, source: str, count: int) -> None:
    """Raise ConfigError naming the split if samples are asked of it and it holds no sequence."""
    start, stop = bounds
    if stop <= start:
        raise ConfigError(
            f"the {split_name} split of {source} is empty: --split {split} of {count} sequences gives it none, but "
            f"{split_name} samples are asked for; raise its weight, or ask for none (--eval-iters 0)"
        )
