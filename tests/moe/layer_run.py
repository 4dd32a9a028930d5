"""Runs one MoE layer, forward and backward, on every rank of a layout, and joins what the ranks hold."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_parm.layers.initialise import Initialiser, attach, initialise_weights
from megatron_parm.moe.experts import Experts
from megatron_parm.moe.gate import Gate, GateSettings
from megatron_parm.moe.layer import MoELayer
from megatron_parm.moe.losses import BackwardScale
from megatron_parm.moe.record import RoutingRecord
from megatron_parm.moe.schedules import STARTS_FROM_SLICES
from megatron_parm.moe.shared_expert import SharedExpert
from megatron_parm.parallel import transport
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.sharding import spec_of
from tests.harness.layouts import Layout
from tests.harness.pools import Pools
from tests.moe.naive import NaiveResult, NaiveRouter, naive_moe

PLAIN = NaiveRouter()


@dataclass(frozen=True)
class Case:
    """A small layer. f = E / k drops nothing; None is dropless."""

    factor: float | None = 4.0
    num_experts: int = 8
    topk: int = 2
    hidden: int = 8
    ffn: int = 8
    sequence: int = 8
    batch: int = 2
    policy: str = "probs"
    pre_softmax: bool = False
    gated: bool = False
    bias: bool = True
    minimum: int = 1
    padded: bool = False
    skew: float = 0.0  # added to expert 0's scores through a constant feature
    sequence_parallel: bool = False
    balance: float = 0.3
    z: float = 0.05
    dtype: torch.dtype = torch.float64
    router: NaiveRouter = PLAIN
    jitter: float | None = None
    shared: int | None = None  # width of the shared expert
    shared_gate: bool = False
    padding: int = 0  # tokens of the micro-batch that are none, the first sequence's last ones first


def build_layer(ctx: ParallelContext, case: Case, schedule: str, chunks: int = 1) -> tuple[MoELayer, RoutingRecord]:
    record = RoutingRecord()
    common: dict[str, Any] = {"initialiser": Initialiser("normal", 0.7), "dtype": case.dtype, "device": ctx.device}
    settings = GateSettings(
        num_experts=case.num_experts,
        topk=case.topk,
        capacity_factor=case.factor,
        eval_capacity_factor=case.factor,
        min_capacity=case.minimum,
        drop_policy=case.policy,  # type: ignore[arg-type]
        pads_to_capacity=case.padded,
        pre_softmax=case.pre_softmax,
        balance_coefficient=case.balance if "aux_loss" in case.router.balancing else None,
        z_coefficient=case.z,
        router_dtype=torch.float32,
        balancing=case.router.balancing,  # type: ignore[arg-type]
        score_function=case.router.score,  # type: ignore[arg-type]
        num_groups=case.router.groups and case.router.groups[0],
        group_topk=case.router.groups and case.router.groups[1],
        scaling=None if case.router.scaling == 1 else case.router.scaling,
        jitter=case.jitter,
        has_expert_bias=case.router.bias is not None,
        forces_balance=case.router.forced,
    )
    gate = Gate(
        case.hidden,
        settings,
        layer=0,
        tp=ctx.tp,
        scale=BackwardScale(),
        record=record,
        generator=jitter_stream(ctx.dp.rank),
        **common,
    )
    experts = Experts(
        case.hidden,
        case.ffn,
        case.num_experts,
        activation="swiglu" if case.gated else "gelu",
        bias=case.bias,
        ep=ctx.ep,
        esp=ctx.esp,
        output_initialiser=common["initialiser"],
        **common,
    )
    shared = None
    if case.shared is not None:
        shared = SharedExpert(
            case.hidden,
            case.shared,
            activation="swiglu" if case.gated else "gelu",
            is_gated=case.shared_gate,
            tp=ctx.tp,
            bias=case.bias,
            output_initialiser=common["initialiser"],
            sequence_parallel=case.sequence_parallel,
            **common,
        )
    layer = MoELayer(
        gate,
        experts,
        schedule=schedule,
        chunks=chunks,
        sequence_parallel=case.sequence_parallel,
        ctx=ctx,
        shared_expert=shared,
    )
    for parameter in layer.parameters():
        attach(parameter, Initialiser("normal", 0.7))
    initialise_weights(layer, 5)
    with torch.no_grad():
        gate.weight[0, 0] += case.skew
        if gate.expert_bias is not None:
            gate.expert_bias.copy_(torch.tensor(case.router.bias))
    return layer, record


def jitter_stream(dp_rank: int) -> torch.Generator:
    """The stream of a data-parallel rank, alike on its tp peers."""
    return torch.Generator().manual_seed(900 + dp_rank)


def inputs_of(case: Case, dp_rank: int) -> tuple[Tensor, Tensor]:
    """The micro-batch of a data-parallel rank and the gradient that reaches its output: `[s, b, h]`."""
    generator = torch.Generator().manual_seed(100 + dp_rank)
    shape = (case.sequence, case.batch, case.hidden)
    x, gradient = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    if case.skew:
        x[..., 0] = 1
    return x.to(case.dtype), gradient.to(case.dtype)


def text_of(case: Case, dp_rank: int) -> Tensor | None:
    """[s, b], False for padding: at the ends of both sequences, twice as much in one, which differs by rank."""
    if not case.padding:
        return None
    is_text = torch.ones(case.sequence, case.batch, dtype=torch.bool)
    more = case.padding * 2 // 3
    for column, number in ((dp_rank % 2, more), (1 - dp_rank % 2, case.padding - more)):
        is_text[case.sequence - number :, column] = False
    return is_text


def reduce_gradients(ctx: ParallelContext, layer: MoELayer, faults: str = "") -> dict[str, Tensor]:
    """Dense over dp, experts over edp, both divided by dp; `faults` names a wrong rule on purpose."""
    reduced = {}
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        is_expert = spec_of(parameter).role == "expert"
        axis = ctx.edp if is_expert and faults != "experts over dp" else ctx.dp
        divisor = ctx.edp.size if is_expert and faults == "experts by edp" else ctx.dp.size
        gradient = parameter.grad
        if spec_of(parameter).is_partial_on_tp and faults != "slices not summed":
            gradient = transport.sum_over(gradient, ctx.tp)
        reduced[name] = transport.sum_over(gradient, axis) / divisor
    return reduced


def run_layer(ctx: ParallelContext, case: Case, schedule: str, faults: str = "", chunks: int = 1) -> dict[str, Any]:
    layer, record = build_layer(ctx, case, schedule, chunks)
    if faults == "router not summed":
        layer.router._logits = lambda tokens, shared_over, segments: Gate._logits(  # type: ignore[method-assign]
            layer.router, tokens, None, segments
        )
    if faults == "sequences not summed":
        layer.router._start_counting = (
            lambda *given: Gate._start_counting(  # type: ignore[method-assign]
                layer.router, *given[:-1], None
            )
        )
    if faults == "sequences cut at 0":
        layer.router._start_counting = lambda logits, e, part, *rest: Gate._start_counting(  # type: ignore[method-assign]
            layer.router, logits, e, replace(part, first=0), *rest
        )
    if faults == "own jitter":
        layer.router._generator = torch.Generator().manual_seed(ctx.rank)
    if faults == "own sinkhorn":
        layer.router._even_shares = lambda logits, part, *_: Gate._even_shares(  # type: ignore[method-assign]
            layer.router, logits, part, None
        )
    x, gradient = inputs_of(case, ctx.dp.rank)
    is_text = text_of(case, ctx.dp.rank)
    if faults == "padding is text":
        is_text = None
    if faults == "padding by slice" and is_text is not None:  # as if the mask were cut as the tokens are
        is_text = is_text.roll(case.sequence // 2, 0)
    if case.sequence_parallel:
        x, gradient = (part.chunk(ctx.tp.size)[ctx.tp.rank].clone() for part in (x, gradient))
    x.requires_grad_()
    output = layer(x, is_text)
    output.backward(gradient)
    summary = record.summarise(ctx, case.topk)
    assert summary is not None
    return {
        "dp": ctx.dp.rank,
        "tp": ctx.tp.rank,
        "output": output.detach(),
        "input_gradient": x.grad,
        "gradients": reduce_gradients(ctx, layer, faults),
        "boxes": {name: spec_of(p).box for name, p in layer.named_parameters()},
        "shapes": {name: spec_of(p).global_shape for name, p in layer.named_parameters()},
        "summary": replace(summary, counts=summary.counts.double()),
    }


@dataclass
class Reference:
    """What one process computes: each data-parallel rank's micro-batch on its own."""

    results: list[NaiveResult]
    outputs: list[Tensor]
    input_gradients: list[Tensor]
    gradients: dict[str, Tensor]


def reference(case: Case, dp_size: int, slices: int = 1) -> Reference:
    layer, _ = build_layer(ParallelContext.single(), case, "s1")
    weights = {name: p.detach().clone().requires_grad_() for name, p in layer.named_parameters()}
    results, outputs, input_gradients = [], [], []
    for dp_rank in range(dp_size):
        x, gradient = inputs_of(case, dp_rank)
        tokens = x.flatten(0, 1).requires_grad_()
        result = naive_moe(
            tokens,
            weights,
            topk=case.topk,
            factor=case.factor,
            minimum=case.minimum,
            pre_softmax=case.pre_softmax,
            policy=case.policy,
            slices=slices,
            gated=case.gated,
            router=case.router,
            batch=case.batch,
            noise=_noise(case, dp_rank),
            is_text=None if (is_text := text_of(case, dp_rank)) is None else is_text.flatten().tolist(),
        )
        loss = (result.output * gradient.flatten(0, 1)).sum()
        if "aux_loss" not in case.router.balancing:
            result.balance_loss = torch.zeros_like(result.balance_loss)
        (loss + case.balance * result.balance_loss + case.z * result.z_loss).backward()
        results.append(result)
        outputs.append(result.output.detach().view_as(x))
        assert tokens.grad is not None
        input_gradients.append(tokens.grad.view_as(x))
    zeros = {name: torch.zeros_like(w) for name, w in weights.items()}
    gradients = {name: (zeros[name] if w.grad is None else w.grad) / dp_size for name, w in weights.items()}
    return Reference(results, outputs, input_gradients, gradients)


def _noise(case: Case, dp_rank: int) -> Tensor | None:
    if case.jitter is None:
        return None
    shape = (case.sequence * case.batch, case.hidden)
    noise = torch.empty(shape, dtype=torch.float64)
    return noise.uniform_(1 - case.jitter, 1 + case.jitter, generator=jitter_stream(dp_rank)).to(case.dtype)


def largest_difference(
    pools: Pools,
    layout: Layout,
    case: Case,
    schedule: str,
    faults: str = "",
    chunks: int = 1,
    other: Case | None = None,
) -> float:
    """The largest absolute difference between a layout and one process, over outputs, every gradient and figure.

    All values are of order 1. Replicas on different ranks are each compared. `other`: what the process runs instead.
    """
    grid = layout.grid
    expected = reference(other or case, grid.dp, slices=layout.tp if schedule in STARTS_FROM_SLICES else 1)
    worst = 0.0
    for rank in pools.run(layout, run_layer, case, schedule, faults, chunks):
        wanted_both = expected.outputs[rank["dp"]], expected.input_gradients[rank["dp"]]
        if case.sequence_parallel:
            wanted_both = tuple(wanted.chunk(layout.tp)[rank["tp"]] for wanted in wanted_both)  # type: ignore[assignment]
        pairs = list(zip((rank["output"], rank["input_gradient"]), wanted_both, strict=True))
        for name, gradient in rank["gradients"].items():
            assert rank["shapes"][name] == expected.gradients[name].shape
            pairs.append((gradient, expected.gradients[name][rank["boxes"][name]]))
        summary = rank["summary"]
        choices = grid.dp * (case.sequence * case.batch - case.padding) * case.topk
        counts = torch.tensor([result.counts for result in expected.results]).sum(0).double()
        pairs += [
            (torch.tensor(found, dtype=torch.float64), torch.as_tensor(wanted, dtype=torch.float64))
            for found, wanted in [
                (summary.load_balancing_loss, torch.stack([r.balance_loss for r in expected.results]).mean()),
                (summary.z_loss, torch.stack([r.z_loss for r in expected.results]).mean()),
                (summary.router_entropy, torch.stack([r.entropy for r in expected.results]).mean()),
                (summary.drop_rate, sum(r.dropped for r in expected.results) / choices),
                (summary.max_load, counts.max() / counts.mean()),
            ]
        ]
        pairs.append((summary.counts[0], counts))
        for found, wanted in pairs:
            assert found.shape == wanted.shape
            assert torch.isfinite(found).all()
            worst = max(worst, (found.double() - wanted.double()).abs().max().item())
    return worst
