"""Floating-point operations of a training step and the throughput that follows. Floor 2.

Counted as Megatron counts "model FLOPs" (Narayanan 2021, appendix; Megatron-Core's `num_floating_point_operations`):
matrix products only, 2 per multiply-add, forward once and backward twice, nothing for recomputed activations, norms,
softmax, the router or the optimizer. An MoE layer counts the k experts a token is sent to, whether or not a full
expert drops it, and the shared expert in full. Causal attention counts half of the score matrix, as Megatron-Core has
since 0.12, and attention within a window the positions inside it; a kernel that computes the others does extra work
that is not counted. Norms of queries and keys are norms: no product, no count.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class TransformerShape:
    """The sizes that set the cost of a token; every width is taken as given, never assumed from another.

    `num_moe_layers` of the `num_layers` have experts of width `moe_ffn_hidden_size` instead of the dense feed-forward.
    `is_gated`: SwiGLU, three matrices instead of two. `vocabulary_rows` is the padded vocabulary. `window`: positions
    before its own that a query sees; None: all. `shared_expert_size`: width of each MoE layer's expert of every token,
    0 for none, which `weighs_shared_expert` by a gate. `has_word_head`: BERT's h x h product before the vocabulary.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_size: int
    seq_length: int
    vocabulary_rows: int
    is_gated: bool = False
    is_causal: bool = True
    num_moe_layers: int = 0
    moe_ffn_hidden_size: int = 0
    moe_topk: int = 0
    window: int | None = None
    shared_expert_size: int = 0
    weighs_shared_expert: bool = False
    has_word_head: bool = False


def positions_seen(shape: TransformerShape) -> float:
    """Positions that a query attends to, on average over a full sequence."""
    length = shape.seq_length
    if shape.window is None or shape.window >= length - 1:
        return length / 2 if shape.is_causal else length
    before = shape.window * (shape.window + 1) / 2 + (length - 1 - shape.window) * shape.window  # over all queries
    return (before + length) / length if shape.is_causal else (before + length * (length + 1) / 2) / length


def attention_flops(shape: TransformerShape) -> float:
    """Forward operations of one attention layer for one token."""
    query_size = shape.num_attention_heads * shape.head_size
    key_size = shape.num_query_groups * shape.head_size
    projections = 2 * shape.hidden_size * (query_size + 2 * key_size) + 2 * query_size * shape.hidden_size
    scores_and_values = 2 * 2 * query_size * positions_seen(shape)
    return projections + scores_and_values


def feed_forward_flops(shape: TransformerShape, width: int) -> float:
    """Forward operations of one feed-forward of this width for one token."""
    matrices = 3 if shape.is_gated else 2
    return 2 * matrices * shape.hidden_size * width


def moe_flops(shape: TransformerShape) -> float:
    """Forward operations of one MoE layer for one token: the experts that are active, and the shared one."""
    chosen = shape.moe_topk * feed_forward_flops(shape, shape.moe_ffn_hidden_size)
    gate = 2 * shape.hidden_size if shape.weighs_shared_expert else 0
    return chosen + feed_forward_flops(shape, shape.shared_expert_size) + gate


def training_flops_per_token(shape: TransformerShape) -> float:
    """Operations of forward and backward for one token of a full sequence."""
    num_dense_layers = shape.num_layers - shape.num_moe_layers
    forward = (
        shape.num_layers * attention_flops(shape)
        + num_dense_layers * feed_forward_flops(shape, shape.ffn_hidden_size)
        + shape.num_moe_layers * moe_flops(shape)
        + (2 * shape.hidden_size * shape.hidden_size if shape.has_word_head else 0)
        + 2 * shape.hidden_size * shape.vocabulary_rows
    )
    return 3 * forward


def training_flops_per_iteration(shape: TransformerShape, global_batch_size: int) -> float:
    """Operations of one iteration of the whole job, all ranks together."""
    return training_flops_per_token(shape) * shape.seq_length * global_batch_size


@dataclass(frozen=True)
class Throughput:
    """Speed of one iteration; of the whole job where the name does not say otherwise. T is 10^12."""

    samples_per_second: float
    tokens_per_second: float
    tflops_per_second: float
    tflops_per_second_per_device: float


def throughput(
    shape: TransformerShape, global_batch_size: int, iteration_time_ms: float, world_size: int
) -> Throughput:
    """What an iteration of `global_batch_size` sequences in `iteration_time_ms` on `world_size` devices amounts to."""
    seconds = iteration_time_ms / 1000.0
    samples = global_batch_size / seconds
    tflops = training_flops_per_iteration(shape, global_batch_size) / seconds / 1e12
    return Throughput(samples, samples * shape.seq_length, tflops, tflops / world_size)
