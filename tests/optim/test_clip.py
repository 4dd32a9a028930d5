"""The norm counts every parameter once on every layout. Reference: torch.nn.utils on the full tensors of the model."""

import math

import pytest
import torch
from torch import Tensor, nn

from megatron_parm.grads.buffer import GradientBuffers
from megatron_parm.optim.clip import (
    CHUNK_ELEMENTS,
    clip_gradients,
    count_zeros,
    gradient_norm,
    parameter_norm,
    squared_sum,
)
from megatron_parm.optim.precision import MasterWeights
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.sharding import Cut, make_parameter, spec_of
from tests.harness.layouts import MOE_LAYOUTS, Layout, every_layout
from tests.harness.pools import Pools

EXPERTS, WIDTH, HIDDEN = 8, 8, 5
STAGES = 2
TOLERANCE = 1e-12  # float64 rounding; the contract of the norm is 1e-9


def _full_tensors() -> dict[str, Tensor]:
    """Gradients of a model of two stages; a tenth of the elements is zero."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for stage in range(STAGES):
        for name, shape in (
            ("norm", (HIDDEN,)),
            ("column", (WIDTH, HIDDEN)),
            ("row", (HIDDEN, WIDTH)),
            ("router", (EXPERTS, HIDDEN)),
            ("weight1", (EXPERTS, WIDTH, HIDDEN)),
            ("bias2", (EXPERTS, HIDDEN)),
        ):
            values = torch.randn(shape, generator=generator, dtype=torch.float64)
            found[f"{stage}.{name}"] = values * (torch.rand(shape, generator=generator) > 0.1)
    return found


def _shards(ctx: ParallelContext) -> dict[str, nn.Parameter]:
    """This rank's parameters: those of its stage, or of both without pipeline. Values: the full tensors' boxes."""
    cuts = {
        "column": (Cut(0, ctx.tp),),
        "row": (Cut(1, ctx.tp),),
        "weight1": (Cut(0, ctx.ep), Cut(1, ctx.esp)),
        "bias2": (Cut(0, ctx.ep),),  # on every esp rank
    }
    made = {}
    for name, full in _full_tensors().items():
        stage, kind = name.split(".")
        if ctx.pp.size == 1 or ctx.pp.rank == int(stage):
            role = "expert" if kind in ("weight1", "bias2") else "dense"
            shape = tuple(full.shape)
            made[name] = make_parameter(shape, *cuts.get(kind, ()), role=role, dtype=full.dtype, device=ctx.device)
            made[name].data.copy_(full[spec_of(made[name]).box])
    return made


def _buffers(ctx: ParallelContext) -> GradientBuffers:
    shards = _shards(ctx)
    buffers = GradientBuffers(shards, ctx)
    for name, shard in shards.items():
        buffers.gradient_of(name).copy_(shard.detach())
    return buffers


def _clipped_reference(max_norm: float) -> tuple[float, dict[str, Tensor]]:
    full = {name: nn.Parameter(torch.zeros_like(value)) for name, value in _full_tensors().items()}
    for name, value in _full_tensors().items():
        full[name].grad = value
    norm = torch.nn.utils.clip_grad_norm_(full.values(), max_norm)
    return norm.item(), {name: p.grad for name, p in full.items() if p.grad is not None}


def _measure(ctx: ParallelContext, max_norm: float) -> tuple[float, float, int, float]:
    """(norm, largest difference of a clipped gradient from the reference, zeros, norm of the weights)."""
    buffers = _buffers(ctx)
    zeros = count_zeros(buffers, ctx)
    norm = clip_gradients(buffers, ctx, max_norm)
    _, expected = _clipped_reference(max_norm)
    differences = [
        (buffers.gradient_of(name) - expected[name][spec_of(shard).box]).abs().max().item()
        for name, shard in buffers.parameters.items()
    ]
    return norm, max(differences), zeros, parameter_norm(MasterWeights(buffers.parameters), ctx)


LAYOUTS = [*MOE_LAYOUTS, Layout(4, pp=2, ep=2), Layout(8, pp=2, tp=2, ep=2), Layout(8, pp=2, tp=2, esp=4)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_norm_and_clipping_equal_torch_on_the_full_model(pools: Pools, layout: Layout) -> None:
    full = _full_tensors()
    zeros = sum(int((value == 0).sum()) for value in full.values())
    weights = math.sqrt(sum(value.square().sum().item() for value in full.values()))
    expected, _ = _clipped_reference(1.0)
    results = pools.run(layout, _measure, 1.0)
    assert len({(norm, weight_norm) for norm, _, _, weight_norm in results}) == 1, "ranks must agree to the last bit"
    for norm, difference, counted, weight_norm in results:
        assert norm == pytest.approx(expected, rel=TOLERANCE)
        assert difference < TOLERANCE
        assert counted == zeros
        assert weight_norm == pytest.approx(weights, rel=TOLERANCE)


@pytest.mark.full
@pytest.mark.parametrize("layout", list(every_layout((2, 4, 8))), ids=str)
def test_norm_on_every_layout(pools: Pools, layout: Layout) -> None:
    expected, _ = _clipped_reference(1.0)
    for norm, *_ in pools.run(layout, _measure, 1.0):
        assert norm == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize("max_norm", [0.0, 1e-3, 1.0, 1e6], ids=str)
def test_limits(max_norm: float) -> None:
    """0 and a limit above the norm leave the gradients as they are."""
    ctx = ParallelContext.single()
    buffers = _buffers(ctx)
    norm = clip_gradients(buffers, ctx, max_norm)
    clipped = gradient_norm(buffers, ctx)
    if max_norm in (0.0, 1e6):
        assert clipped == norm
    else:
        assert clipped == pytest.approx(max_norm, rel=1e-5)  # CLIP_EPSILON / norm


def _norm_counting_replicas(ctx: ParallelContext) -> float:
    total = sum(squared_sum(buffer.data) for buffer in _buffers(ctx).buffers)
    assert isinstance(total, Tensor)
    if ctx.world.size > 1:
        torch.distributed.all_reduce(total, group=ctx.world.group)
    return math.sqrt(total.item())


@pytest.mark.parametrize("layout", [Layout(2, tp=2), Layout(2, ep=2), Layout(2, esp=2)], ids=str)
def test_control_counting_replicas_is_detected(pools: Pools, layout: Layout) -> None:
    expected, _ = _clipped_reference(1.0)
    for norm in pools.run(layout, _norm_counting_replicas):
        assert norm > expected * 1.01


def _poison(ctx: ParallelContext, rank: int, name: str, value: float) -> tuple[float, bool]:
    buffers = _buffers(ctx)
    if ctx.rank == rank:
        buffers.gradient_of(name).view(-1)[-1] = value
    before = [buffer.data.clone() for buffer in buffers.buffers]
    norm = clip_gradients(buffers, ctx, 1.0)
    same = all(
        torch.equal(a.nan_to_num(7.0), b.data.nan_to_num(7.0)) for a, b in zip(before, buffers.buffers, strict=True)
    )
    return norm, same


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["0.norm", "1.bias2"])
def test_a_gradient_that_is_not_finite_on_any_rank_is_seen_by_all(pools: Pools, name: str, value: float) -> None:
    """Every rank in turn, also those that hold a replica which is not counted."""
    for rank in range(4):
        for norm, gradients_are_untouched in pools.run(Layout(4, tp=2, esp=2), _poison, rank, name, value):
            assert not math.isfinite(norm)
            assert gradients_are_untouched


def test_float32_squares_are_added_in_float64() -> None:
    """Reference: Python's exact sum. A float32 sum of this many terms is off by more than 1e-7."""
    values = torch.rand(3 * CHUNK_ELEMENTS + 5, generator=torch.Generator().manual_seed(0)) + 0.5
    exact = math.fsum(value * value for value in values.tolist())
    assert squared_sum(values).item() == pytest.approx(exact, rel=1e-13)
    assert squared_sum(torch.full((10,), 1e30)).item() == pytest.approx(1e61, rel=1e-6)  # would overflow in float32
    assert squared_sum(torch.empty(0)).item() == 0
