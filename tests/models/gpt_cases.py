"""Small models for the tests of this folder, and Hugging Face weights laid out in our names and row order."""

import torch
from torch import Tensor

from megatron_parm.layers.initialise import initialise_weights
from megatron_parm.models.block import make_feed_forward
from megatron_parm.models.execution import PLAIN, Execution
from megatron_parm.models.gpt import GPTModel
from megatron_parm.models.shape import ModelShape
from megatron_parm.parallel.context import Axis

CPU = torch.device("cpu")
SINGLE = Axis.single("tp")


def small_shape(**changes: object) -> ModelShape:
    """Two layers, four heads, 13 words in 16 rows, no dropout; `changes` replaces fields."""
    fields: dict[str, object] = {
        "num_layers": 2,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "num_attention_heads": 4,
        "num_query_groups": 4,
        "head_dim": 8,
        "vocab_size": 13,
        "padded_vocab_size": 16,
        "max_positions": 12,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    return ModelShape(**(fields | changes))  # type: ignore[arg-type]


def build(
    shape: ModelShape,
    tp: Axis = SINGLE,
    dtype: torch.dtype = torch.float32,
    layers: range | None = None,
    execution: Execution = PLAIN,
) -> GPTModel:
    """The dense model of `shape` (or its stage `layers`) with weights of seed 7."""
    generator = torch.Generator().manual_seed(5)
    model = GPTModel(
        shape,
        lambda layer: make_feed_forward(shape, tp=tp, dtype=dtype, device=CPU, execution=execution),
        tp=tp,
        generator=None if execution.sequence_parallel else generator,
        dtype=dtype,
        device=CPU,
        parts=None if layers is None else [layers],
        execution=execution,
    )
    initialise_weights(model, seed=7)
    return model


def batch_of(shape: ModelShape, rows: int = 3, length: int = 10) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, position ids and labels [rows, length] of seed 1."""
    text = torch.randint(0, shape.vocab_size, (rows, length + 1), generator=torch.Generator().manual_seed(1))
    return text[:, :-1], torch.arange(length).expand(rows, length), text[:, 1:]


def fuse(query: Tensor, key: Tensor, value: Tensor, groups: int) -> Tensor:
    """Rows of q, k and v (each heads * d first) in Megatron's order: for each group its q heads, its k, its v."""
    parts = [part.unflatten(0, (groups, -1)) for part in (query, key, value)]  # [groups, rows, ...]
    return torch.cat(parts, dim=1).flatten(0, 1)
