"""The MoE layer as a module. References: the naive layer of naive.py, and a fresh layer for every shape.

That every schedule equals one process on every layout is the matter of test_schedules.py.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megatron_parm.moe.schedules import SCHEDULES
from megatron_parm.parallel import transport
from megatron_parm.parallel.context import Axis, ParallelContext
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


def test_schedule_and_chunks_may_change_between_steps() -> None:
    case = Case(factor=0.7)
    layer, _ = build_layer(ParallelContext.single(), case, "baseline")
    x, _ = inputs_of(case, 0)
    outputs = []
    for schedule in ALL:
        for chunks in (1, 2, 3, 4):
            layer.schedule, layer.chunks = schedule, chunks
            outputs.append(layer(x))
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], rtol=1e-13, atol=1e-13)


@pytest.mark.cover(schedule=["baseline", "s1", "s1h"], topk=[1, 2], chunks=[1, 2, 4], factor=[None, 2.0])
def test_one_expert_takes_all_tokens_over_ep_4(
    pools: Pools, schedule: str, topk: int, chunks: int, factor: float | None
) -> None:
    """FC-25, packed: ranks 1 to 3 (top-1) get no row at all; all equal one process and idle gradients are 0."""
    case = Case(factor=factor, skew=60.0, topk=topk, pre_softmax=True)
    assert largest_difference(pools, Layout(4, ep=4), case, schedule, chunks=chunks) < 1e-10
    for rank, found in enumerate(pools.run(Layout(4, ep=4), run_layer, case, schedule, "", chunks)):
        assert found["summary"].counts[0, 0] == 4 * case.sequence * case.batch
        for name, gradient in found["gradients"].items():
            if name.startswith("experts") and topk == 1:
                idle = gradient if rank else gradient[1:]
                assert torch.equal(idle, torch.zeros_like(idle)), name
                assert rank or gradient[0].abs().max() > 0


@pytest.mark.cover(schedule=ALL, chunks=[1, 3], padded=[True, False])
def test_one_expert_takes_all_tokens_it_has_slots_for(pools: Pools, schedule: str, chunks: int, padded: bool) -> None:
    """FC-25 with a capacity: most tokens are dropped, and the rank of a single short sequence has one token."""
    drops = Case(factor=1.0, skew=60.0, topk=1, pre_softmax=True, padded=padded)
    assert largest_difference(pools, Layout(4, ep=4), drops, schedule, chunks=chunks) < 1e-10
    short = replace(drops, sequence=1, batch=1)
    assert largest_difference(pools, Layout(4, ep=4), short, schedule, chunks=chunks) < 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_idle_experts_on_the_grouped_path(pools: Pools, dtype: torch.dtype) -> None:
    """FC-25 in the types that grouped_mm takes; the workers' new memory is NaN, so an unwritten gradient shows."""
    case = Case(factor=None, skew=60.0, topk=1, pre_softmax=True, hidden=16, ffn=16, dtype=dtype)
    for rank, found in enumerate(pools.run(Layout(4, ep=4), run_layer, case, "s1")):
        assert all(torch.isfinite(gradient).all() for gradient in found["gradients"].values())
        assert torch.isfinite(found["output"]).all()
        idle = found["gradients"]["experts.weight1"][0 if rank else 1 :]
        assert idle.abs().max() == 0


STARTS = (
    "start_exchange",
    "start_exchange_uneven",
    "start_gather_stack",
    "start_scatter_sum",
    "start_sum_over",
    "sum_over_",
)
EMPTY = {
    "no row at all": Case(factor=None, skew=60.0, topk=1, pre_softmax=True),
    "packed": Case(factor=0.5, skew=60.0, topk=2),
    "padded": Case(factor=0.5, skew=60.0, topk=1, pre_softmax=True, padded=True),
}


def _has_slots_where_needed(layout: Layout, case: str, schedule: str, frozen: str, chunks: int) -> bool:
    if schedule == "deepspeed" and layout.esp not in (1, layout.tp):
        return False
    return schedule in ("baseline", "s1", "s1h") or EMPTY[case].factor is not None


def _collectives_of(ctx: ParallelContext, case: Case, schedule: str, frozen: str, chunks: int) -> list[str]:
    """What this rank starts on axes of several ranks, forward and backward, in order."""
    layer, _ = build_layer(ctx, case, schedule, chunks)
    x, gradient = inputs_of(case, ctx.dp.rank)
    x.requires_grad_(frozen != "input")
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(not frozen or not name.startswith(frozen))
    told: list[str] = []

    def telling(name: str) -> Callable[..., transport.Flight]:
        original = getattr(transport, name)

        def start(x: Tensor, axis: Axis, *splits: list[int]) -> transport.Flight:
            if axis.size > 1:
                told.append(f"{name} {axis.name}")
            flight: transport.Flight = original(x, axis, *splits)
            return flight

        return start

    with patch.multiple(transport, **{name: telling(name) for name in STARTS}):
        output = layer(x)
        told.append("backward")
        output.backward(gradient)
    assert (x.grad is None) == (frozen == "input")
    for name, parameter in layer.named_parameters():
        assert (parameter.grad is None) == bool(frozen and name.startswith(frozen)), name
    return told


@pytest.mark.cover(
    layout=[
        Layout(2, ep=2),
        Layout(4, ep=4),
        Layout(4, esp=2, ep=2),
        Layout(4, tp=2, esp=2, ep=2),
        Layout(8, tp=4, ep=4),
    ],
    case=EMPTY,
    schedule=ALL,
    frozen=["", "input", "experts", "router"],
    chunks=[1, 2, 4],
    where=_has_slots_where_needed,
)
def test_every_rank_starts_the_same_collectives_in_the_same_order(
    pools: Pools, layout: Layout, case: str, schedule: str, frozen: str, chunks: int
) -> None:
    """Whatever a rank has: none of the rows, or nothing before it that wants a gradient (FC-25). Reference: rank 0."""
    found = pools.run(layout, _collectives_of, EMPTY[case], schedule, frozen, chunks)
    assert all(told == found[0] for told in found)
    forward, backward = " ".join(found[0]).split("backward")
    assert "exchange" in forward and "exchange" in backward


def _shapes_in_turn(
    ctx: ParallelContext, case: Case, schedule: str, chunks: int
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(output, input gradient, router gradient) of training, evaluation of another shape, and training again."""
    layer, _ = build_layer(ctx, case, schedule, chunks)
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


@pytest.mark.cover(layout=[Layout(1), Layout(4, tp=2, esp=2, ep=2)], schedule=ALL, chunks=[1, 3])
def test_another_shape_between_two_steps_changes_nothing(
    pools: Pools, layout: Layout, schedule: str, chunks: int
) -> None:
    """FC-30: nothing is sized once. The steps before and after are bitwise equal, evaluation equals the naive layer."""
    case = Case(balance=0.0, z=0.0)
    for rank, found in enumerate(pools.run(layout, _shapes_in_turn, case, schedule, chunks)):
        for first, third in zip(found[0], found[2], strict=True):
            assert torch.equal(first, third)
        column = inputs_of(case, layout.grid.coordinate("dp", rank))[0][:, :1]
        for (output, _, _), batch in zip(found, (2, 1, 2, 3, 1), strict=True):
            expected = _naive(column.repeat(1, batch, 1), case, case.factor)
            torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)


def _repeated(ctx: ParallelContext, case: Case, schedule: str, chunks: int, repeats: int) -> bool:
    runs: list[dict[str, Any]] = [run_layer(ctx, case, schedule, "", chunks) for _ in range(repeats)]
    return all(
        torch.equal(run["output"], runs[0]["output"])
        and all(torch.equal(run["gradients"][name], gradient) for name, gradient in runs[0]["gradients"].items())
        for run in runs
    )


@pytest.mark.parametrize("schedule", ALL)
@pytest.mark.parametrize("chunks", [1, 4])
def test_repeats_are_bitwise_equal(pools: Pools, schedule: str, chunks: int) -> None:
    """FC-30: no race between buffers in flight."""
    assert all(pools.run(Layout(4, tp=2, esp=2, ep=2), _repeated, Case(factor=0.7), schedule, chunks, 10))


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


def test_s1_and_s1h_refuse_tokens_that_do_not_divide(pools: Pools) -> None:
    """Never fewer tokens (FC-30): entrances refuse such shapes, and the layer does too."""
    with pytest.raises(WorkerError, match="not divisible by the 2 ranks of axis tp"):
        pools.run(Layout(2, tp=2), _evaluate, Case(sequence=7, batch=1), "s1")
    with pytest.raises(WorkerError, match="not divisible by the 2 ranks of axis tp"):
        pools.run(Layout(2, tp=2), _evaluate, Case(sequence=7, batch=1), "s1h")
    for schedule in ("baseline", "s2", "s2h", "deepspeed"):
        case = Case(sequence=7, batch=1)
        for output in pools.run(Layout(2, tp=2), _evaluate, case, schedule):
            torch.testing.assert_close(output, _naive(inputs_of(case, 0)[0], case, case.factor), rtol=1e-12, atol=1e-12)
