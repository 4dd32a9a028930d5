"""Copies on tp peers get one gradient, tied embeddings the sum of both stages.

References: the gradients of the first tp rank, what each rank had, and sums made by hand.
"""

import pytest
import torch
from torch import Tensor

from megatron_parm.grads.buffer import GradientBuffers
from megatron_parm.grads.finish import copy_over_tp, sum_over_ends, sum_over_tp
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.sharding import Cut, make_parameter, tie
from tests.harness.layouts import Layout
from tests.harness.pools import Pools


def _copied(ctx: ParallelContext) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The gradients before and after; every rank draws its own."""
    place = {"dtype": torch.float32, "device": ctx.device}
    parameters = {
        "norm": make_parameter((5,), **place),
        "column": make_parameter((8, 3), Cut(0, ctx.tp), **place),
        "router": make_parameter((4, 3), **place),
        "wide": make_parameter((3,), dtype=torch.float64, device=ctx.device),
        "expert": make_parameter((4, 3), Cut(0, ctx.ep), role="expert", **place),
    }
    buffers = GradientBuffers(parameters, ctx)
    generator = torch.Generator().manual_seed(ctx.rank)
    for name in parameters:
        gradient = buffers.gradient_of(name)
        gradient.copy_(torch.randn(gradient.shape, generator=generator))
    before = {name: buffers.gradient_of(name).clone() for name in parameters}
    copy_over_tp(buffers, ctx)
    buffers.expect_attached()
    return before, {name: buffers.gradient_of(name).clone() for name in parameters}


@pytest.mark.parametrize("layout", [Layout(2, tp=2, esp=2), Layout(4, tp=2, ep=2), Layout(4, tp=4, ep=2)], ids=str)
def test_whole_dense_parameters_take_the_first_ranks_and_nothing_else_changes(pools: Pools, layout: Layout) -> None:
    answers = pools.run(layout, _copied)
    for rank, (before, after) in enumerate(answers):
        first = answers[rank // layout.tp * layout.tp][0]
        for name in ("norm", "router", "wide"):
            assert torch.equal(after[name], first[name])
        for name in ("column", "expert"):
            assert torch.equal(after[name], before[name])


@pytest.mark.parametrize("layout", [Layout(1), Layout(2, ep=2), Layout(2, tp=2)], ids=str)
def test_where_peers_cannot_differ_nothing_is_sent(pools: Pools, layout: Layout) -> None:
    """Without tp there are no copies; without ep and esp each rank runs the experts on the same rows."""
    for before, after in pools.run(layout, _copied):
        assert all(torch.equal(after[name], before[name]) for name in before)


def _tied(ctx: ParallelContext) -> dict[str, tuple[Tensor, Tensor]]:
    """Gradients before and after; the ends of the pipeline hold "word", each rank draws its own values."""
    place = {"dtype": torch.float64, "device": ctx.device}
    parameters = {"weight": make_parameter((3, 2), **place)}
    if ctx.pp.rank in (0, ctx.pp.size - 1):
        parameters["word"] = make_parameter((8, 3), Cut(0, ctx.tp), **place)
        if ctx.pp.size > 1:
            tie(parameters["word"])
    buffers = GradientBuffers(parameters, ctx)
    generator = torch.Generator().manual_seed(ctx.rank)
    for name, parameter in parameters.items():
        gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        buffers.gradient_of(name).copy_(gradient)
    before = {name: buffers.gradient_of(name).clone() for name in parameters}
    sum_over_ends(buffers, ctx)
    buffers.expect_attached()
    return {name: (before[name], buffers.gradient_of(name).clone()) for name in parameters}


@pytest.mark.parametrize("layout", [Layout(1), Layout(2, pp=2), Layout(4, pp=4), Layout(8, tp=2, pp=4)], ids=str)
def test_tied_gradients_are_summed_over_first_and_last_stage_alone(pools: Pools, layout: Layout) -> None:
    answers = pools.run(layout, _tied)
    for rank, answer in enumerate(answers):
        before, after = answer["weight"]
        assert torch.equal(before, after)
        if "word" in answer:
            parts = [answers[end]["word"][0] for end in layout.grid.ends_of(rank)]
            assert torch.equal(answer["word"][1], torch.stack(parts).sum(0))
    assert sum("word" in answer for answer in answers) == 2 * layout.tp if layout.pp > 1 else 1


def _summed(ctx: ParallelContext) -> dict[str, tuple[Tensor, Tensor]]:
    """Name -> the gradient before and after `sum_over_tp`; every rank draws its own."""
    place = {"dtype": torch.float64, "device": ctx.device}
    parameters = {
        "norm": make_parameter((5,), is_partial_on_tp=True, **place),
        "column": make_parameter((8, 3), Cut(0, ctx.tp), **place),
        "positions": make_parameter((4, 3), is_partial_on_tp=True, **place),
        "router": make_parameter((4, 3), **place),
        "expert": make_parameter((4, 3), Cut(0, ctx.ep), role="expert", **place),
    }
    buffers = GradientBuffers(parameters, ctx)
    generator = torch.Generator().manual_seed(ctx.rank)
    for name in parameters:
        gradient = buffers.gradient_of(name)
        gradient.copy_(torch.randn(gradient.shape, generator=generator, dtype=torch.float64))
    before = {name: buffers.gradient_of(name).clone() for name in parameters}
    sum_over_tp(buffers, ctx)
    buffers.expect_attached()
    return {name: (before[name], buffers.gradient_of(name).clone()) for name in parameters}


@pytest.mark.parametrize("layout", [Layout(1), Layout(2, tp=2), Layout(4, tp=2, ep=2), Layout(4, tp=4)], ids=str)
def test_partial_gradients_are_summed_over_tp_and_nothing_else_changes(pools: Pools, layout: Layout) -> None:
    answers = pools.run(layout, _summed)
    for rank, answer in enumerate(answers):
        first = rank // layout.tp * layout.tp
        for name in ("norm", "positions"):
            parts = torch.stack([answers[peer][name][0] for peer in range(first, first + layout.tp)])
            torch.testing.assert_close(answer[name][1], parts.sum(0), atol=1e-14, rtol=0)
        for name in ("column", "router", "expert"):
            assert torch.equal(*answer[name])
