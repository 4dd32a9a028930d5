"""The shape of the model. Floor 1. Names: Megatron-Core's model arguments."""

# ruff: noqa: RUF009 - flag() is dataclasses.field

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_parm.config.fields import flag
from megatron_parm.errors import ConfigError

PositionEmbedding = Literal["learned_absolute", "rope", "yarn", "none"]
QkNorm = Literal["head", "all_heads"]
Normalization = Literal["LayerNorm", "RMSNorm"]
Activation = Literal["gelu", "openai_gelu", "squared_relu", "swiglu"]

SWIGLU_MULTIPLE = 64  # Megatron floors SwiGLU's default width to a multiple of this


def _read_window(words: Sequence[str]) -> int:
    """Megatron's pair "(left,right)", in one word or two, or the left number alone; -1 to the left is no window."""
    numbers = "".join(f"{word} " for word in words).replace("(", " ").replace(")", " ").replace(",", " ").split()
    if not 1 <= len(numbers) <= 2 or not all(number.lstrip("-").isdecimal() for number in numbers):
        raise ConfigError(f"--window-size {' '.join(words)}: expected LEFT,RIGHT, for instance 4095,0")
    if numbers[1:] not in ([], ["0"]):
        raise ConfigError(
            f"--window-size {' '.join(words)}: a GPT sees nothing to the right, so RIGHT must be 0; use {numbers[0]},0"
        )
    return int(numbers[0])


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A GPT transformer."""

    num_layers: int = flag(help="transformer layers", unit="layers", at_least=1)
    hidden_size: int = flag(help="width of the residual stream", unit="features", at_least=1)
    num_attention_heads: int = flag(help="query heads of each attention", unit="heads", at_least=1)
    max_position_embeddings: int = flag(help="longest sequence the model can place", unit="tokens", at_least=1)
    ffn_hidden_size: int | None = flag(
        None,
        help="width of the dense feed-forward",
        unit="features",
        at_least=1,
        none_means="4 x hidden size; with --swiglu 8/3 x hidden size, floored to a multiple of 64",
    )
    kv_channels: int | None = flag(
        None,
        help="width of one attention head",
        unit="features",
        at_least=1,
        none_means="hidden size / attention heads",
    )
    group_query_attention: bool = flag(False, help="let several query heads share one key and value head")
    num_query_groups: int = flag(
        1, help="key and value heads, used with --group-query-attention", unit="heads", at_least=1
    )
    position_embedding_type: PositionEmbedding = flag("learned_absolute", help="how positions enter the model")
    rotary_base: int = flag(10000, help="base of the rotary frequencies", at_least=1)
    rotary_percent: float = flag(1.0, help="part of a head that is rotated", unit="fraction", above=0, at_most=1)
    rotary_interleaved: bool = flag(False, help="rotate neighbouring features, not the two halves of a head")
    rotary_seq_len_interpolation_factor: float | None = flag(
        None, help="divides the positions that rotate, to stretch the context evenly", above=0, none_means="1"
    )
    use_rope_scaling: bool = flag(False, help="slow the long rotary waves down as Llama 3.1 does")
    rope_scaling_factor: float = flag(8.0, help="how much slower, used with --use-rope-scaling", at_least=1)
    rope_original_max_position_embeddings: int = flag(
        8192, help="context before the stretch, used with --use-rope-scaling", unit="tokens", at_least=1
    )
    yarn_rotary_scaling_factor: float = flag(
        1.0, help="stretch of the context, used with --position-embedding-type yarn", at_least=1
    )
    yarn_original_max_position_embeddings: int | None = flag(
        None,
        help="context before the stretch, used with --position-embedding-type yarn",
        unit="tokens",
        at_least=1,
        none_means="--max-position-embeddings / the factor",
    )
    window_size: int | None = flag(
        None,
        help="how far back a query attends, as LEFT,RIGHT with RIGHT 0; itself comes on top",
        unit="tokens",
        at_least=-1,
        none_means="to the start",
        read=_read_window,
        takes_several=True,
    )
    make_vocab_size_divisible_by: int = flag(
        128, help="pad the vocabulary to a multiple of this times the tensor-parallel size", unit="rows", at_least=1
    )
    normalization: Normalization = flag("LayerNorm", help="kind of normalisation")
    norm_epsilon: float = flag(1e-5, help="added to the variance inside a normalisation", above=0)
    apply_layernorm_1p: bool = flag(False, help="store a LayerNorm's scale as its distance from one")
    openai_gelu: bool = flag(False, help="feed-forward activation: OpenAI's tanh form of GELU")
    squared_relu: bool = flag(False, help="feed-forward activation: squared ReLU")
    swiglu: bool = flag(False, help="feed-forward activation: gated, SiLU(gate) x up")
    untie_embeddings_and_output_weights: bool = flag(False, help="give the output layer weights of its own")
    disable_bias_linear: bool = flag(False, help="no bias in linear layers")
    add_qkv_bias: bool = flag(False, help="a bias in the query-key-value projection even with --disable-bias-linear")
    qk_layernorm: bool = flag(False, help="normalise queries and keys")
    qk_layernorm_over: QkNorm = flag(
        "head", help="what --qk-layernorm normalises: each head (Qwen3), or all heads together (OLMoE)"
    )
    attention_dropout: float = flag(0.1, help="dropout of attention weights", unit="probability", at_least=0, below=1)
    hidden_dropout: float = flag(0.1, help="dropout on the residual stream", unit="probability", at_least=0, below=1)
    init_method_std: float = flag(0.02, help="standard deviation of initial weights", above=0)
    init_method_xavier_uniform: bool = flag(False, help="draw initial weights by Xavier's uniform rule")

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self) -> int:
        """Key and value heads of an attention."""
        return self.num_query_groups if self.group_query_attention else self.num_attention_heads

    @property
    def rotates(self) -> bool:
        """True if positions enter by rotation."""
        return self.position_embedding_type in ("rope", "yarn")

    @property
    def positions(self) -> Literal["learned_absolute", "rope", "none"]:
        """How positions enter, whatever the scaling of their rotation."""
        return "rope" if self.position_embedding_type == "yarn" else self.position_embedding_type

    @property
    def yarn_original_positions(self) -> int:
        """Context before YaRN's stretch."""
        return self.yarn_original_max_position_embeddings or max(
            1, int(self.max_position_embeddings / self.yarn_rotary_scaling_factor)
        )

    @property
    def window(self) -> int | None:
        """Positions before itself that a query attends to; None: all."""
        return None if self.window_size is None or self.window_size < 0 else self.window_size

    @property
    def rotary_dim(self) -> int:
        """Features of a head that are rotated."""
        return int(self.head_dim * self.rotary_percent)

    @property
    def feed_forward_size(self) -> int:
        """Width of the dense feed-forward (of one half, with SwiGLU)."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if self.swiglu:
            return 8 * self.hidden_size // 3 // SWIGLU_MULTIPLE * SWIGLU_MULTIPLE
        return 4 * self.hidden_size

    @property
    def activation(self) -> Activation:
        """The feed-forward activation."""
        if self.swiglu:
            return "swiglu"
        if self.squared_relu:
            return "squared_relu"
        return "openai_gelu" if self.openai_gelu else "gelu"

    @property
    def has_linear_bias(self) -> bool:
        """True if linear layers have a bias."""
        return not self.disable_bias_linear

    @property
    def has_qkv_bias(self) -> bool:
        """True if the query-key-value projection has a bias."""
        return self.add_qkv_bias or self.has_linear_bias
