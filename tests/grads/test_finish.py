"""Copies on tp peers get one gradient. Reference: the gradients of the first tp rank, and what each rank had."""

import pytest
import torch
from torch import Tensor

from megatron_parm.grads.buffer import GradientBuffers
from megatron_parm.grads.finish import copy_over_tp
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.sharding import Cut, make_parameter
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
