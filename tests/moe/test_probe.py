"""The pass that measurements run. Reference: schedules agree with each other where nothing is dropped (f = E / k).

Gradients are of order 1; 1e-10 leaves room for the other order of sums in float64.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from megatron_parm.moe.choose import unable
from megatron_parm.moe.cost import LayerShape
from megatron_parm.moe.probe import Pass, build_probe
from megatron_parm.moe.schedules import SCHEDULES
from megatron_parm.parallel import transport
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.sharding import spec_of
from tests.harness.layouts import Layout
from tests.harness.pools import Pools

SHAPE = LayerShape(
    num_tokens=16,
    hidden_size=8,
    ffn_hidden_size=8,
    num_experts=4,
    topk=2,
    capacity_factor=2.0,
    min_capacity=1,
    has_slots=True,
    pads=False,
    matrices=2,
    bytes_per_element=8,
    tp=1,
    ep=1,
    esp=1,
)


def _shape(layout: Layout, matrices: int = 2) -> LayerShape:
    return replace(SHAPE, tp=layout.tp, ep=layout.ep, esp=layout.esp, matrices=matrices)


def _gradients(ctx: ParallelContext, shape: LayerShape, kinds: list[tuple[str, int]]) -> list[dict[str, Tensor]]:
    """Reduced gradients of each schedule and chunks, from one pass object."""
    layer = build_probe(shape, ctx, torch.float64)
    for parameter in layer.parameters():
        parameter.data *= 20  # so that a gradient is of order 1
    work = Pass(layer, shape.num_tokens, ctx)
    found = []
    for schedule, chunks in kinds:
        layer.zero_grad()
        work.run(schedule, chunks)
        reduced = {}
        for name, parameter in layer.named_parameters():
            assert parameter.grad is not None, name
            axis = ctx.edp if spec_of(parameter).role == "expert" else ctx.dp
            reduced[name] = transport.sum_over(parameter.grad, axis)
        found.append(reduced)
    assert layer.router.record.summarise(ctx, shape.topk) is None, "a pass leaves no figures behind"
    return found


@pytest.mark.parametrize("matrices", [2, 3])
@pytest.mark.parametrize(
    "layout", [Layout(1), Layout(2, tp=2, esp=2), Layout(4, tp=2, ep=2, esp=2), Layout(4, tp=4, ep=2, esp=2)], ids=str
)
def test_every_schedule_leaves_the_same_gradients(pools: Pools, layout: Layout, matrices: int) -> None:
    shape = _shape(layout, matrices)
    kinds = list(product([name for name in SCHEDULES if unable(name, shape) is None], (1, 2, 4)))
    for of_rank in pools.run(layout, _gradients, shape, kinds):
        first, *others = of_rank
        assert set(first) == {"router.weight", "experts.weight1", "experts.weight2"}
        assert all(gradient.abs().max() > 1e-2 for gradient in first.values())
        for kind, other in zip(kinds[1:], others, strict=True):
            for name, gradient in other.items():
                assert (gradient - first[name]).abs().max() < 1e-10, (kind, name)


def _tokens(ctx: ParallelContext, shape: LayerShape) -> tuple[int, Tensor, Tensor]:
    work = Pass(build_probe(shape, ctx, torch.float64), shape.num_tokens, ctx)
    return ctx.dp.rank, work._x, work._gradient


def test_tokens_are_equal_on_tp_and_differ_on_dp(pools: Pools) -> None:
    layout = Layout(4, tp=2)
    by_rank = pools.run(layout, _tokens, _shape(layout))
    for (dp, x, gradient), (other_dp, other_x, other_gradient) in product(by_rank, by_rank):
        assert torch.equal(x, other_x) == torch.equal(gradient, other_gradient) == (dp == other_dp)
    assert by_rank[0][1].shape == (SHAPE.num_tokens, 1, SHAPE.hidden_size)


def test_the_probe_is_the_layer_of_the_shape() -> None:
    ctx = ParallelContext.single()
    for matrices, width in ((2, 8), (3, 16)):
        layer = build_probe(replace(SHAPE, matrices=matrices), ctx, torch.float32)
        assert {name: p.numel() for name, p in layer.named_parameters()} == {
            "router.weight": 4 * 8,
            "experts.weight1": 4 * width * 8,
            "experts.weight2": 4 * 8 * 8,
        }
