"""The sizes and habits of a dense transformer, as plain values. Floor 6. `build.py` makes it from the configuration."""

from dataclasses import dataclass, field
from typing import Literal

from megatron_parm.layers.attention import AttentionShape
from megatron_parm.layers.feed_forward import Activation
from megatron_parm.layers.initialise import Initialiser
from megatron_parm.layers.norm import NormKind
from megatron_parm.layers.rotary import RotaryShape

Positions = Literal["learned_absolute", "rope", "none"]
NormPlacement = Literal["pre", "post"]


@dataclass(frozen=True)
class ModelShape:
    """A dense transformer. Defaults are GPT-2's, as Megatron has them.

    `padded_vocab_size` rows are held, `vocab_size` of them are words. `residual_is_normed` takes the residual after the
    norm (`--apply-residual-connection-post-layernorm`). `norm_is_zero_centred` is `--apply-layernorm-1p`.
    `norms_heads_together`, `window`: see `AttentionShape`.
    `norm_placement` "post" normalises after each sum and after the embedding, and no more at the end, as BERT of 2018.
    `num_token_types` segments have an embedding of their own; 0 for none.
    `residual_in_fp32` and `softmax_in_fp32`: parts that are computed in fp32 in a 16-bit model.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    vocab_size: int
    padded_vocab_size: int
    max_positions: int
    positions: Positions = "learned_absolute"
    rotary: RotaryShape = field(default_factory=RotaryShape)
    activation: Activation = "gelu"
    normalisation: NormKind = "LayerNorm"
    norm_epsilon: float = 1e-5
    norm_is_zero_centred: bool = False
    has_bias: bool = True
    has_qkv_bias: bool = True
    has_norm_of_heads: bool = False
    norms_heads_together: bool = False
    window: int | None = None
    residual_is_normed: bool = False
    norm_placement: NormPlacement = "pre"
    num_token_types: int = 0
    ties_embeddings: bool = True
    is_causal: bool = True
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    residual_in_fp32: bool = False
    softmax_in_fp32: bool = False
    initialiser: Initialiser = field(default_factory=lambda: Initialiser("normal", 0.02))

    @property
    def output_initialiser(self) -> Initialiser:
        """That of the layers that write to the residual stream."""
        return self.initialiser.scaled_for_output(self.num_layers)

    @property
    def attention(self) -> AttentionShape:
        """That of each layer's attention."""
        return AttentionShape(
            hidden_size=self.hidden_size,
            num_heads=self.num_attention_heads,
            num_query_groups=self.num_query_groups,
            head_dim=self.head_dim,
            has_qkv_bias=self.has_qkv_bias,
            has_output_bias=self.has_bias,
            is_causal=self.is_causal,
            dropout=self.attention_dropout,
            softmax_in_fp32=self.softmax_in_fp32,
            norm_of_heads=self.normalisation if self.has_norm_of_heads else None,
            norm_epsilon=self.norm_epsilon,
            norm_is_zero_centred=self.norm_is_zero_centred,
            norms_heads_together=self.norms_heads_together,
            window=self.window,
        )
