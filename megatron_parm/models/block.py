"""One transformer block, pre-norm: attention, then a feed-forward module that is given to it. Floor 6."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from megatron_parm.layers.attention import SelfAttention
from megatron_parm.layers.dropout import StreamDropout
from megatron_parm.layers.feed_forward import FeedForward
from megatron_parm.layers.norm import Norm
from megatron_parm.layers.past import LayerPast
from megatron_parm.layers.recompute import without_keeping
from megatron_parm.layers.rotary import Rotation
from megatron_parm.models.execution import PLAIN, Execution
from megatron_parm.models.shape import ModelShape
from megatron_parm.parallel.context import Axis


class FeedForwardMaker(Protocol):
    """Makes the feed-forward module of a layer, by its global number from 0: dense, or of experts."""

    def __call__(self, layer: int, /) -> nn.Module:
        """A module [s, b, h] -> [s, b, h] identical on tp; slices [s/tp, b, h] under sequence parallelism.

        One that is no `FeedForward` is told, where there is padding, which tokens [s, b] are text.
        """


def run_feed_forward(mlp: nn.Module, x: Tensor, is_text: Tensor | None) -> Tensor:
    """[s, b, h] -> [s, b, h]. Only where tokens meet each other does it matter which are padding."""
    output: Tensor = mlp(x) if is_text is None or isinstance(mlp, FeedForward) else mlp(x, is_text)
    return output


def residual_dtype(shape: ModelShape, dtype: torch.dtype) -> torch.dtype:
    """That of the activations between blocks (and stages) of a model of `dtype`."""
    return torch.promote_types(dtype, torch.float32) if shape.residual_in_fp32 else dtype


def make_norm(shape: ModelShape, *, dtype: torch.dtype, device: torch.device, execution: Execution = PLAIN) -> Norm:
    """A norm over the hidden size, on activations that are identical on tp, or slices under sequence parallelism."""
    return Norm(
        shape.hidden_size,
        kind=shape.normalisation,
        epsilon=shape.norm_epsilon,
        dtype=dtype,
        device=device,
        shared_over=Axis.single("tp"),
        is_zero_centred=shape.norm_is_zero_centred,
        is_partial_on_tp=execution.sequence_parallel,
    )


def make_feed_forward(
    shape: ModelShape, *, tp: Axis, dtype: torch.dtype, device: torch.device, execution: Execution = PLAIN
) -> FeedForward:
    """The dense feed-forward layer of `shape`."""
    return FeedForward(
        shape.hidden_size,
        shape.ffn_hidden_size,
        activation=shape.activation,
        tp=tp,
        bias=shape.has_bias,
        initialiser=shape.initialiser,
        output_initialiser=shape.output_initialiser,
        dtype=dtype,
        device=device,
        sequence_parallel=execution.sequence_parallel,
        recompute=execution.recompute("mlp"),
    )


class TransformerBlock(nn.Module):
    """x + dropout(attention(norm(x))), then x + dropout(mlp(norm(x))). Call on all ranks of tp.

    Under sequence parallelism x is this rank's slice, and `generator` None: the stream that differs on tp.
    """

    def __init__(
        self,
        shape: ModelShape,
        mlp: nn.Module,
        *,
        tp: Axis,
        generator: torch.Generator | None,
        dtype: torch.dtype,
        device: torch.device,
        execution: Execution = PLAIN,
    ) -> None:
        super().__init__()
        self.residual_is_normed = shape.residual_is_normed
        self._keeps_normed = execution.recompute("layernorm") is None
        self.input_layernorm = make_norm(shape, dtype=dtype, device=device, execution=execution)
        self.self_attention = SelfAttention(
            shape.attention,
            tp=tp,
            initialiser=shape.initialiser,
            output_initialiser=shape.output_initialiser,
            dtype=dtype,
            device=device,
            sequence_parallel=execution.sequence_parallel,
            recompute_core=execution.recompute("core_attn"),
        )
        self.pre_mlp_layernorm = make_norm(shape, dtype=dtype, device=device, execution=execution)
        self.mlp = mlp
        self.dropout = StreamDropout(shape.hidden_dropout, generator)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None,
        may_attend: Tensor | None,
        is_text: Tensor | None = None,
        past: LayerPast | None = None,
    ) -> Tensor:
        """[s, b, h] -> [s, b, h], identical on tp; of the slices [s/tp, b, h] under sequence parallelism.

        `is_text`: bool [s, b] of whole sequences, False for padding; None: all is text.
        """
        normed = self.input_layernorm(x)
        with self._keeping(normed, self.input_layernorm, x):
            attended = self.self_attention(normed, rotation, may_attend, past)
        x = self.dropout(attended) + (normed.to(x.dtype) if self.residual_is_normed else x)
        normed = self.pre_mlp_layernorm(x)
        with self._keeping(normed, self.pre_mlp_layernorm, x):
            made = run_feed_forward(self.mlp, normed, is_text)
        output: Tensor = self.dropout(made) + (normed.to(x.dtype) if self.residual_is_normed else x)
        return output

    def _keeping(self, normed: Tensor, norm: nn.Module, x: Tensor) -> AbstractContextManager[object]:
        if self._keeps_normed or not torch.is_grad_enabled():
            return nullcontext()
        return without_keeping(normed, partial(norm, x.detach()))  # the norm keeps x itself
