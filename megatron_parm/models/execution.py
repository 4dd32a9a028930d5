"""How a model runs, beside what it computes: which activations a rank holds, and which it keeps. Floor 6."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from megatron_parm.layers.recompute import Recomputation


@dataclass(frozen=True)
class LayerRecompute:
    """Whole layers that run again in backward (`--recompute-granularity full`).

    "uniform": groups of `num_layers` layers, of which only the input of the first is kept. "block": each of the first
    `num_layers` layers of the stage on its own, the others keep everything.
    """

    method: Literal["uniform", "block"]
    num_layers: int

    def groups(self, count: int) -> Iterator[tuple[range, bool]]:
        """The `count` layers of a stage in groups, each with whether it runs again in backward."""
        size = self.num_layers if self.method == "uniform" else 1
        for start in range(0, count, size):
            yield range(start, min(start + size, count)), self.method == "uniform" or start < self.num_layers


@dataclass(frozen=True)
class Execution:
    """Choices that leave the parameters, their names and shapes, and (up to rounding) all results as they are.

    sequence_parallel: between the parts that are cut over tp a rank holds its own slice of the sequence, [s/tp, b, h],
    instead of the whole, [s, b, h]. Without effect where tp has one rank. recomputed_modules, recomputed_layers: what
    runs again in backward, by `recomputation`; bit for bit the same results.
    """

    sequence_parallel: bool = False
    recomputed_modules: frozenset[str] = frozenset()
    recomputed_layers: LayerRecompute | None = None
    recomputation: Recomputation = field(default_factory=Recomputation)

    def recompute(self, module: str) -> Recomputation | None:
        """What runs that module again in backward; None where everything is kept."""
        return self.recomputation if module in self.recomputed_modules else None

    def groups(self, layers: Sequence[str]) -> list[tuple[list[str], bool]]:
        """The layers of a stage in the groups in which they run, each with whether it runs again in backward."""
        if self.recomputed_layers is None:
            return [(list(layers), False)]
        return [([layers[i] for i in group], again) for group, again in self.recomputed_layers.groups(len(layers))]


PLAIN = Execution()
