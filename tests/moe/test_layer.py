"""The MoE layer as a module. References: the naive layer of naive.py, and a fresh layer for every shape.

That every schedule equals one process on every layout is the matter of test_schedules.py.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_parm.moe.schedules import SCHEDULES
from megatron_parm.parallel.context import ParallelContext
from tests.harness.layouts import Layout
from tests.harness.pools import Pools, WorkerError
from tests.moe.layer_run import Case, build_layer, inputs_of, largest_difference, run_layer
from tests.moe.naive import naive_moe

ALL = sorted(SCHEDULES)


def _naive(x: Tensor, case: Case, factor: float | None) -> Tensor:
    layer, _ = build_layer(ParallelContext.single(), case, "s1")
    weights = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    tokens = x.reshape(-1, x.shape[-1])
    return naive_moe(tokens, weights, topk=case.topk, factor=factor).output.view_as(x)


@pytest.mark.parametrize("schedule", ALL)
def test_tokens_are_positions_times_samples(schedule: str) -> None:
    """[s, b, h] in and out, in the same order: with drops by weight the order of tokens shows."""
    case = Case(factor=0.7, sequence=6, batch=3)
    layer, _ = build_layer(ParallelContext.single(), case, schedule)
    x, _ = inputs_of(case, 0)
    output = layer(x)
    assert output.shape == (6, 3, case.hidden)
    torch.testing.assert_close(output, _naive(x, case, 0.7), rtol=1e-12, atol=1e-12)
    strided = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(layer(strided), output), "and whatever the strides"


def test_a_wrong_shape_is_refused() -> None:
    layer, _ = build_layer(ParallelContext.single(), Case(), "s1")
    for shape in ((4, 8), (4, 2, 9), (4, 2, 8, 1)):
        with pytest.raises(ValueError, match="expected a tensor of shape"):
            layer(torch.zeros(shape, dtype=torch.float64))


def test_the_module_has_megatrons_names() -> None:
    layer, _ = build_layer(ParallelContext.single(), Case(), "s1")
    names = {"router.weight", "experts.weight1", "experts.weight2", "experts.bias1", "experts.bias2"}
    assert set(layer.state_dict()) == names
    assert layer.gate is layer.router


def test_the_schedule_may_change_between_steps() -> None:
    case = Case(factor=0.7)
    layer, _ = build_layer(ParallelContext.single(), case, "baseline")
    x, _ = inputs_of(case, 0)
    outputs = []
    for schedule in ALL:
        layer.schedule = schedule
        outputs.append(layer(x))
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("schedule", ["baseline", "s1"])
@pytest.mark.parametrize("topk", [1, 2])
def test_one_expert_takes_all_tokens_over_ep_4(pools: Pools, schedule: str, topk: int) -> None:
    """FC-25, dropless: ranks 1 to 3 (top-1) get no row at all; all equal one process and idle gradients are 0."""
    case = Case(factor=None, skew=60.0, topk=topk, pre_softmax=True)
    assert largest_difference(pools, Layout(4, ep=4), case, schedule) < 1e-10
    for rank, found in enumerate(pools.run(Layout(4, ep=4), run_layer, case, schedule)):
        assert found["summary"].counts[0, 0] == 4 * case.sequence * case.batch
        for name, gradient in found["gradients"].items():
            if name.startswith("experts") and topk == 1:
                idle = gradient if rank else gradient[1:]
                assert torch.equal(idle, torch.zeros_like(idle)), name
                assert rank or gradient[0].abs().max() > 0


@pytest.mark.parametrize("schedule", ALL)
def test_one_expert_takes_all_tokens_it_has_slots_for(pools: Pools, schedule: str) -> None:
    """FC-25 with a capacity: most tokens are dropped, and the rank of a single short sequence has one token."""
    drops = Case(factor=1.0, skew=60.0, topk=1, pre_softmax=True)
    assert largest_difference(pools, Layout(4, ep=4), drops, schedule) < 1e-10
    short = Case(factor=1.0, skew=60.0, topk=1, pre_softmax=True, sequence=1, batch=1)
    assert largest_difference(pools, Layout(4, ep=4), short, schedule) < 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_idle_experts_on_the_grouped_path(pools: Pools, dtype: torch.dtype) -> None:
    """FC-25 in the types that grouped_mm takes; the workers' new memory is NaN, so an unwritten gradient shows."""
    case = Case(factor=None, skew=60.0, topk=1, pre_softmax=True, hidden=16, ffn=16, dtype=dtype)
    for rank, found in enumerate(pools.run(Layout(4, ep=4), run_layer, case, "s1")):
        assert all(torch.isfinite(gradient).all() for gradient in found["gradients"].values())
        assert torch.isfinite(found["output"]).all()
        idle = found["gradients"]["experts.weight1"][0 if rank else 1 :]
        assert idle.abs().max() == 0


def _shapes_in_turn(ctx: ParallelContext, case: Case, schedule: str) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(output, input gradient, router gradient) of training, evaluation of another shape, and training again."""
    layer, _ = build_layer(ctx, case, schedule)
    found = []
    for training, batch in ((True, 2), (False, 1), (True, 2), (False, 3), (True, 1)):
        layer.train(training)
        layer.zero_grad()
        x = inputs_of(case, ctx.dp.rank)[0][:, :1].repeat(1, batch, 1).requires_grad_()
        output = layer(x)
        output.square().sum().backward()
        assert x.grad is not None and layer.router.weight.grad is not None
        found.append((output.detach(), x.grad, layer.router.weight.grad.clone()))
    return found


@pytest.mark.parametrize("schedule", ALL)
@pytest.mark.parametrize("layout", [Layout(1), Layout(4, tp=2, esp=2, ep=2)], ids=str)
def test_another_shape_between_two_steps_changes_nothing(pools: Pools, layout: Layout, schedule: str) -> None:
    """FC-30: nothing is sized once. The steps before and after are bitwise equal, evaluation equals the naive layer."""
    case = Case(balance=0.0, z=0.0)
    for rank, found in enumerate(pools.run(layout, _shapes_in_turn, case, schedule)):
        for first, third in zip(found[0], found[2], strict=True):
            assert torch.equal(first, third)
        column = inputs_of(case, layout.grid.coordinate("dp", rank))[0][:, :1]
        for (output, _, _), batch in zip(found, (2, 1, 2, 3, 1), strict=True):
            expected = _naive(column.repeat(1, batch, 1), case, case.factor)
            torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)


def _repeated(ctx: ParallelContext, case: Case, schedule: str, repeats: int) -> bool:
    runs: list[dict[str, Any]] = [run_layer(ctx, case, schedule) for _ in range(repeats)]
    return all(
        torch.equal(run["output"], runs[0]["output"])
        and all(torch.equal(run["gradients"][name], gradient) for name, gradient in runs[0]["gradients"].items())
        for run in runs
    )


@pytest.mark.parametrize("schedule", ALL)
def test_repeats_are_bitwise_equal(pools: Pools, schedule: str) -> None:
    """FC-30: no race between buffers in flight."""
    assert all(pools.run(Layout(4, tp=2, esp=2, ep=2), _repeated, Case(factor=0.7), schedule, 20))


def _evaluate(ctx: ParallelContext, case: Case, schedule: str) -> Tensor:
    layer, record = build_layer(ctx, case, schedule)
    layer.eval()
    output: Tensor = layer(inputs_of(case, ctx.dp.rank)[0])
    assert record.summarise(ctx, case.topk) is None
    return output.detach()


@pytest.mark.parametrize("schedule", ALL)
def test_evaluation_records_nothing(pools: Pools, schedule: str) -> None:
    case = Case()
    layout = Layout(4, tp=2, ep=2)
    for rank, output in enumerate(pools.run(layout, _evaluate, case, schedule)):
        x, _ = inputs_of(case, layout.grid.coordinate("dp", rank))
        torch.testing.assert_close(output, _naive(x, case, case.factor), rtol=1e-12, atol=1e-12)


def test_s1_refuses_tokens_that_do_not_divide(pools: Pools) -> None:
    """Never fewer tokens (FC-30): entrances refuse such shapes, and the layer does too."""
    with pytest.raises(WorkerError, match="not divisible by the 2 ranks of axis tp"):
        pools.run(Layout(2, tp=2), _evaluate, Case(sequence=7, batch=1), "s1")
    for schedule in ("baseline", "s2"):
        case = Case(sequence=7, batch=1)
        for output in pools.run(Layout(2, tp=2), _evaluate, case, schedule):
            torch.testing.assert_close(output, _naive(inputs_of(case, 0)[0], case, case.factor), rtol=1e-12, atol=1e-12)
