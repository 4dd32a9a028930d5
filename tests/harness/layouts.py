"""The table of layouts on which distributed tests run, and the pairwise cover of several tables.

`bash tests/run.sh` runs a pairwise cover of what a test lists in `@pytest.mark.cover(...)`, `--full` the whole product.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

from megatron_parm.errors import LayoutError
from megatron_parm.parallel.grid import RankGrid

POOL_SIZES = (2, 4, 8)
LARGEST = -1  # the one value that layouts of the largest pool count as


@dataclass(frozen=True)
class Layout:
    """Parallel sizes of one test; `world` is 1 or the size of a pool. `nodes`: on how many nodes the ranks stand."""

    world: int
    tp: int = 1
    ep: int = 1
    esp: int = 1
    pp: int = 1
    nodes: int = 1

    @property
    def grid(self) -> RankGrid:
        """The grid of these sizes."""
        return RankGrid(self.world, tp=self.tp, pp=self.pp, ep=self.ep, esp=self.esp)

    @property
    def names_of_nodes(self) -> list[str]:
        """The node of each rank, equal runs of ranks."""
        return [f"node{rank * self.nodes // self.world}" for rank in range(self.world)]

    def __str__(self) -> str:
        sizes = [
            f"{name}{getattr(self, name)}" for name in ("tp", "ep", "esp", "pp", "nodes") if getattr(self, name) > 1
        ]
        return "-".join([f"w{self.world}", *sizes])


SINGLE = Layout(1)

# What MoE runs compare with one process: each axis alone, then together, with dp and edp where ranks are left.
MOE_LAYOUTS = (
    SINGLE,
    Layout(2, tp=2),
    Layout(2, ep=2),
    Layout(2, esp=2),  # tp < esp
    Layout(2, tp=2, ep=2),
    Layout(2, tp=2, esp=2),  # tp = esp
    Layout(4, tp=2, ep=2),
    Layout(4, tp=2, esp=2, ep=2),
    Layout(4, tp=4, esp=2, ep=2),  # tp > esp
    Layout(4, tp=1, esp=2, ep=2),
    Layout(4, tp=2, esp=4),
    Layout(4, tp=2, esp=2),  # edp 2, dp 2
    Layout(4, ep=2),  # edp 2, dp 4
    Layout(8, tp=2, esp=2, ep=2),  # edp 2
    Layout(8, tp=4, esp=2, ep=4),
    Layout(8, tp=2, esp=4, ep=2),
    Layout(8, tp=2, ep=4),
    Layout(8, tp=4, esp=4, ep=2),
)

# The same on several nodes: experts and shards that stand together on a node, and a group on one node of two.
NODE_LAYOUTS = (
    Layout(2, tp=2, ep=2, nodes=2),
    Layout(4, tp=2, ep=2, esp=2, nodes=2),
    Layout(4, ep=4, nodes=2),
    Layout(4, tp=2, ep=4, nodes=2),
    Layout(8, tp=4, ep=2, esp=4, nodes=2),
    Layout(8, tp=2, ep=4, esp=2, nodes=2),
    Layout(8, tp=2, ep=8, nodes=4),
    Layout(8, tp=2, ep=4, esp=2, nodes=4),
    Layout(8, tp=2, ep=2, esp=2, nodes=2),  # edp 2, each expert group on one node
    Layout(8, tp=4, ep=4, esp=2, nodes=8),  # shards on several nodes: taken as one
)

# Layouts of a dense model.
DENSE_LAYOUTS = (SINGLE, Layout(2), Layout(2, tp=2), Layout(4, tp=2), Layout(4, tp=4), Layout(8, tp=4), Layout(8, tp=2))


def every_layout(worlds: Sequence[int] = (1, *POOL_SIZES), pipeline: bool = False) -> Iterator[Layout]:
    """Every layout with powers of two as sizes; with `pipeline` also those of several stages."""
    for world in worlds:
        sizes = [size for size in (1, 2, 4, 8) if size <= world]
        for tp, ep, esp, pp in product(sizes, sizes, sizes, sizes if pipeline else [1]):
            layout = Layout(world, tp=tp, ep=ep, esp=esp, pp=pp)
            try:
                _ = layout.grid
            except LayoutError:
                continue
            yield layout


def everything(*axes: Sequence[Any], where: Callable[..., bool] = lambda *_: True) -> list[tuple[Any, ...]]:
    """The product of `axes`, less the rows for which `where(*row)` is false."""
    return [row for row in product(*axes) if where(*row)]


def cover(*axes: Sequence[Any], where: Callable[..., bool] = lambda *_: True) -> list[tuple[Any, ...]]:
    """Few rows of the product of `axes` in which every pair of values that can meet does meet.

    Pairs that meet in no row allowed by `where` are left out. Layouts of the largest pool, whose rows take the longest,
    count as one value in pairs; each of them still has a row. Greedy and without randomness: the same axes give the
    same rows, in the order of the product. One axis gives all its values.
    """
    rows = [
        tuple(enumerate(indices))
        for indices in product(*(range(len(axis)) for axis in axes))
        if where(*(axis[i] for axis, i in zip(axes, indices, strict=True)))
    ]
    kind = {
        (number, i): (number, LARGEST if _is_largest(value) else i)
        for number, axis in enumerate(axes)
        for i, value in enumerate(axis)
    }
    width = min(2, len(axes))

    def met(row: tuple[tuple[int, int], ...]) -> set[Any]:
        return {*combinations((kind[place] for place in row), width), *row}

    pairs = {row: met(row) for row in rows}
    missing = set[Any]().union(*pairs.values())
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(pairs[row] & missing))
        missing -= pairs[best]
        chosen.append(best)
    return [tuple(axes[axis][i] for axis, i in row) for row in sorted(chosen)]


def _is_largest(value: Any) -> bool:
    return isinstance(value, Layout) and value.world == max(POOL_SIZES)
