"""Moving data without autograd. Reference: a local computation; any rank can make the inputs of all."""

import pytest
import torch
from torch import Tensor

from megatron_parm.parallel import transport
from megatron_parm.parallel.context import Axis, ParallelContext
from tests.harness.layouts import Layout
from tests.harness.pools import Pools

PLACES = [
    (Layout(1), "tp"),
    (Layout(2, tp=2), "tp"),
    (Layout(4, ep=2, esp=2), "ep"),
    (Layout(4, tp=2), "tp"),
    (Layout(8, tp=8), "tp"),
    (Layout(8, ep=2, esp=2), "edp"),
]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]


def _inputs(axis: Axis, dtype: torch.dtype) -> list[Tensor]:
    """Of every rank of the axis: small integers, so sums are exact in every dtype; transposed, so strides matter."""
    seeds = [torch.Generator().manual_seed(rank) for rank in axis.ranks]
    return [torch.randint(-8, 9, (3, 5), generator=seed).to(dtype).t() for seed in seeds]


def _reductions(ctx: ParallelContext, name: str, dtype: torch.dtype) -> None:
    axis = ctx.axis(name)
    inputs = _inputs(axis, dtype)
    stack, mine = torch.stack(inputs), inputs[axis.rank].clone()
    assert torch.equal(transport.sum_over(mine, axis), stack.sum(0))
    assert torch.equal(transport.max_over(mine, axis), stack.amax(0))
    assert torch.equal(transport.min_over(mine, axis), stack.amin(0))
    assert torch.equal(transport.gather_stack(mine, axis), stack)
    assert torch.equal(mine, inputs[axis.rank]), "an out-of-place function changed its input"
    blocks = torch.stack([mine + place for place in range(axis.size)])
    assert torch.equal(transport.scatter_sum(blocks, axis), (stack + axis.rank).sum(0))
    in_place = mine.contiguous()
    assert transport.sum_over_(in_place, axis) is in_place and torch.equal(in_place, stack.sum(0))
    for source in range(axis.size):
        copy = mine.contiguous().clone()
        assert torch.equal(transport.broadcast_(copy, axis, source), inputs[source])


@pytest.mark.cover(place=PLACES, dtype=DTYPES)
def test_values_equal_the_local_computation(pools: Pools, place: tuple[Layout, str], dtype: torch.dtype) -> None:
    pools.run(place[0], _reductions, place[1], dtype)


def _texts(ctx: ParallelContext, name: str) -> None:
    axis = ctx.axis(name)
    texts = ["", "naïve 数\n\nline", "x" * 1000, "\n", "a", "b", "c", "d"]
    mine = texts[axis.rank]
    assert transport.gather_text(mine, axis) == texts[: axis.size]
    for source in range(axis.size):
        assert transport.broadcast_text(mine if axis.rank == source else "other", axis, source) == texts[source]
    transport.barrier(axis)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place[0]}-{place[1]}")
def test_texts_of_any_length_travel_in_axis_order(pools: Pools, place: tuple[Layout, str]) -> None:
    pools.run(place[0], _texts, place[1])


def _in_place_on_a_view(ctx: ParallelContext) -> None:
    for function in (transport.sum_over_, transport.broadcast_):
        with pytest.raises(AssertionError, match="contiguous"):
            function(torch.zeros(2, 3).t(), ctx.tp)


def test_in_place_functions_refuse_what_gloo_would_permute(pools: Pools) -> None:
    pools.run(Layout(2, tp=2), _in_place_on_a_view)
