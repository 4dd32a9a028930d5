"""Self-attention with heads cut over tp, on torch's scaled_dot_product_attention. Floor 4.

The fused projection keeps Megatron's row order: for each group its query heads, then its key, then its value, so that a
cut over tp is a contiguous box of whole groups. Source: Megatron-LM; Ainslie et al. 2023 (grouped queries).
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_parm.layers.initialise import Initialiser
from megatron_parm.layers.linear import ColumnParallelLinear, RowParallelLinear
from megatron_parm.layers.norm import Norm, NormKind, RowNorm
from megatron_parm.layers.past import LayerPast
from megatron_parm.layers.recompute import Recomputation
from megatron_parm.layers.rotary import Rotation, rotate
from megatron_parm.parallel.context import Axis


@dataclass(frozen=True)
class AttentionShape:
    """Sizes and habits of one attention. `num_query_groups` is the number of key/value heads and divides by tp.

    `norm_of_heads` normalises each query and key head (`--qk-layernorm`), with `norms_heads_together` all of them as
    one vector. `window`: a query attends to itself and that many positions before it (`--window-size`).
    `softmax_in_fp32`: scores, softmax and weighted values of 16-bit heads in fp32, whatever the kernel does.
    """

    hidden_size: int
    num_heads: int
    num_query_groups: int
    head_dim: int
    has_qkv_bias: bool
    has_output_bias: bool
    is_causal: bool
    dropout: float = 0.0
    norm_of_heads: NormKind | None = None
    norm_epsilon: float = 1e-5
    norm_is_zero_centred: bool = False
    norms_heads_together: bool = False
    window: int | None = None
    softmax_in_fp32: bool = False


class SelfAttention(nn.Module):
    """softmax(q k^T / sqrt(d)) v with an output projection. Call on all ranks of tp.

    Attention dropout draws from the device's default stream, which differs on tp as the heads do. With
    `sequence_parallel` both ends are this rank's slice, [s/tp, b, h]; inside, every head sees the whole sequence.
    `recompute_core` runs the attention of the projected heads again in backward.
    """

    def __init__(
        self,
        shape: AttentionShape,
        *,
        tp: Axis,
        initialiser: Initialiser,
        output_initialiser: Initialiser,
        dtype: torch.dtype,
        device: torch.device,
        sequence_parallel: bool = False,
        recompute_core: Recomputation | None = None,
    ) -> None:
        super().__init__()
        self._recompute_core = recompute_core
        self.shape = shape
        self.queries_a_group = shape.num_heads // shape.num_query_groups
        channels = shape.num_heads * shape.head_dim
        self.linear_qkv = ColumnParallelLinear(
            shape.hidden_size,
            shape.num_query_groups * (self.queries_a_group + 2) * shape.head_dim,
            tp=tp,
            bias=shape.has_qkv_bias,
            initialiser=initialiser,
            dtype=dtype,
            device=device,
            sequence_parallel=sequence_parallel,
        )
        self.linear_proj = RowParallelLinear(
            channels,
            shape.hidden_size,
            tp=tp,
            bias=shape.has_output_bias,
            initialiser=output_initialiser,
            dtype=dtype,
            device=device,
            sequence_parallel=sequence_parallel,
        )
        self.q_layernorm: nn.Module = nn.Identity()
        self.k_layernorm: nn.Module = nn.Identity()
        if shape.norm_of_heads is not None and shape.norms_heads_together:
            for name, heads in (("q_layernorm", shape.num_heads), ("k_layernorm", shape.num_query_groups)):
                setattr(self, name, RowNorm(heads * shape.head_dim, shape.norm_epsilon, tp, dtype, device))
        elif shape.norm_of_heads is not None:
            for name in ("q_layernorm", "k_layernorm"):
                norm = Norm(
                    shape.head_dim,
                    kind=shape.norm_of_heads,
                    epsilon=shape.norm_epsilon,
                    dtype=dtype,
                    device=device,
                    shared_over=tp,
                    is_zero_centred=shape.norm_is_zero_centred,
                )
                setattr(self, name, norm)

    def forward(
        self, x: Tensor, rotation: Rotation | None, may_attend: Tensor | None, past: LayerPast | None = None
    ) -> Tensor:
        """[s, b, h] -> [s, b, h]. `may_attend` is a bool [b or 1, 1, s, s] that replaces the causal rule.

        `past` has the positions before these (then the last dim of `may_attend`, which must be given, counts them
        too), and is extended by them.
        """
        query, key, value = self._project(x)
        if rotation is not None:
            query, key = rotate(query, rotation), rotate(key, rotation)
        if past is not None:
            assert may_attend is not None, "with a past the mask says what may be attended to"
            key, value = past.extend(key, value)
        if self.shape.window is not None and key.shape[0] > self.shape.window + 1:
            may_attend = self._within_window(query.shape[0], key.shape[0], may_attend, query.device)

        def core(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return self._attend(query, key, value, may_attend)

        run = core if self._recompute_core is None else partial(self._recompute_core, core)
        output: Tensor = self.linear_proj(run(query, key, value))  # [s, b, h]
        return output

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, may_attend: Tensor | None) -> Tensor:
        """[s, b, heads or groups/tp, d] each -> [s, b, heads/tp * d]."""
        dtype = query.dtype
        if self.shape.softmax_in_fp32 and dtype.itemsize < torch.float32.itemsize:
            query, key, value = query.float(), key.float(), value.float()
        attended = F.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),  # [b, heads/tp, s, d]
            key.permute(1, 2, 0, 3),  # [b, groups/tp, s, d]
            value.permute(1, 2, 0, 3),
            attn_mask=may_attend,
            dropout_p=self.shape.dropout if self.training else 0.0,
            is_causal=self.shape.is_causal and may_attend is None,
            enable_gqa=self.queries_a_group > 1,
        )  # [b, heads/tp, s, d]
        return attended.permute(2, 0, 1, 3).flatten(2).to(dtype)  # [s, b, heads/tp * d]

    def _within_window(self, length: int, seen: int, may_attend: Tensor | None, device: torch.device) -> Tensor:
        """`may_attend` (or the causal rule) less what lies further back than the window, [b or 1, 1, s, seen]."""
        assert self.shape.window is not None
        near = torch.ones(length, seen, dtype=torch.bool, device=device).triu(seen - length - self.shape.window)
        if may_attend is None:
            return (near.tril() if self.shape.is_causal else near)[None, None]
        return may_attend & near

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = self.linear_qkv(x)  # [s, b, groups/tp * (q + 2) * d]
        fused = rows.view(*rows.shape[:2], -1, self.queries_a_group + 2, self.shape.head_dim)
        query, key, value = fused.split([self.queries_a_group, 1, 1], dim=3)  # [s, b, groups/tp, 1 or q, d]
        query = query.flatten(2, 3)  # [s, b, heads/tp, d]
        key, value = key.squeeze(3), value.squeeze(3)  # [s, b, groups/tp, d]
        if self.shape.norms_heads_together and self.shape.norm_of_heads is not None:
            return _over_heads(self.q_layernorm, query), _over_heads(self.k_layernorm, key), value
        return self.q_layernorm(query), self.k_layernorm(key), value


def _over_heads(norm: nn.Module, x: Tensor) -> Tensor:
    """A norm over all heads of `x` [s, b, heads/tp, d] as one vector."""
    normed: Tensor = norm(x.flatten(2))
    return normed.view(x.shape)
