"""The gate. References: Megatron's rules written out here in float32, and one gate over all tokens."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_parm.layers.initialise import Initialiser, initialise_weights
from megatron_parm.moe.gate import Gate, GateSettings
from megatron_parm.moe.losses import BackwardScale
from megatron_parm.moe.record import RoutingRecord, RoutingSummary
from megatron_parm.moe.routing import Routing
from megatron_parm.parallel.context import Axis, ParallelContext
from tests.harness.layouts import Layout
from tests.harness.pools import Pools

HIDDEN, EXPERTS, TOKENS = 16, 8, 24
SETTINGS = GateSettings(
    num_experts=EXPERTS,
    topk=2,
    capacity_factor=1.5,
    eval_capacity_factor=2.0,
    min_capacity=1,
    drop_policy="probs",
    pads_to_capacity=True,
    pre_softmax=False,
    balance_coefficient=0.3,
    z_coefficient=0.05,
    router_dtype=torch.float32,
)


def make_gate(
    settings: GateSettings, dtype: torch.dtype = torch.float64, tp: Axis | None = None, std: float = 0.7
) -> tuple[Gate, RoutingRecord]:
    record = RoutingRecord()
    gate = Gate(
        HIDDEN,
        settings,
        layer=0,
        tp=Axis.single("tp") if tp is None else tp,
        scale=BackwardScale(),
        record=record,
        initialiser=Initialiser("normal", std),
        dtype=dtype,
        device=torch.device("cpu"),
    )
    initialise_weights(gate, 11)
    return gate, record


def make_tokens(count: int = TOKENS, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("pre_softmax", [False, True])
def test_router_works_in_float32_under_a_bf16_model(pre_softmax: bool) -> None:
    """FC-29. Scores a bf16 ulp apart: the float32 recomputation decides, and in bf16 the choices would collapse."""
    gate, _ = make_gate(replace(SETTINGS, pre_softmax=pre_softmax), torch.bfloat16, std=0.02)
    tokens = make_tokens(512, torch.bfloat16)
    routing = gate(tokens)
    logits = tokens.float() @ gate.weight.float().t()
    if pre_softmax:
        expected_weight, expected = logits.softmax(-1).topk(2)
    else:
        scores, expected = logits.topk(2)
        expected_weight = scores.softmax(-1)
    assert torch.equal(routing.expert, expected)
    assert routing.weight.dtype == torch.float32
    torch.testing.assert_close(routing.weight, expected_weight * routing.kept, rtol=1e-6, atol=0)
    collapsed = (tokens @ gate.weight.t()).topk(2).indices
    assert not torch.equal(collapsed, expected), "the case must be able to fail"


def test_router_precision_is_a_floor() -> None:
    """float64 models keep float64; a float64 router lifts a float32 model."""
    assert make_gate(SETTINGS)[0](make_tokens()).weight.dtype == torch.float64
    lifted, _ = make_gate(replace(SETTINGS, router_dtype=torch.float64), torch.float32)
    assert lifted(make_tokens(dtype=torch.float32)).weight.dtype == torch.float64


def test_post_softmax_weights_sum_to_1_and_pre_softmax_weights_are_probabilities() -> None:
    """Megatron's two orders: the same experts, other weights."""
    no_limit = replace(SETTINGS, capacity_factor=None)
    post, pre = (make_gate(replace(no_limit, pre_softmax=flag))[0] for flag in (False, True))
    tokens = make_tokens()
    first, second = post(tokens), pre(tokens)
    assert torch.equal(first.expert, second.expert)
    torch.testing.assert_close(first.weight.sum(1), torch.ones(TOKENS, dtype=torch.float64), rtol=1e-14, atol=0)
    everything = (tokens @ pre.weight.t()).softmax(-1)
    torch.testing.assert_close(second.weight, everything.gather(1, second.expert), rtol=1e-13, atol=0)
    assert (first.weight[:, 0] >= first.weight[:, 1]).all(), "the best choice comes first"


def test_capacity_follows_the_mode() -> None:
    """ceil(2 * 1.5 * 24 / 8) = 9 in training, ceil(2 * 2 * 24 / 8) = 12 in evaluation, and each may be absent."""
    gate, _ = make_gate(SETTINGS)
    assert gate(make_tokens()).slots == gate.capacity(TOKENS) == 9
    gate.eval()
    assert gate(make_tokens()).slots == gate.capacity(TOKENS) == 12
    dropless, _ = make_gate(replace(SETTINGS, eval_capacity_factor=None))
    assert dropless(make_tokens()).slots == 9
    assert dropless.eval()(make_tokens()).slots is None
    assert gate(make_tokens(), slots_multiple_of=5).slots == 15, "12 slots rounded up"


@pytest.mark.parametrize("chunks", [1, 3])
def test_buckets_are_packed_unless_padding_is_asked_for(chunks: int) -> None:
    """By the setting or by the schedule; the same choices are kept. Without a capacity they are always packed."""
    packed = make_gate(replace(SETTINGS, pads_to_capacity=False, capacity_factor=0.5))[0]
    padded = make_gate(replace(SETTINGS, capacity_factor=0.5))[0]
    first, second = packed(make_tokens(), chunks=chunks), padded(make_tokens(), chunks=chunks)
    asked = packed(make_tokens(), padded=True, chunks=chunks)
    assert first.slots is None and second.slots == asked.slots == 3 // chunks
    assert first.chunks == second.chunks == chunks
    for other in (second, asked):
        assert torch.equal(other.kept, first.kept) and torch.equal(other.weight, first.weight)
    assert not first.kept.all()
    dropless = make_gate(replace(SETTINGS, capacity_factor=None))[0]
    assert dropless(make_tokens(), padded=True, chunks=chunks).slots is None


def test_evaluation_records_nothing_and_has_no_losses() -> None:
    gate, record = make_gate(SETTINGS)
    gate.eval()
    routing = gate(make_tokens())
    assert record.summarise(ParallelContext.single(), 2) is None
    (routing.weight * 0).sum().backward()
    assert gate.weight.grad is not None and gate.weight.grad.abs().max() == 0


def _losses(tokens: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    logits = tokens @ weight.t()
    probabilities = logits.softmax(-1)
    counts = torch.bincount(logits.topk(2).indices.flatten(), minlength=EXPERTS).double()
    n = tokens.shape[0]
    balance = EXPERTS * ((counts / (2 * n)) * probabilities.mean(0)).sum()
    return balance, logits.logsumexp(-1).square().mean()


@pytest.mark.parametrize("coefficients", [(0.3, 0.05), (0.3, None), (None, 0.05), (0.0, None)])
def test_losses_reach_router_and_tokens_and_the_record(coefficients: tuple[float | None, float | None]) -> None:
    """Coefficient None: no loss at all, and 0 in the log; 0: computed for the log alone."""
    gate, record = make_gate(
        replace(SETTINGS, balance_coefficient=coefficients[0], z_coefficient=coefficients[1], capacity_factor=0.5)
    )
    tokens = make_tokens().requires_grad_()
    (gate(tokens).weight * 0).sum().backward()
    twin_tokens, twin_weight = make_tokens().requires_grad_(), gate.weight.detach().clone().requires_grad_()
    balance, z = _losses(twin_tokens, twin_weight)
    ((coefficients[0] or 0) * balance + (coefficients[1] or 0) * z).backward()
    torch.testing.assert_close(gate.weight.grad, twin_weight.grad, rtol=1e-11, atol=1e-15)
    torch.testing.assert_close(tokens.grad, twin_tokens.grad, rtol=1e-11, atol=1e-15)
    summary = record.summarise(ParallelContext.single(), 2)
    assert summary is not None
    assert summary.load_balancing_loss == pytest.approx(0 if coefficients[0] is None else balance.item(), rel=1e-12)
    assert summary.z_loss == pytest.approx(0 if coefficients[1] is None else z.item(), rel=1e-12)
    assert summary.drop_rate > 0


def _cut_over(ctx: ParallelContext, how: str) -> dict[str, Any]:
    """One gate of each rank: of its slice of tokens (shared_over tp), or of all ranks' tokens (segments of esp)."""
    gate, record = make_gate(SETTINGS, tp=ctx.tp)
    tokens = make_tokens()
    slices = tokens.chunk(2)
    if how == "shared":
        mine = slices[ctx.tp.rank].clone().requires_grad_()
        routing = gate(mine, shared_over=ctx.tp)
    else:
        mine = tokens.clone().requires_grad_()
        routing = gate(mine, segments=ctx.esp)
    (routing.weight * 0).sum().backward()
    return {
        "routing": vars(routing),
        "weight_gradient": gate.weight.grad,
        "token_gradient": mine.grad,
        "summary": record.summarise(ctx, 2),
    }


def _check_summary(found: RoutingSummary, expected: RoutingSummary) -> None:
    for name, value in vars(expected).items():
        if name not in ("drop_rate", "counts", "layers"):
            assert getattr(found, name) == pytest.approx(value, rel=1e-12), name
    assert torch.equal(found.counts, expected.counts)


def test_shared_over_equals_one_gate_over_all_tokens(pools: Pools) -> None:
    """Router gradient, token gradients and figures; the capacity is counted in each slice."""
    gate, record = make_gate(SETTINGS)
    tokens = make_tokens().requires_grad_()
    (gate(tokens).weight * 0).sum().backward()
    assert tokens.grad is not None
    expected = record.summarise(ParallelContext.single(), 2)
    assert expected is not None
    for rank, found in enumerate(pools.run(Layout(2, tp=2), _cut_over, "shared")):
        torch.testing.assert_close(found["weight_gradient"], gate.weight.grad, rtol=1e-11, atol=1e-15)
        torch.testing.assert_close(found["token_gradient"], tokens.grad.chunk(2)[rank], rtol=1e-11, atol=1e-15)
        _check_summary(found["summary"], expected)
        alone = make_gate(SETTINGS)[0](make_tokens().chunk(2)[rank])
        for name in ("expert", "row", "kept"):
            assert torch.equal(found["routing"][name], getattr(alone, name))
        assert found["summary"].drop_rate == pytest.approx(_drop_rate(SETTINGS), abs=1e-15)


def _drop_rate(settings: GateSettings) -> float:
    kept = [make_gate(settings)[0](part).kept for part in make_tokens().chunk(2)]
    return 1 - torch.cat(kept).double().mean().item()


def test_segments_route_each_source_as_it_would_alone_and_count_the_own_losses(pools: Pools) -> None:
    for rank, found in enumerate(pools.run(Layout(2, esp=2), _cut_over, "segments")):
        routing = Routing(**found["routing"])
        assert routing.segments == 2
        for segment, part in enumerate(make_tokens().chunk(2)):
            gate, _ = make_gate(SETTINGS)
            own = part.clone().requires_grad_()
            alone = gate(own)
            seen = routing.of_segment(segment)
            assert torch.equal(seen.expert, alone.expert) and torch.equal(seen.kept, alone.kept)
            assert torch.equal(seen.weight, alone.weight), "bit for bit, so that s2 can equal the baseline"
            if segment == rank:
                (alone.weight * 0).sum().backward()
                torch.testing.assert_close(found["weight_gradient"], gate.weight.grad, rtol=1e-11, atol=1e-15)
                assert own.grad is not None
                torch.testing.assert_close(found["token_gradient"].chunk(2)[rank], own.grad, rtol=1e-11, atol=1e-15)
                assert found["token_gradient"].chunk(2)[1 - rank].abs().max() == 0
