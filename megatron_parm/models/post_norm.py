"""A transformer block that normalises after each sum, as the first transformers and BERT had it. Floor 6.

Source: Vaswani et al. 2017; Devlin et al. 2018; `--bert-layout original`.
"""

import torch
from torch import Tensor, nn

from megatron_parm.layers.attention import SelfAttention
from megatron_parm.layers.dropout import StreamDropout
from megatron_parm.layers.past import LayerPast
from megatron_parm.layers.rotary import Rotation
from megatron_parm.models.block import make_norm, run_feed_forward
from megatron_parm.models.execution import PLAIN, Execution
from megatron_parm.models.shape import ModelShape
from megatron_parm.parallel.context import Axis


class PostNormBlock(nn.Module):
    """norm(x + dropout(attention(x))), then norm(x + dropout(mlp(x))). Call on all ranks of tp."""

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
        self.post_attention_layernorm = make_norm(shape, dtype=dtype, device=device, execution=execution)
        self.mlp = mlp
        self.post_mlp_layernorm = make_norm(shape, dtype=dtype, device=device, execution=execution)
        self.dropout = StreamDropout(shape.hidden_dropout, generator)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None,
        may_attend: Tensor | None,
        is_text: Tensor | None = None,
        past: LayerPast | None = None,
    ) -> Tensor:
        """As `TransformerBlock.forward`."""
        x = self.post_attention_layernorm(x + self.dropout(self.self_attention(x, rotation, may_attend, past)))
        output: Tensor = self.post_mlp_layernorm(x + self.dropout(run_feed_forward(self.mlp, x, is_text)))
        return output
