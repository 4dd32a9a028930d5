"""What one rank keeps of a forward pass, in closed form: bytes by kind, and the peak of a step. Floor 6.

Counted is what autograd saves of each operator of `layers/` and `moe/`, tensor by tensor, so the result is that of this
code and not of transformers in general. Routing is taken as even. Source of the idea: Korthikanti et al. 2022, section
4.1; the terms are this package's own, compared with a CPU's storages by tests/models/test_memory.py.
"""

from dataclasses import dataclass
from math import ceil, comb

from megatron_parm.config.moe import MoEConfig
from megatron_parm.config.run import RunConfig
from megatron_parm.layers.feed_forward import gates_of
from megatron_parm.models.shape import ModelShape
from megatron_parm.moe.routing import capacity_of
from megatron_parm.parallel.context import ParallelContext

WIDE = 4  # bytes of float32, in which 16-bit models have logits and router scores
SLOTS = ("deepspeed", "s2", "s2h")  # schedules that cut slots over tp and so have padded buckets
SLICES = ("s1", "s1h", "s1n")  # schedules whose gate sees a slice of the tokens


@dataclass(frozen=True)
class ActivationBytes:
    """Of one rank, in bytes. dense: kept of attention, dense layers, norms and residuals by all micro-batches that are
    under way; moe: the same of the MoE layers' buckets and experts. head: what the loss adds; work: what backward makes
    for one layer while the others are kept."""

    dense: int
    moe: int
    head: int
    work: int

    @property
    def peak(self) -> int:
        """The most that is alive at once: as the loss is computed, or as backward begins its first layer."""
        return self.dense + self.moe + max(self.head, self.work)


@dataclass(frozen=True)
class _Sizes:
    """Bytes of the tensors that come up often: `residual` [s/tp or s, b, h], `whole` [s, b, h]."""

    tokens: int
    length: int
    width: int
    residual: int
    whole: int


def activation_bytes(
    config: RunConfig, shape: ModelShape, ctx: ParallelContext, *, schedule: str | None, num_micro_batches: int
) -> ActivationBytes:
    """What this rank keeps. `schedule`: of its MoE layers; num_micro_batches: of a step."""
    tokens = config.data.seq_length * config.training.micro_batch_size
    width = {"fp32": 4, "fp64": 8}.get(config.training.precision, 2)
    stream = max(width, WIDE) if shape.residual_in_fp32 else width
    sliced = ctx.tp.size if config.parallel.sequence_parallel else 1
    hidden = tokens * shape.hidden_size
    sizes = _Sizes(tokens, config.data.seq_length, width, hidden // sliced * stream, hidden * width)
    parts = config.parallel.stages(shape.num_layers)[ctx.pp.rank :: ctx.pp.size]
    layers = [layer for part in parts for layer in part]
    pattern = config.moe_layers
    by_kind = {is_moe: _layer_bytes(config, shape, ctx, sizes, schedule if is_moe else None) for is_moe in set(pattern)}
    dense = sum(by_kind[pattern[layer]][0] for layer in layers)
    moe = sum(by_kind[pattern[layer]][1] for layer in layers)
    fullest = max(sum(by_kind[pattern[layer]]) for layer in layers)
    again = 0  # made once more in backward, one group of layers at a time
    recompute = config.recompute
    if recompute.is_full:
        group = recompute.recompute_num_layers or 1
        number = len(layers) if recompute.recompute_method != "block" else min(group, len(layers))
        share = 1 - number / len(layers)
        groups = ceil(number / group) if recompute.recompute_method != "block" else number
        dense, moe = int(dense * share) + groups * sizes.residual, int(moe * share)
        # by groups: one whole group; by blocks the layers that keep everything are through backward before the others
        again = fullest * group if recompute.recompute_method != "block" else (fullest if number == len(layers) else 0)
    else:
        again = max(_recomputed(config, shape, ctx, sizes, schedule if is_moe else None) for is_moe in set(pattern))
    under_way = _under_way(config, ctx, num_micro_batches, len(parts))
    is_last, is_first = shape.num_layers - 1 in layers, 0 in layers
    ports = 2 * len(parts) - is_first - is_last if ctx.pp.size > 1 else 0
    wire = ports * (num_micro_batches + 1) * sizes.residual  # torch's stages have a buffer for each that will arrive
    ends = (sizes.residual if is_first else 0) + (_norm_bytes(shape, ctx, sizes) if is_last else 0)
    if is_first and shape.hidden_dropout:
        ends += sizes.residual
    head, tied = _head_bytes(shape, ctx, sizes) if is_last else (0, 0)
    if is_last and sliced > 1:  # of backward: hidden states joined again, their gradient's parts sent and received
        head += 3 * sizes.whole + sizes.residual
    work = max(_work_bytes(config, shape, ctx, sizes, schedule if is_moe else None) for is_moe in set(pattern))
    return ActivationBytes(
        dense=int((dense + ends) * under_way) + wire, moe=int(moe * under_way), head=head, work=work + again + tied
    )


def _layer_bytes(
    config: RunConfig, shape: ModelShape, ctx: ParallelContext, sizes: _Sizes, schedule: str | None
) -> tuple[int, int]:
    """(attention, norms, residuals and a dense feed-forward; experts and what goes to them) of one layer."""
    modules = config.recompute.modules
    kept = 2 * sizes.residual  # the residual after each half
    if "layernorm" not in modules:
        kept += 2 * _norm_bytes(shape, ctx, sizes)
    elif shape.normalisation == "RMSNorm":
        kept += 2 * (_norm_bytes(shape, ctx, sizes) - sizes.residual)
    kept += _attention_bytes(shape, ctx, sizes, keeps_core="core_attn" not in modules)
    if shape.hidden_dropout:
        kept += 2 * sizes.residual  # their scales
    if schedule is None:
        width = 0 if "mlp" in modules else shape.ffn_hidden_size
        return kept + _feed_forward_bytes(shape, width, sizes.tokens, sizes.width) // ctx.tp.size, 0
    return kept, _moe_bytes(config, shape, ctx, sizes, schedule)


def _norm_bytes(shape: ModelShape, ctx: ParallelContext, sizes: _Sizes) -> int:
    """The output of a norm, and of an RMSNorm on a CPU the float32 steps that torch composes it of."""
    if shape.normalisation != "RMSNorm" or ctx.device.type != "cpu":
        return sizes.residual
    if sizes.width >= WIDE:
        return 2 * sizes.residual
    return 2 * sizes.residual * WIDE // sizes.width


def _attention_bytes(shape: ModelShape, ctx: ParallelContext, sizes: _Sizes, *, keeps_core: bool) -> int:
    head = sizes.tokens * shape.head_dim * sizes.width // ctx.tp.size  # one head, on average over tp
    heads, groups = shape.num_attention_heads, shape.num_query_groups
    kept = (heads + 2 * groups) * head  # the fused projection
    if shape.positions == "rope":
        kept += (heads + groups) * head
    if shape.has_norm_of_heads:
        kept += (heads + groups) * head
    if heads != groups:
        kept += heads * head  # keys and values of groups, written out for each query
    kept += heads * head  # the result, which the output projection needs in any case
    if keeps_core and shape.attention_dropout and ctx.device.type == "cpu":  # no fused kernel: s x s weights
        kept += 3 * heads * sizes.tokens * sizes.length * sizes.width // ctx.tp.size + 2 * heads * head
    elif keeps_core:
        kept += heads * sizes.tokens * WIDE // ctx.tp.size  # log of sums
    return kept


def _feed_forward_bytes(shape: ModelShape, ffn: int, rows: int, width: int) -> int:
    """Of `rows` rows: what the first product gives, and what the activation makes of it."""
    gates = gates_of(shape.activation)
    return rows * ffn * width * (4 if gates == 2 else 2)


def _moe_bytes(config: RunConfig, shape: ModelShape, ctx: ParallelContext, sizes: _Sizes, schedule: str) -> int:
    moe = config.moe
    assert moe is not None
    routed, rows = _rows(config, ctx, sizes, schedule)
    expert_width = 0 if "moe" in config.recompute.modules else config.expert_size // ctx.esp.size
    row = shape.hidden_size * sizes.width
    kept = _feed_forward_bytes(shape, expert_width, rows, sizes.width) + rows * row
    scores = 4 * routed // moe.moe_router_topk * moe.num_experts * WIDE  # logits and what the losses make of them
    seen = sizes.tokens // (ctx.tp.size if schedule in SLICES else 1)
    kept += scores
    if schedule == "s1n":  # outputs, the same weighted, and the rows that travel, there and back: one a token and node
        kept += 2 * rows * row + 2 * int(seen * _nodes_reached(moe, ctx)) * row
    else:
        kept += routed * row + seen * moe.moe_router_topk * row  # own results, gathered
    shared = moe.moe_shared_expert_intermediate_size or 0
    if "shared_experts" in config.recompute.modules:
        shared = 0
    return kept + _feed_forward_bytes(shape, shared, sizes.tokens, sizes.width) // ctx.tp.size


def _nodes_reached(moe: MoEConfig, ctx: ParallelContext) -> float:
    """Nodes that a token has experts on: even routing."""
    nodes = ctx.between.size
    each = moe.num_experts // nodes
    return nodes * (1 - comb(moe.num_experts - each, moe.moe_router_topk) / comb(moe.num_experts, moe.moe_router_topk))


def _rows(config: RunConfig, ctx: ParallelContext, sizes: _Sizes, schedule: str) -> tuple[int, int]:
    """(choices that this rank's gate sends out, rows that its experts work on): even routing."""
    moe = config.moe
    assert moe is not None
    seen = sizes.tokens // ctx.tp.size if schedule in SLICES else sizes.tokens
    sources = ctx.esp.size if schedule == "baseline" else 1
    capacity = capacity_of(seen, moe.num_experts, moe.moe_router_topk, moe.capacity_factor, moe.moe_min_capacity)
    buckets = seen * moe.moe_router_topk
    if capacity is not None and (schedule in SLOTS or moe.moe_pad_expert_input_to_capacity):
        buckets = capacity * moe.num_experts
    elif capacity is not None:
        buckets = min(buckets, capacity * moe.num_experts)
    cut = ctx.tp.size if schedule in SLOTS else 1
    return seen * moe.moe_router_topk * sources, buckets * ctx.esp.size // cut


def _recomputed(config: RunConfig, shape: ModelShape, ctx: ParallelContext, sizes: _Sizes, schedule: str | None) -> int:
    """What selective recomputation makes again for the layer that is in backward."""
    modules = config.recompute.modules
    if schedule is None:
        made = _feed_forward_bytes(shape, shape.ffn_hidden_size, sizes.tokens, sizes.width) // ctx.tp.size
        return made if "mlp" in modules else 0
    if "moe" not in modules:
        return 0
    _, rows = _rows(config, ctx, sizes, schedule)
    return _feed_forward_bytes(shape, config.expert_size // ctx.esp.size, rows, sizes.width)


def _work_bytes(config: RunConfig, shape: ModelShape, ctx: ParallelContext, sizes: _Sizes, schedule: str | None) -> int:
    """Gradients of one feed-forward's inner width and of its largest weight."""
    gates = gates_of(shape.activation)
    if schedule is None:
        ffn = shape.ffn_hidden_size // ctx.tp.size
        return (sizes.tokens * ffn * gates + shape.hidden_size * ffn * gates) * sizes.width
    moe = config.moe
    assert moe is not None
    _, rows = _rows(config, ctx, sizes, schedule)
    ffn = config.expert_size // ctx.esp.size
    weights = moe.num_experts // ctx.ep.size * shape.hidden_size * ffn * gates
    return (rows * ffn * gates + weights) * sizes.width


def _head_bytes(shape: ModelShape, ctx: ParallelContext, sizes: _Sizes) -> tuple[int, int]:
    """(the most that logits and their gradients take, what of it stays until the embedding's backward)."""
    columns = shape.padded_vocab_size // ctx.tp.size
    weight = columns * shape.hidden_size * sizes.width
    logits = sizes.tokens * columns * max(sizes.width, WIDE)
    narrow = sizes.tokens * columns * sizes.width  # the gradient in 16 bits, beside the exponentials
    most = logits + (weight + sizes.whole if sizes.width >= WIDE else max(narrow, narrow - logits + weight))
    return most, weight if shape.ties_embeddings and ctx.pp.size == 1 else 0


def _under_way(config: RunConfig, ctx: ParallelContext, num_micro_batches: int, parts: int) -> float:
    """Micro-batches whose activations a rank keeps at once, in units of all its layers."""
    pp, rank = ctx.pp.size, ctx.pp.rank
    if pp == 1:
        return 1
    if parts == 1:
        return min(num_micro_batches, pp - rank)
    return min(num_micro_batches * parts, (pp - rank - 1) * 2 + (parts - 1) * pp + 1) / parts
