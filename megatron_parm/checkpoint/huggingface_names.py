"""Hugging Face's names of weights beside ours, family by family. Floor 6."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_parm.checkpoint.weight_rules import (
    Link,
    Rule,
    filled,
    fused,
    fused_in_one,
    of_experts,
    same,
    stacked,
    turned,
    with_ends,
)


@dataclass(frozen=True)
class NamesOfFamily:
    """The rules outside the layers, of a dense layer and of one with experts, all by our names.

    `prefix` begins the names of all but the heads in a model with heads. `repeated`: tensors under a second name that
    must equal the first. `constants`: patterns of names that hold no weights.
    """

    outside: Mapping[str, Rule]
    dense: Mapping[str, Rule]
    experts: Mapping[str, Rule] = field(default_factory=dict)
    prefix: str = ""
    repeated: Mapping[str, str] = field(default_factory=dict)
    constants: Sequence[str] = ()

    def links(self, moe_layers: Sequence[bool], num_experts: int) -> Iterator[Link]:
        """Every rule of a model with these layers."""
        yield from filled(self.outside)
        for layer, is_moe in enumerate(moe_layers):
            yield from filled(self.experts if is_moe else self.dense, num_experts, layer)

    def is_constant(self, name: str) -> bool:
        """Whether the tensor of that name holds no weights."""
        return any(re.fullmatch(pattern, name) for pattern in self.constants)


GPT2 = NamesOfFamily(
    outside={
        "embedding.word_embeddings.weight": same("transformer.wte.weight"),
        "embedding.position_embeddings.weight": same("transformer.wpe.weight"),
    }
    | {"output_layer.weight": same("lm_head.weight")}
    | with_ends("decoder.final_layernorm", "transformer.ln_f"),
    dense=with_ends("decoder.layers.{layer}.input_layernorm", "transformer.h.{layer}.ln_1")
    | {
        f"decoder.layers.{{layer}}.self_attention.linear_qkv.{end}": fused_in_one(
            f"transformer.h.{{layer}}.attn.c_attn.{end}", is_turned=end == "weight"
        )
        for end in ("weight", "bias")
    }
    | with_ends("decoder.layers.{layer}.self_attention.linear_proj", "transformer.h.{layer}.attn.c_proj", turned)
    | with_ends("decoder.layers.{layer}.pre_mlp_layernorm", "transformer.h.{layer}.ln_2")
    | with_ends("decoder.layers.{layer}.mlp.linear_fc1", "transformer.h.{layer}.mlp.c_fc", turned)
    | with_ends("decoder.layers.{layer}.mlp.linear_fc2", "transformer.h.{layer}.mlp.c_proj", turned),
    prefix="transformer.",
    repeated={"lm_head.weight": "transformer.wte.weight"},
    constants=(r"transformer\.h\.\d+\.attn\.(masked_)?bias",),
)

_OURS, _THEIRS = "decoder.layers.{layer}", "model.layers.{layer}"
_LLAMA_OUTSIDE = {
    "embedding.word_embeddings.weight": same("model.embed_tokens.weight"),
    "decoder.final_layernorm.weight": same("model.norm.weight"),
    "output_layer.weight": same("lm_head.weight"),
}
_LLAMA_ATTENTION = (
    {
        f"{_OURS}.input_layernorm.weight": same(f"{_THEIRS}.input_layernorm.weight"),
        f"{_OURS}.pre_mlp_layernorm.weight": same(f"{_THEIRS}.post_attention_layernorm.weight"),
        f"{_OURS}.self_attention.linear_proj.weight": same(f"{_THEIRS}.self_attn.o_proj.weight"),
    }
    | {
        f"{_OURS}.self_attention.linear_qkv.{end}": fused(*(f"{_THEIRS}.self_attn.{x}_proj.{end}" for x in "qkv"))
        for end in ("weight", "bias")
    }
    | {f"{_OURS}.self_attention.{x}_layernorm.weight": same(f"{_THEIRS}.self_attn.{x}_norm.weight") for x in "qk"}
)


def _gated(ours: str, theirs: str) -> dict[str, Rule]:
    return {
        f"{ours}.linear_fc1.weight": stacked(f"{theirs}.gate_proj.weight", f"{theirs}.up_proj.weight"),
        f"{ours}.linear_fc2.weight": same(f"{theirs}.down_proj.weight"),
    }


def _experts(block: str, gate: str, up: str, down: str) -> dict[str, Rule]:
    one = f"{_THEIRS}.{block}.experts.{{expert}}"
    return {
        f"{_OURS}.mlp.router.weight": same(f"{_THEIRS}.{block}.gate.weight"),
        f"{_OURS}.mlp.experts.weight1": of_experts(f"{one}.{gate}.weight", f"{one}.{up}.weight"),
        f"{_OURS}.mlp.experts.weight2": of_experts(f"{one}.{down}.weight"),
    }


_SHARED_EXPERT = _gated(f"{_OURS}.mlp.shared_experts", f"{_THEIRS}.mlp.shared_expert") | {
    f"{_OURS}.mlp.shared_experts.gate_weight": same(f"{_THEIRS}.mlp.shared_expert_gate.weight")
}
_LLAMA_REPEATED = {"lm_head.weight": "model.embed_tokens.weight"}
_LLAMA_CONSTANTS = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"model\.rotary_emb\.inv_freq")
LLAMA = NamesOfFamily(
    outside=_LLAMA_OUTSIDE,
    dense=_LLAMA_ATTENTION | _gated(f"{_OURS}.mlp", f"{_THEIRS}.mlp"),
    experts=_LLAMA_ATTENTION | _experts("mlp", "gate_proj", "up_proj", "down_proj") | _SHARED_EXPERT,
    prefix="model.",
    repeated=_LLAMA_REPEATED,
    constants=_LLAMA_CONSTANTS,
)
MIXTRAL = NamesOfFamily(
    outside=_LLAMA_OUTSIDE,
    dense={},
    experts=_LLAMA_ATTENTION | _experts("block_sparse_moe", "w1", "w3", "w2"),
    prefix="model.",
    repeated=_LLAMA_REPEATED,
    constants=_LLAMA_CONSTANTS,
)

_OUR_ENCODER, _THEIR_ENCODER = "encoder.layers.{layer}", "bert.encoder.layer.{layer}"
_BERT_OUTSIDE = (
    {
        f"embedding.{kind}_embeddings.weight": same(f"bert.embeddings.{name}.weight")
        for kind, name in (
            ("word", "word_embeddings"),
            ("position", "position_embeddings"),
            ("tokentype", "token_type_embeddings"),
        )
    }
    | with_ends("lm_head.dense", "cls.predictions.transform.dense")
    | with_ends("lm_head.layer_norm", "cls.predictions.transform.LayerNorm")
    | {"output_layer.bias": same("cls.predictions.bias")}
    | with_ends("pooler.dense", "bert.pooler.dense")
    | with_ends("binary_head", "cls.seq_relationship")
)
_BERT_LAYER = (
    {
        f"{_OUR_ENCODER}.self_attention.linear_qkv.{end}": fused(
            *(f"{_THEIR_ENCODER}.attention.self.{name}.{end}" for name in ("query", "key", "value"))
        )
        for end in ("weight", "bias")
    }
    | with_ends(f"{_OUR_ENCODER}.self_attention.linear_proj", f"{_THEIR_ENCODER}.attention.output.dense")
    | with_ends(f"{_OUR_ENCODER}.mlp.linear_fc1", f"{_THEIR_ENCODER}.intermediate.dense")
    | with_ends(f"{_OUR_ENCODER}.mlp.linear_fc2", f"{_THEIR_ENCODER}.output.dense")
)
_BERT_REPEATED = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
_BERT_CONSTANTS = (r"bert\.embeddings\.(position|token_type)_ids",)
BERT = NamesOfFamily(
    outside=_BERT_OUTSIDE | with_ends("embedding.layernorm", "bert.embeddings.LayerNorm"),
    dense=_BERT_LAYER
    | with_ends(f"{_OUR_ENCODER}.post_attention_layernorm", f"{_THEIR_ENCODER}.attention.output.LayerNorm")
    | with_ends(f"{_OUR_ENCODER}.post_mlp_layernorm", f"{_THEIR_ENCODER}.output.LayerNorm"),
    prefix="bert.",
    repeated=_BERT_REPEATED,
    constants=_BERT_CONSTANTS,
)
MEGATRON_BERT = NamesOfFamily(
    outside=_BERT_OUTSIDE | with_ends("encoder.final_layernorm", "bert.encoder.ln"),
    dense=_BERT_LAYER
    | with_ends(f"{_OUR_ENCODER}.input_layernorm", f"{_THEIR_ENCODER}.attention.ln")
    | with_ends(f"{_OUR_ENCODER}.pre_mlp_layernorm", f"{_THEIR_ENCODER}.ln"),
    prefix="bert.",
    repeated=_BERT_REPEATED,
    constants=_BERT_CONSTANTS,
)
NAMES: dict[str, NamesOfFamily] = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "mixtral": MIXTRAL,
    "qwen2_moe": LLAMA,
    "qwen3_moe": LLAMA,
    "olmoe": LLAMA,
    "bert": BERT,
    "megatron-bert": MEGATRON_BERT,
}
