"""Megatron's saved arguments as our settings, and back. Floor 6.

Most of our settings have Megatron-Core's names, so what differs is listed. Arguments come from a stranger: every value
is checked for its kind as one from a command line is, and one that changes what the model computes and that ours cannot
do is refused by its name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_parm.checkpoint.pickle_values import Instance
from megatron_parm.config.model import ModelConfig
from megatron_parm.config.moe import MoEConfig
from megatron_parm.config.run import RunConfig
from megatron_parm.errors import CheckpointError, ConfigError

_RENAMED = ("disable_bias_linear", "norm_epsilon", "window_size", "openai_gelu", "position_embedding_type")
_OF_RUNS = (
    "moe_layer_freq", "moe_router_dtype", "moe_router_force_load_balancing", "moe_per_layer_logging",
    "moe_use_upcycling", "moe_eval_capacity_factor", "moe_min_capacity", "moe_schedule", "moe_pipeline_chunks",
    "moe_schedule_check", "moe_schedule_adapt", "moe_cost_model", "bp_pipeline_degree", "num_experts",
    "qk_layernorm_over", "init_method_xavier_uniform",
)  # fmt: skip
SAME_NAMES = tuple(
    name
    for section in (ModelConfig, MoEConfig)
    for name in section.__dataclass_fields__
    if name not in (*_RENAMED, *_OF_RUNS)
)
# arguments that change what the model computes, with the values that ours computes
_ONLY: dict[str, tuple[object, ...]] = {
    "apply_residual_connection_post_layernorm": (False,),
    "multi_latent_attention": (False,),
    "mtp_num_layers": (0,),
    "moe_apply_probs_on_input": (False,),
    "moe_latent_size": (0,),
    "hybrid_override_pattern": (),
    "hybrid_layer_pattern": (),
    "heterogeneous_layers_config_path": (),
    "no_rope_freq": (),
    "window_attn_skip_freq": (),
    "softmax_type": ("vanilla",),
    "quick_geglu": (False,),
    "geglu": (False,),
    "attention_output_gate": (False,),
    "experimental_attention_variant": (),
    "linear_attention_type": (),
    "retro_add_retriever": (False,),
    "use_kitchen": (False,),
}
_TRAINING_ONLY = {"moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "sinkhorn", "none")}


@dataclass(frozen=True)
class SavedArguments:
    """The arguments of a checkpoint. `path`: the file that holds them."""

    path: str
    values: Mapping[str, Any]

    @staticmethod
    def of(found: object, path: str) -> "SavedArguments":
        """Those of a Namespace. Raises CheckpointError if it is none."""
        if not isinstance(found, Instance) or found.kind != "argparse.Namespace":
            raise CheckpointError(f"{path} has no arguments (args): what its tensors mean is not known")
        return SavedArguments(path, found.attributes)

    def count(self, *names: str, default: int | None = None) -> int:
        """The whole number of the first of `names` that is given. Raises CheckpointError."""
        given = [(name, self.values[name]) for name in names if self.values.get(name) is not None]
        name, value = given[0] if given else (names[0], default)
        if type(value) is not int or not 0 <= value < 2**31:
            raise CheckpointError(f"{self.path}: its argument {name} is {str(value)[:100]}; expected a whole number")
        return value

    def is_set(self, name: str, default: bool = False) -> bool:
        """A true or false; anything else counts as not given."""
        value = self.values.get(name)
        return value if isinstance(value, bool) else default

    @property
    def num_experts(self) -> int:
        """Experts of a layer; 0 for a dense model. Raises CheckpointError."""
        found = self.values.get("num_experts")
        if isinstance(found, list) and len(set(map(str, found))) == 1:  # DeepSpeed's list
            found = found[0]
        if found is not None and (type(found) is not int or not 0 <= found < 2**31):
            raise CheckpointError(f"{self.path}: num_experts is {str(found)[:100]}; expected one whole number")
        return found or 0

    def settings(self, moe_layers: Sequence[bool], *, is_bert: bool, has_binary_head: bool) -> dict[str, Any]:
        """Our settings of the model, whose tensors say which layers have experts. Raises CheckpointError."""
        for name, allowed in _ONLY.items():
            value = self.values.get(name)
            if value is not None and not any(type(value) is type(one) and value == one for one in allowed):
                raise CheckpointError(f"{self.path}: {name} is {str(value)[:100]}, which our model does not compute")
        found = {name: self._plain(name) for name in SAME_NAMES if self._plain(name) is not None}
        if not any(moe_layers):
            found = {name: value for name, value in found.items() if not name.startswith("moe_")}
        else:
            found |= self._experts(moe_layers)
        for name, allowed in _TRAINING_ONLY.items():
            if name in found and found[name] not in allowed:
                del found[name]
        if self.values.get("window_size") is not None:
            window = self.values["window_size"]
            found["window_size"] = window[0] if isinstance(window, tuple | list) and window else window
        if is_bert:
            found |= {"bert_layout": "megatron", "bert_no_binary_head": not has_binary_head}
            found.pop("untie_embeddings_and_output_weights", None)
        return found | self._differing()

    def _plain(self, name: str) -> Any:
        value = self.values.get(name)
        if name == "rotary_base" and isinstance(value, float) and value.is_integer():
            return int(value)
        if isinstance(value, list) and len(value) == 1:  # newer versions take several balance losses
            return value[0]
        return value

    def _experts(self, moe_layers: Sequence[bool]) -> dict[str, Any]:
        pattern = ",".join(str(int(layer)) for layer in moe_layers)
        found: dict[str, Any] = {
            "num_experts": self.num_experts,
            "moe_layer_freq": "1" if all(moe_layers) else f"[{pattern}]",
        }
        if self.values.get("moe_router_topk") is None:  # SwitchMLP: one expert, times its probability
            found |= {"moe_router_topk": 1, "moe_router_pre_softmax": True}
        return found

    def _differing(self) -> dict[str, Any]:
        found: dict[str, Any] = {"disable_bias_linear": not self.is_set("add_bias_linear", True)}
        epsilon = self.values.get("norm_epsilon", self.values.get("layernorm_epsilon"))
        if epsilon is not None:
            found["norm_epsilon"] = epsilon
        positions = self.values.get("position_embedding_type")
        if positions is None:
            positions = "learned_absolute" if self.is_set("add_position_embedding", True) else "none"
        rotates = self.is_set("use_rotary_position_embeddings")
        found["position_embedding_type"] = "rope" if rotates and positions != "yarn" else positions
        other = self.is_set("swiglu") or self.is_set("squared_relu")
        # the fused bias and GELU of Megatron is the tanh form, whatever --openai-gelu says
        fused = self.is_set("bias_gelu_fusion") and not found["disable_bias_linear"]
        found["openai_gelu"] = not other and (self.is_set("openai_gelu") or fused)
        return found


def words_of(arguments: SavedArguments, rows: int) -> int | None:
    """The vocabulary before padding, if the arguments say it. Raises CheckpointError."""
    if arguments.values.get("padded_vocab_size") is not None:
        padded = arguments.count("padded_vocab_size")
        if padded != rows:
            raise CheckpointError(
                f"{arguments.path}: padded_vocab_size is {padded}, but the word embeddings have {rows} rows in all"
            )
    if not isinstance(arguments.values.get("vocab_size"), int):
        return None
    words = arguments.count("vocab_size") + (arguments.values.get("tokenizer_type") == "NullTokenizer")
    return words if 0 < words <= rows else None


def arguments_of(config: RunConfig, vocab_size: int, rows: int, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Megatron-Core's arguments of a model with our settings. `sizes`: the parallel sizes of the files.

    Raises ConfigError naming what Megatron's model does not have.
    """
    model, moe, data = config.model, config.moe, config.data
    for what, is_met in (
        ("--bert-layout original", config.bert is None or config.bert.bert_layout == "megatron"),
        ("a classifier's head", config.classify is None),
        ("--qk-layernorm-over all_heads", not model.qk_layernorm or model.qk_layernorm_over == "head"),
    ):
        if not is_met:
            raise ConfigError(f"no model of Megatron computes what this one does: {what} has no place in it")
    found = {name: getattr(section, name) for section in (model, moe) if section is not None
             for name in section.__dataclass_fields__ if name in SAME_NAMES}  # fmt: skip
    found |= {
        "add_bias_linear": model.has_linear_bias,
        "norm_epsilon": model.norm_epsilon,
        "layernorm_epsilon": model.norm_epsilon,
        "window_size": None if model.window is None else (model.window, 0),
        "openai_gelu": model.openai_gelu,
        "bias_gelu_fusion": model.openai_gelu and model.has_linear_bias,
        "position_embedding_type": model.position_embedding_type,
        "add_position_embedding": model.position_embedding_type == "learned_absolute",
        "use_rotary_position_embeddings": model.rotates,
        "encoder_num_layers": model.num_layers,
        "seq_length": config.data.seq_length,
        "encoder_seq_length": config.data.seq_length,
        "iteration": 0,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        "padded_vocab_size": rows,
        "vocab_size": vocab_size - (data.tokenizer_type == "NullTokenizer"),
        "tokenizer_type": data.tokenizer_type,
        "vocab_file": data.vocab_file,
        "merge_file": data.merge_file,
        "tokenizer_model": data.tokenizer_model,
        "vocab_extra_ids": data.vocab_extra_ids,
        "transformer_impl": "local",
        "ckpt_format": "torch",
        "use_legacy_models": False,
        "num_experts": None,
        "virtual_pipeline_model_parallel_size": None,
        **sizes,
    }
    if config.bert is not None:
        found["bert_binary_head"] = not config.bert.bert_no_binary_head
    if moe is not None:
        found |= {
            "num_experts": moe.num_experts,
            "moe_layer_freq": [int(layer) for layer in config.moe_layers],
            "moe_grouped_gemm": False,
        }
    return found
