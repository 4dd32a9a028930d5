"""Ranks as an integer grid: which ranks form each group of each axis. No processes, no torch.distributed. Floor 3.

The dense part of a model sees the world as (pp, dp, tp), the MoE part sees the same ranks as (pp, edp, ep, esp); the
last name varies fastest. So a tp or esp group is consecutive ranks (inside a node), an ep group strides by esp.
Source: parm.md section 1 (paper: MP = tp, ESP = esp); Megatron's rank order for the dense part.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod

from megatron_parm.errors import LayoutError

DENSE_ORDER = ("pp", "dp", "tp")
EXPERT_ORDER = ("pp", "edp", "ep", "esp")

# axis name -> the grid it belongs to and the dims of that grid that vary inside one group
AXES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "tp": (DENSE_ORDER, ("tp",)),
    "dp": (DENSE_ORDER, ("dp",)),
    "pp": (DENSE_ORDER, ("pp",)),
    "esp": (EXPERT_ORDER, ("esp",)),
    "ep": (EXPERT_ORDER, ("ep",)),
    "edp": (EXPERT_ORDER, ("edp",)),
    "ep_esp": (EXPERT_ORDER, ("ep", "esp")),
    "stage": (DENSE_ORDER, ("dp", "tp")),
    "world": (DENSE_ORDER, ("pp", "dp", "tp")),
}


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)


@dataclass(frozen=True)
class RankGrid:
    """The sizes of every axis over `world` ranks. Raises LayoutError, in the user's flags, where they do not fit."""

    world: int
    tp: int = 1
    pp: int = 1
    ep: int = 1
    esp: int = 1

    def __post_init__(self) -> None:
        for flag, size in (
            ("--tensor-model-parallel-size", self.tp),
            ("--pipeline-model-parallel-size", self.pp),
            ("--expert-model-parallel-size", self.ep),
            ("--expert-tensor-parallel-size", self.esp),
        ):
            if size < 1:
                raise LayoutError(f"{flag} {size} must be at least 1")
        if self.world % (self.tp * self.pp):
            raise LayoutError(
                f"--tensor-model-parallel-size {self.tp} x --pipeline-model-parallel-size {self.pp} = "
                f"{self.tp * self.pp} must divide the {self.world} ranks of the run; start a multiple of "
                f"{self.tp * self.pp} ranks, or use sizes whose product is one of {_divisors(self.world)}"
            )
        stage = self.world // self.pp
        if stage % (self.ep * self.esp):
            raise LayoutError(
                f"--expert-model-parallel-size {self.ep} x --expert-tensor-parallel-size {self.esp} = "
                f"{self.ep * self.esp} must divide the {stage} ranks of a pipeline stage "
                f"(world {self.world} / pp {self.pp}); use sizes whose product is one of {_divisors(stage)}"
            )

    @property
    def dp(self) -> int:
        """Replicas of the dense part."""
        return self.world // (self.pp * self.tp)

    @property
    def edp(self) -> int:
        """Replicas of each expert shard."""
        return self.world // (self.pp * self.ep * self.esp)

    def size(self, axis: str) -> int:
        """Number of ranks in one group of `axis`."""
        return prod(int(getattr(self, dim)) for dim in AXES[axis][1])

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """Every group of `axis`, each a tuple of global ranks in the order of the axis."""
        order, inside = AXES[axis]
        found: dict[tuple[int, ...], list[int]] = {}
        for rank, coordinates in enumerate(self._walk(order)):
            outside = tuple(c for dim, c in zip(order, coordinates, strict=True) if dim not in inside)
            found.setdefault(outside, []).append(rank)
        return [tuple(ranks) for ranks in found.values()]

    def ends_of(self, rank: int) -> tuple[int, ...]:
        """First and last stage of the pipeline of `rank`, if it is on one of them; else `rank` alone.

        The two share what both of them hold: tied embeddings.
        """
        pipeline = self.group_of("pp", rank)
        ends = pipeline[0], pipeline[-1]
        return ends if self.pp > 1 and rank in ends else (rank,)

    def rank_sets(self) -> list[tuple[int, ...]]:
        """Every set of two or more ranks that needs a process group, in one order for all ranks."""
        sets = [ranks for axis in AXES for ranks in self.groups(axis)]
        sets += [(pipeline[0], pipeline[-1]) for pipeline in self.groups("pp") if self.pp > 1]
        return list(dict.fromkeys(ranks for ranks in sets if len(ranks) > 1))

    def group_of(self, axis: str, rank: int) -> tuple[int, ...]:
        """The ranks of the group of `axis` that holds global `rank`."""
        return next(ranks for ranks in self.groups(axis) if rank in ranks)

    def coordinate(self, axis: str, rank: int) -> int:
        """The place of global `rank` in its group of `axis`."""
        return self.group_of(axis, rank).index(rank)

    def _walk(self, order: Sequence[str]) -> Iterator[tuple[int, ...]]:
        sizes = [int(getattr(self, dim)) for dim in order]
        for rank in range(self.world):
            coordinates, rest = [], rank
            for size in reversed(sizes):
                rest, coordinate = divmod(rest, size)
                coordinates.append(coordinate)
            yield tuple(reversed(coordinates))


def cut_by_nodes(grid: RankGrid, nodes: Sequence[str]) -> dict[str, list[tuple[int, ...]]]:
    """The groups of ep_esp cut by the nodes of their ranks: `inside` a node, and `between` ranks of equal place.

    nodes: the node of each rank. Each group must consist of equal runs, one a node, each of whole experts (a multiple
    of esp ranks); otherwise every group is taken as one node.
    """
    fused = grid.groups("ep_esp")
    runs = [[tuple(run) for _, run in groupby(ranks, key=lambda rank: nodes[rank])] for ranks in fused]
    sizes = {len(run) for group in runs for run in group}
    is_regular = (
        len(sizes) == 1
        and next(iter(sizes)) % grid.esp == 0
        and all(len({nodes[run[0]] for run in group}) == len(group) for group in runs)
    )
    if not is_regular:
        runs = [[ranks] for ranks in fused]
    return {
        "inside": [run for group in runs for run in group],
        "between": [ranks for group in runs for ranks in zip(*group, strict=True)],
    }
