"""Started and finished collectives give the values and gradients of the blocking ones, with others in between.

Reference: megatron_parm.parallel.collectives, whose adjoints are proved in test_collectives.py.
"""

import gc
import time
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_parm.parallel import collectives
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.overlapped import (
    AllReduceSumming,
    AllToAll,
    AllToAllUneven,
    OwnSlice,
    ScatterSum,
    StackIdentical,
    StackSumming,
    finish,
    start,
)
from tests.harness.layouts import Layout
from tests.harness.pools import Pools


def _inputs(ctx: ParallelContext, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(ctx.rank)
    shape = (ctx.world.size, 3)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(count)]


def _blocking(ctx: ParallelContext, xs: list[Tensor]) -> Tensor:
    axis, ranks = ctx.world, ctx.world.size
    send, receive = _splits(ctx)
    parts = [
        collectives.all_to_all(xs[0], axis).tanh(),
        collectives.all_gather_summing(xs[1].unsqueeze(0), axis, 0).flatten(0, 1).sin(),
        collectives.reduce_scatter(xs[2].exp(), axis, 0),
        collectives.all_to_all_uneven(xs[3], axis, send, receive).cos(),
        collectives.all_to_all(collectives.all_to_all(xs[4], axis).square(), ctx.tp if ranks == ctx.tp.size else axis),
        collectives.all_reduce_summing(xs[5].exp(), axis).tan(),
    ]
    return torch.cat(parts)


def _overlapping(ctx: ParallelContext, xs: list[Tensor]) -> Tensor:
    axis, ranks = ctx.world, ctx.world.size
    other = ctx.tp if ranks == ctx.tp.size else axis
    send, receive = _splits(ctx)
    flights = [
        start(xs[0], AllToAll(axis)),
        start(xs[1], StackSumming(axis)),
        start(xs[2].exp(), ScatterSum(axis)),
        start(xs[3], AllToAllUneven(axis, send, receive)),
        start(xs[4], AllToAll(axis)),
        start(xs[5].exp(), AllReduceSumming(axis)),
    ]
    last = finish(flights[4])
    second = start(last.square(), AllToAll(other))
    parts = [
        finish(flights[0]).tanh(),
        finish(flights[1]).flatten(0, 1).sin(),
        finish(flights[2]).unsqueeze(0),
        finish(flights[3]).cos(),
        finish(second),
        finish(flights[5]).tan(),
    ]
    return torch.cat(parts)


def _splits(ctx: ParallelContext) -> tuple[list[int], list[int]]:
    """Rank r sends all its rows to rank 0 if r is odd, else one to each; so some splits are empty."""
    size = ctx.world.size
    sends = [[size, *[0] * (size - 1)] if rank % 2 else [1] * size for rank in range(size)]
    return sends[ctx.rank], [row[ctx.rank] for row in sends]


def _run(ctx: ParallelContext, compute: Callable[[ParallelContext, list[Tensor]], Tensor]) -> list[Tensor]:
    xs = _inputs(ctx, 6)
    output = compute(ctx, xs)
    generator = torch.Generator().manual_seed(100 + ctx.rank)
    output.backward(torch.randn(output.shape, generator=generator, dtype=torch.float64))
    return [output.detach(), *[x.grad for x in xs if x.grad is not None]]


@pytest.mark.parametrize("layout", [Layout(1), Layout(2, tp=2), Layout(4, tp=2), Layout(8, tp=4)], ids=str)
def test_values_and_gradients_are_those_of_the_blocking_collectives(pools: Pools, layout: Layout) -> None:
    for blocking, overlapping in zip(
        pools.run(layout, _run, _blocking), pools.run(layout, _run, _overlapping), strict=True
    ):
        assert len(blocking) == len(overlapping) == 7
        for wanted, found in zip(blocking, overlapping, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-14)


def _identical(ctx: ParallelContext, overlaps: bool) -> list[Tensor]:
    """The operators over tp whose result, or argument, is identical on its ranks: a slice, then the slices joined."""
    axis = ctx.tp
    generator = torch.Generator().manual_seed(ctx.dp.rank)
    whole, again, gradient = (torch.randn(8, 3, generator=generator, dtype=torch.float64) for _ in range(3))
    xs = [whole.requires_grad_(), again.requires_grad_()]
    if overlaps:
        cuts = [start(x.sin().unflatten(0, (axis.size, -1)), OwnSlice(axis)) for x in xs]
        flights = [start(finish(cut).exp(), StackIdentical(axis)) for cut in cuts]
        outputs = [finish(flight).flatten(0, 1).square() for flight in flights]
    else:
        outputs = [collectives.all_gather(collectives.split(x.sin(), axis, 0).exp(), axis, 0).square() for x in xs]
    (outputs[0] + 2 * outputs[1]).backward(gradient)
    return [*(output.detach() for output in outputs), *[x.grad for x in xs if x.grad is not None]]


@pytest.mark.parametrize("layout", [Layout(1), Layout(2, tp=2), Layout(4, tp=2), Layout(4, tp=4)], ids=str)
def test_slices_and_their_join_are_those_of_the_blocking_collectives(pools: Pools, layout: Layout) -> None:
    for blocking, overlapping in zip(
        pools.run(layout, _identical, False), pools.run(layout, _identical, True), strict=True
    ):
        assert len(blocking) == len(overlapping) == 4
        for wanted, found in zip(blocking, overlapping, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-14)


def _is_kept_alive(ctx: ParallelContext, goes_back: bool) -> bool:
    """Whether the graph above a flight outlives its last user while the collector of cycles is off."""
    gc.collect()
    gc.disable()
    try:
        leaf = torch.randn(ctx.world.size, 2, requires_grad=True)
        middle = leaf.exp()
        mark = Mark()
        assert middle.grad_fn is not None
        middle.grad_fn.metadata["mark"] = mark
        watched = weakref.ref(mark)
        result = finish(start(middle, AllToAll(ctx.world)))
        if goes_back:
            result.sum().backward()
        del leaf, middle, mark, result
        deadline = time.monotonic() + 5
        while watched() is not None and time.monotonic() < deadline:
            time.sleep(0.01)  # gloo's own thread lets go of what it sent a little after it has said so
        return watched() is not None
    finally:
        gc.enable()


class Mark:
    """Something a weak reference can be made to."""


@pytest.mark.parametrize("goes_back", [True, False])
def test_nothing_outlives_its_last_user(pools: Pools, goes_back: bool) -> None:
    """An operator that held its own result would keep the graph, and activations of a forward without a backward."""
    for layout in (Layout(1), Layout(2)):
        assert not any(pools.run(layout, _is_kept_alive, goes_back))


def _without_finish(ctx: ParallelContext, xs: list[Tensor]) -> Tensor:
    pending = start(xs[0], AllToAll(ctx.world))
    finish(pending)
    return finish(pending)


def test_a_collective_is_finished_once(pools: Pools) -> None:
    with pytest.raises(AssertionError, match="nothing is on the wire"):
        pools.run(Layout(1), _run, _without_finish)
