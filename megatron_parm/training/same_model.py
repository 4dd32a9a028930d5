"""Whether a checkpoint is of the same model as a run: the settings that must not differ. Floor 7."""

from collections.abc import Sequence
from typing import Any

from megatron_parm.config.fields import flags_of
from megatron_parm.config.model import ModelConfig
from megatron_parm.config.run import SECTIONS, RunConfig, to_dict
from megatron_parm.errors import CheckpointError

# settings that change what the saved tensors mean; the others may differ between a run and its resume
FIXED_SETTINGS = (
    *(name for name in ModelConfig.__dataclass_fields__ if "dropout" not in name and "init_method" not in name),
    "bert_layout",
    "bert_no_binary_head",
    "class_names",
    "num_experts",
    "moe_layer_freq",
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "moe_router_pre_softmax",
    "moe_router_score_function",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_topk_scaling_factor",
    "moe_router_enable_expert_bias",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
    "tokenizer_type",
)
# those that also fix the samples and their order, in which a run goes on
DATA_ORDER_SETTINGS = (
    "seq_length",
    "seed",
    "split",
    "split_rounding",
    "dataloader_type",
    "mock_data",
    "sft",
    "sft_tokenizer_prompt_format",
    "mask_prob",
    "short_seq_prob",
)
SPELLINGS = {name: "--" + name.replace("_", "-") for name in (*FIXED_SETTINGS, *DATA_ORDER_SETTINGS)}
DEFAULTS = {
    one.field: None if one.is_required else one.default for section in SECTIONS.values() for one in flags_of(section)
}
EXPERT_SETTINGS = tuple(name for name in FIXED_SETTINGS if name.startswith(("moe_", "num_experts")))
# of a classifier that starts from a pretrained BERT: what belongs to the heads of either
HEAD_SETTINGS = ("class_names",)
# a default that stands for "not given" may be spelled out by one of the two runs
LAYOUT_DEPENDENT = ("make_vocab_size_divisible_by",)


def check_same_model(
    config: RunConfig, saved: dict[str, Any], *, data_order: bool, left_out: Sequence[str] = ()
) -> None:
    """Raise CheckpointError naming each setting that must not differ from the checkpoint's, with both values.

    A setting that the checkpoint does not know had its default. Those in `left_out` may differ.
    """
    current = to_dict(config)
    names = [name for name in FIXED_SETTINGS + (DATA_ORDER_SETTINGS if data_order else ()) if name not in left_out]
    before = {name: saved.get(name, DEFAULTS[name] if name in current else None) for name in names}
    differing = [
        f"  {SPELLINGS[name]}: {current.get(name)} here, {before[name]} in the checkpoint"
        for name in names
        if name not in LAYOUT_DEPENDENT and current.get(name) != before[name]
    ]
    if differing:
        raise CheckpointError(
            "the checkpoint is of another model or run:\n"
            + "\n".join(differing)
            + "\nuse the checkpoint's values, or load another checkpoint"
            + (" (--finetune allows another seed or data order)" if data_order else "")
        )
