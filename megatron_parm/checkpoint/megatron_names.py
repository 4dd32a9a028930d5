"""Megatron's names of weights beside ours, and how each weight is cut over tensor-parallel ranks. Floor 6.

Three generations: 2.0 (`language_model.transformer`), 2.5 to 23.08 (`language_model.encoder`), Megatron-Core
(`decoder`, `encoder`), whose names are ours, but for experts. Source: formats C.7 and C.8.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from megatron_parm.checkpoint.huggingface_names import NamesOfFamily
from megatron_parm.checkpoint.weight_rules import Heads, Join, Part, Rule, of_experts, same, with_ends
from megatron_parm.errors import CheckpointError

Cut = Literal["whole", "rows", "gated rows", "columns"]
EMBEDDING = "embedding.word_embeddings.weight"
TOKEN_TYPES = "embedding.tokentype_embeddings.weight"
COPY_OF_EMBEDDING = "word_embeddings_for_head.weight"
BERT_MARKS = ("lm_head.", "binary_head.", "pooler.", TOKEN_TYPES)
LAYER = re.compile(r"(decoder|encoder)\.layers\.(\d+)\.(.+)")
EXPERT = re.compile(r"(.+\.mlp\.experts\.local_experts\.)(\d+)\.(.+)")
DEPTH = 12  # of nested dicts in a model's state
MOST_LAYERS = 100_000

_CONSTANTS = re.compile(r"(.*\.)?(_extra_state|.*rotary.*\.inv_freq|attention_mask_func|layer_norm_extra_state)")
# in order; each is applied to the outcome of those before
_OLD: tuple[tuple[str, str], ...] = (
    (r"^module\.", ""),
    (r"^language_model\.(embedding|pooler|output_layer)\.", r"\1."),
    (r"^language_model\.(transformer|encoder)\.", "BODY."),
    (r"^(decoder|encoder)\.", "BODY."),
    (r"^lm_head\.layernorm\.", "lm_head.layer_norm."),
    (r"^lm_head\.bias$", "output_layer.bias"),
    (r"^word_embeddings\.weight$", COPY_OF_EMBEDDING),
    (r"\.attention\.", ".self_attention."),
    (r"\.self_attention\.query_key_value\.", ".self_attention.linear_qkv."),
    (r"\.self_attention\.dense\.", ".self_attention.linear_proj."),
    (r"\.self_attention\.linear_qkv\.layer_norm_(weight|bias)$", r".input_layernorm.\1"),
    (r"\.mlp\.linear_fc1\.layer_norm_(weight|bias)$", r".pre_mlp_layernorm.\1"),
    (r"\.input_norm\.", ".input_layernorm."),
    (r"\.post_attention_(layernorm|norm)\.", ".pre_mlp_layernorm."),
    (r"\.final_norm\.", ".final_layernorm."),
    (r"\.dense_h_to_4h\.", ".linear_fc1."),
    (r"\.dense_4h_to_h\.", ".linear_fc2."),
    (r"\.mlp\.(experts\.)?(local_)?experts\.(\d+)\.", r".mlp.experts.local_experts.\3."),
    (r"\.mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$", r".mlp.experts.local_experts.\3.\1.\2"),
)  # fmt: skip
_CUTS: tuple[tuple[str, Cut], ...] = (
    (r"embedding\.word_embeddings\.weight", "rows"),
    (r"output_layer\.(weight|bias)", "rows"),
    (r".*\.self_attention\.linear_qkv\.(weight|bias)", "rows"),
    (r".*\.linear_fc1\.(weight|bias)", "gated rows"),
    (r".*\.(linear_proj|linear_fc2)\.weight", "columns"),
)


def flattened(values: Any, where: str, prefix: str = "", depth: int = 0) -> dict[str, Any]:
    """Nested dicts as one, by dotted names. Raises CheckpointError."""
    if not isinstance(values, Mapping) or depth > DEPTH:
        raise CheckpointError(f"{where} is no state of a model: {prefix[:100] or 'it'} is no table of tensors")
    found: dict[str, Any] = {}
    for name, value in values.items():
        full = f"{prefix}{name}"
        found |= flattened(value, where, f"{full}.", depth + 1) if isinstance(value, Mapping) else {full: value}
    return found


def core_name(name: str, body: str) -> str | None:
    """A name of any generation as Megatron-Core's, or None if it holds no weights. `body`: decoder or encoder."""
    if _CONSTANTS.fullmatch(name):
        return None
    for old, new in _OLD:
        name = re.sub(old, new, name)
    return re.sub(r"^BODY\.", f"{body}.", name)


def cut_of(name: str, *, is_gated: bool) -> Cut:
    """How the tensor of that core name is cut over tensor-parallel ranks."""
    found: Cut = next((cut for pattern, cut in _CUTS if re.fullmatch(pattern, name)), "whole")
    return "rows" if found == "gated rows" and not is_gated else found


def _halves(theirs: str) -> Rule:
    """All rows of the gate, then all of the other half."""
    return Rule(
        (theirs,),
        lambda tensors, heads: tensors[0].unflatten(0, (2, -1)),  # type: ignore[no-untyped-call]
        lambda ours, heads: [ours.flatten(0, 1)],
    )


def _gated_experts(theirs: str) -> Rule:
    """The same for each expert."""
    plain = of_experts(theirs)

    def join(tensors: Any, heads: Heads) -> Tensor:
        return plain.join(tensors, heads).unflatten(1, (2, -1))  # type: ignore[no-untyped-call,no-any-return]

    def part(ours: Tensor, heads: Heads) -> Any:
        return plain.part(ours.flatten(1, 2), heads)

    both: tuple[Join, Part] = (join, part)
    return Rule((theirs,), *both)


def names_of(*, is_bert: bool, is_gated: bool) -> NamesOfFamily:
    """The rules of a whole model in core names."""
    body = "encoder" if is_bert else "decoder"
    layer, first = f"{body}.layers.{{layer}}", _halves if is_gated else same
    outside = {name: same(name) for name in (EMBEDDING, "embedding.position_embeddings.weight", TOKEN_TYPES)}
    outside |= {name: same(name) for name in ("output_layer.weight", "output_layer.bias")}
    for module in (f"{body}.final_layernorm", "lm_head.dense", "lm_head.layer_norm", "pooler.dense", "binary_head"):
        outside |= with_ends(module, module)
    attention: dict[str, Rule] = {}
    for module in (
        "input_layernorm", "self_attention.linear_qkv", "self_attention.linear_proj", "self_attention.q_layernorm",
        "self_attention.k_layernorm", "pre_mlp_layernorm",
    ):  # fmt: skip
        attention |= with_ends(f"{layer}.{module}", f"{layer}.{module}")
    experts, one = f"{layer}.mlp.experts", f"{layer}.mlp.experts.local_experts.{{expert}}"
    mixture = {f"{layer}.mlp.router.{end}": same(f"{layer}.mlp.router.{end}") for end in ("weight", "expert_bias")}
    for end, number in (("weight", "weight"), ("bias", "bias")):
        join = _gated_experts if is_gated else of_experts
        mixture[f"{experts}.{number}1"] = join(f"{one}.linear_fc1.{end}")
        mixture[f"{experts}.{number}2"] = of_experts(f"{one}.linear_fc2.{end}")
    shared = f"{layer}.mlp.shared_experts"
    mixture[f"{shared}.gate_weight"] = same(f"{shared}.gate_weight")
    dense: dict[str, Rule] = {}
    for table, module in ((dense, f"{layer}.mlp"), (mixture, shared)):
        for end in ("weight", "bias"):
            table[f"{module}.linear_fc1.{end}"] = first(f"{module}.linear_fc1.{end}")
        table.update(with_ends(f"{module}.linear_fc2", f"{module}.linear_fc2"))
    return NamesOfFamily(outside=outside, dense=attention | dense, experts=attention | mixture)
