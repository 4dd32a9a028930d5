"""Boxes of parameters. Reference: painting the global tensor box by box, for random layouts, without processes."""

import dataclasses
from itertools import product
from math import lcm

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_parm.parallel.context import Axis, ParallelContext
from megatron_parm.parallel.grid import RankGrid
from megatron_parm.parallel.launch import CONTEXT_AXES
from megatron_parm.parallel.sharding import Cut, Role, ShardSpec, equal_parts, make_parameter, spec_of, tie

CPU = torch.device("cpu")


def context_of(grid: RankGrid, rank: int) -> ParallelContext:
    """What `rank` would know of `grid`, without any group."""
    axes = {}
    for name, (axis, _) in CONTEXT_AXES.items():
        ranks = grid.group_of(axis, rank)
        axes[name] = Axis(axis, len(ranks), ranks.index(rank), ranks, None)
    for name in ("inside", "between"):
        axes[name] = Axis.single(name, rank)
    return ParallelContext(grid, rank, CPU, **axes)


@st.composite
def shardings(draw: st.DrawFn) -> tuple[RankGrid, tuple[int, ...], dict[int, str], Role]:
    """A grid, a global shape, dim -> axis that cuts it, and a role."""
    tp, ep, esp = (draw(st.sampled_from([1, 2, 3, 4])) for _ in range(3))
    grid = RankGrid(lcm(tp, ep * esp) * draw(st.sampled_from([1, 2])), tp=tp, ep=ep, esp=esp)
    role: Role = draw(st.sampled_from(["dense", "expert"]))
    dims = draw(st.permutations(range(3)))
    cuts = {dim: axis for dim, axis in zip(dims, ("tp",) if role == "dense" else ("ep", "esp"), strict=False)}
    cuts = {dim: axis for dim, axis in cuts.items() if draw(st.booleans())}
    shape = [draw(st.integers(1, 3)) for _ in range(3)]
    for dim, axis in cuts.items():
        shape[dim] *= grid.size(axis)
    return grid, tuple(shape), cuts, role


def _spec(ctx: ParallelContext, shape: tuple[int, ...], cuts: dict[int, str], role: Role) -> ShardSpec:
    return ShardSpec(shape, tuple(Cut(dim, ctx.axis(axis)) for dim, axis in cuts.items()), role, True)


@given(shardings(), st.booleans())
def test_boxes_of_counted_ranks_tile_the_tensor_exactly_once(
    sharding: tuple[RankGrid, tuple[int, ...], dict[int, str], Role], is_shared_out: bool
) -> None:
    """Also where replicas share a box out among them, as sharded optimizer state is."""
    grid, shape, cuts, role = sharding
    counted = torch.zeros(shape, dtype=torch.int64)
    held = torch.zeros(shape, dtype=torch.int64)
    for rank in range(grid.world):
        ctx = context_of(grid, rank)
        spec = _spec(ctx, shape, cuts, role)
        replica = ctx.dp if role == "dense" else ctx.edp
        if is_shared_out:
            spec = dataclasses.replace(spec, part=equal_parts(spec.local_shape, replica.size)[replica.rank])
        held[spec.box] += 1
        assert held[spec.box].shape == spec.local_shape
        if spec.is_counted_here(ctx):
            counted[spec.box] += 1
    assert torch.equal(counted, torch.ones_like(counted))
    replicas = grid.world
    for axis in cuts.values():
        replicas //= grid.size(axis)
    if is_shared_out:
        replicas //= grid.dp if role == "dense" else grid.edp
    assert torch.equal(held, torch.full_like(held, replicas))


@pytest.mark.parametrize(
    ("rank", "box"),
    [(0, (0, 2, 0, 3)), (1, (0, 2, 3, 6)), (2, (2, 4, 0, 3)), (3, (2, 4, 3, 6)), (5, (0, 2, 3, 6))],
)
def test_boxes_by_hand(rank: int, box: tuple[int, int, int, int]) -> None:
    """8 ranks, esp 2 fastest, then ep 2: a [4, 6] tensor cut by ep along dim 0 and esp along dim 1."""
    ctx = context_of(RankGrid(8, tp=2, ep=2, esp=2), rank)
    spec = _spec(ctx, (4, 6), {0: "ep", 1: "esp"}, "expert")
    assert spec.box == (slice(box[0], box[1]), slice(box[2], box[3]))
    assert spec.local_shape == (2, 3)
    assert spec.is_counted_here(ctx) == (rank < 4)


def test_a_parameter_carries_its_spec() -> None:
    ctx = context_of(RankGrid(4, tp=4), 2)
    parameter = make_parameter((8, 3), Cut(0, ctx.tp), decays=False, dtype=torch.bfloat16, device=CPU)
    spec = spec_of(parameter)
    assert parameter.shape == (2, 3) and parameter.dtype == torch.bfloat16 and parameter.requires_grad
    assert (spec.global_shape, spec.role, spec.decays) == ((8, 3), "dense", False)
    assert spec.is_cut_by("tp") and not spec.is_cut_by("ep")


def test_a_dim_that_does_not_divide_is_refused() -> None:
    ctx = context_of(RankGrid(4, tp=4), 0)
    with pytest.raises(ValueError, match=r"dim 1 of \(8, 6\) is not divisible by tp = 4"):
        make_parameter((8, 6), Cut(1, ctx.tp), dtype=torch.float32, device=CPU)


def test_a_parameter_made_elsewhere_is_noticed() -> None:
    with pytest.raises(AssertionError, match="make_parameter"):
        spec_of(torch.nn.Parameter(torch.zeros(1)))


def test_a_tied_parameter_is_counted_on_the_first_stage_alone() -> None:
    grid = RankGrid(4, pp=4)
    counted = []
    for rank in (0, 3):
        ctx = dataclasses.replace(context_of(grid, rank), ends=Axis("ends", 2, int(rank == 3), (0, 3), None))
        parameter = make_parameter((8, 6), dtype=torch.float32, device=CPU)
        assert spec_of(parameter).is_counted_here(ctx)
        tie(parameter)
        counted.append(spec_of(parameter).is_counted_here(ctx))
    assert counted == [True, False]


def test_dense_parameters_are_counted_whatever_the_expert_axes() -> None:
    """Reference: one counted rank for each tp place, at dp 0; experts instead at edp 0."""
    grid = RankGrid(8, tp=2, ep=4)
    contexts = [context_of(grid, rank) for rank in range(8)]
    for cuts, ranks in (({}, [0]), ({0: "tp"}, [0, 1])):
        assert [c.rank for c in contexts if _spec(c, (8, 8), cuts, "dense").is_counted_here(c)] == ranks
    for place in product(range(2), range(4)):
        ctx = contexts[place[0] * 4 + place[1]]
        assert _spec(ctx, (8, 8), {0: "ep"}, "expert").is_counted_here(ctx) == (place[0] == 0)


@pytest.mark.parametrize(
    ("shape", "count", "parts"),
    [
        ((4, 6), 2, [(0, 0, 2), (0, 2, 4)]),
        ((3, 6), 2, [(1, 0, 3), (1, 3, 6)]),  # the first dim that divides evenly
        ((3, 5), 2, [(1, 0, 2), (1, 2, 5)]),  # none does: the longest
        ((2,), 3, [(0, 0, 0), (0, 0, 1), (0, 1, 2)]),
    ],
)
def test_equal_parts_by_hand(shape: tuple[int, ...], count: int, parts: list[tuple[int, int, int]]) -> None:
    assert [(part.dim, part.start, part.stop) for part in equal_parts(shape, count)] == parts


def test_a_dim_is_cut_once() -> None:
    axes = [Axis(name, 2, 0, (0, 1), None) for name in ("tp", "ep")]
    with pytest.raises(ValueError, match="cut over two axes"):
        make_parameter((8, 4), Cut(0, axes[0]), Cut(0, axes[1]), dtype=torch.float32, device=torch.device("cpu"))
