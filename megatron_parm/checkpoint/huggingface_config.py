"""Hugging Face's config.json and our settings, both ways. Floor 6.

A config is read as data from a stranger: every value is checked for its kind, one that changes what the model computes
and that ours cannot do is refused with its name, and code of a repository is never run.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_parm.errors import CheckpointError, UntrustedCheckpointError

LARGEST_CONFIG = 4_000_000  # bytes
MOST_LAYERS = 100_000
FOREIGN_CODE = ("auto_map", "trust_remote_code", "custom_pipelines")
GELUS = {"gelu": {}, "gelu_new": {"openai_gelu": True}, "gelu_pytorch_tanh": {"openai_gelu": True}}
ACTIVATIONS: dict[str, dict[str, Any]] = {**GELUS, "relu2": {"squared_relu": True}}
ROPE_THETA = 10000.0
# keys that do not change what a trained model computes
HARMLESS = """
_name_or_path architectures model_type transformers_version torch_dtype dtype use_cache output_attentions
output_hidden_states output_router_logits return_dict bos_token_id eos_token_id pad_token_id sep_token_id
cls_token_id initializer_range attention_dropout attn_pdrop embd_pdrop resid_pdrop hidden_dropout_prob
attention_probs_dropout_prob classifier_dropout router_aux_loss_coef router_jitter_noise summary_activation
summary_first_dropout summary_proj_to_labels summary_type summary_use_proj reorder_and_upcast_attn n_ctx
task_specific_params output_past torchscript use_bfloat16 gradient_checkpointing pretraining_tp
position_embedding_type max_window_layers layer_types id2label label2id chunk_size_feed_forward problem_type
num_labels pruned_heads tokenizer_class finetuning_task is_encoder_decoder decoder_start_token_id directionality
pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type
tie_encoder_decoder num_local_experts scale_attn_weights
"""


@dataclass
class Config:
    """The values of one config.json; remembers which were asked for."""

    path: Path
    values: Mapping[str, Any]
    asked: set[str] = field(default_factory=set)

    def get(self, name: str, default: Any = None) -> Any:
        """A value as it is; the default also where it is null."""
        self.asked.add(name)
        found = self.values.get(name)
        return default if found is None else found

    def count(self, name: str, default: int | None = None, limit: int = 2**31) -> int:
        """A whole number of at least 1."""
        found = self.get(name, default)
        if type(found) is not int or not 1 <= found <= limit:
            raise self.refusal(name, f"expected a whole number from 1 to {limit}")
        return found

    def number(self, name: str, default: float) -> float:
        """A number above 0."""
        found = self.get(name, default)
        if type(found) not in (int, float) or not 0 < found < 1e30:
            raise self.refusal(name, "expected a number above 0")
        return float(found)

    def is_set(self, name: str, default: bool) -> bool:
        """A true or false."""
        found = self.get(name, default)
        if type(found) is not bool:
            raise self.refusal(name, "expected true or false")
        return found

    def expect(self, name: str, *allowed: Any) -> None:
        """Refuse any other value; a missing one or null is taken for the first allowed one."""
        found = self.get(name, allowed[0])
        if not any(type(found) is type(value) and found == value for value in allowed):
            told = " or ".join(json.dumps(value) for value in allowed)
            raise self.refusal(name, f"our model computes only with {told}")

    def refusal(self, name: str, rule: str) -> CheckpointError:
        """The error that names a value and why it cannot be taken."""
        shown = json.dumps(self.values.get(name), default=str)
        return CheckpointError(f"{self.path}: {name} is {shown[:100]}; {rule}")


def read_config(path: Path) -> Config:
    """A config.json. Raises CheckpointError, UntrustedCheckpointError for one that asks for code of its own."""
    try:
        size = path.stat().st_size
        if size > LARGEST_CONFIG:
            raise CheckpointError(f"{path} has {size} bytes; a config has at most {LARGEST_CONFIG}")
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path} is damaged: it is not JSON") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} is damaged: it is no JSON object")
    foreign = [name for name in FOREIGN_CODE if values.get(name)]
    if foreign:
        raise UntrustedCheckpointError(
            f"{path} asks for code from its repository ({', '.join(foreign)}); no such code is run, and what the model "
            "computes is not known without it"
        )
    return Config(path, values)


Settings = dict[str, Any]


def _gpt2(config: Config) -> Settings:
    config.expect("scale_attn_weights", True)
    config.expect("scale_attn_by_inverse_layer_idx", False)
    config.expect("add_cross_attention", False)
    hidden = config.count("n_embd")
    return {
        "num_layers": config.count("n_layer", limit=MOST_LAYERS),
        "hidden_size": hidden,
        "num_attention_heads": config.count("n_head"),
        "ffn_hidden_size": config.count("n_inner", 4 * hidden),
        "max_position_embeddings": config.count("n_positions"),
        "norm_epsilon": config.number("layer_norm_epsilon", 1e-5),
        "untie_embeddings_and_output_weights": not config.is_set("tie_word_embeddings", True),
        **_activation(config, "activation_function", "gelu_new", ACTIVATIONS),
    }


def _activation(config: Config, name: str, default: str, known: Mapping[str, Settings]) -> Settings:
    found = config.get(name, default)
    if not isinstance(found, str) or found not in known:
        raise config.refusal(name, f"our model has {', '.join(known)}")
    return dict(known[found])


def _llama(config: Config) -> Settings:
    heads, hidden = config.count("num_attention_heads"), config.count("hidden_size")
    groups = config.count("num_key_value_heads", heads)
    _activation(config, "hidden_act", "silu", {"silu": {}})
    config.expect("attention_bias", False)
    config.expect("mlp_bias", False)
    return {
        "num_layers": config.count("num_hidden_layers", limit=MOST_LAYERS),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "kv_channels": config.count("head_dim", max(1, hidden // heads)),
        "ffn_hidden_size": config.count("intermediate_size"),
        "group_query_attention": groups != heads,
        "num_query_groups": groups if groups != heads else 1,
        "max_position_embeddings": config.count("max_position_embeddings"),
        "normalization": "RMSNorm",
        "norm_epsilon": config.number("rms_norm_eps", 1e-6),
        "swiglu": True,
        "disable_bias_linear": True,
        "untie_embeddings_and_output_weights": not config.is_set("tie_word_embeddings", False),
        **_rotation(config),
    }


def _rotation(config: Config) -> Settings:
    """Old configs have rope_theta and rope_scaling, new ones rope_parameters."""
    theta, scaling = config.get("rope_theta", ROPE_THETA), config.get("rope_scaling", {})
    parameters = config.get("rope_parameters", {})
    if not isinstance(scaling, dict) or not isinstance(parameters, dict):
        raise config.refusal("rope_parameters", "expected an object")
    values = {**scaling, **parameters}
    kind = values.pop("rope_type", values.pop("type", "default"))
    values.pop("type", None)
    rope = Config(config.path, {"rope_theta": theta, **values})
    base = rope.number("rope_theta", ROPE_THETA)
    rope.expect("partial_rotary_factor", 1.0, 1)
    if base != int(base):
        raise rope.refusal("rope_theta", "--rotary-base is a whole number")
    found: Settings = {"position_embedding_type": "rope", "rotary_base": int(base)}
    if kind == "linear":
        found["rotary_seq_len_interpolation_factor"] = rope.number("factor", 1.0)
    elif kind == "llama3":
        rope.expect("low_freq_factor", 1.0, 1)
        rope.expect("high_freq_factor", 4.0, 4)
        found["use_rope_scaling"] = True
        found["rope_scaling_factor"] = rope.number("factor", 8.0)
        found["rope_original_max_position_embeddings"] = rope.count("original_max_position_embeddings", 8192)
    elif kind == "yarn":
        rope.expect("beta_fast", 32.0, 32)
        rope.expect("beta_slow", 1.0, 1)
        rope.expect("truncate", True)
        found["position_embedding_type"] = "yarn"
        found["yarn_rotary_scaling_factor"] = rope.number("factor", 1.0)
        positions = config.count("max_position_embeddings")
        found["yarn_original_max_position_embeddings"] = rope.count("original_max_position_embeddings", positions)
    elif kind != "default":
        raise rope.refusal("rope_type", f"{kind!r} is not known; our model has default, linear, llama3 and yarn")
    unknown = sorted(name for name in values if name not in rope.asked and values[name] is not None)
    if unknown:
        raise rope.refusal(unknown[0], f"our model has no such setting of the rotation {kind!r}")
    return found


def _window(config: Config) -> Settings:
    window = config.get("sliding_window")
    return {} if window is None else {"window_size": config.count("sliding_window") - 1}


def _mistral(config: Config) -> Settings:
    return _llama(config) | _window(config)


def _qwen2(config: Config) -> Settings:
    config.expect("use_sliding_window", False)
    config.get("sliding_window")  # without the switch it has no effect
    return _llama(config) | {"add_qkv_bias": True}


def _qwen3(config: Config) -> Settings:
    return _qwen2(config) | {"add_qkv_bias": False, "qk_layernorm": True}


def _mixtral(config: Config) -> Settings:
    found = _mistral(config)
    return found | {
        "num_experts": config.count("num_local_experts", 8),
        "moe_ffn_hidden_size": found["ffn_hidden_size"],
        "moe_router_topk": config.count("num_experts_per_tok", 2),
    }


def _some_experts(config: Config, default_experts: int) -> Settings:
    """Those of Qwen's: which layers have experts, their width, and what their weights sum to."""
    layers = config.count("num_hidden_layers", limit=MOST_LAYERS)
    step, without = config.count("decoder_sparse_step", 1), config.get("mlp_only_layers", [])
    if not isinstance(without, list) or not all(type(layer) is int for layer in without):
        raise config.refusal("mlp_only_layers", "expected a list of layer numbers")
    pattern = [int((layer + 1) % step == 0 and layer not in without) for layer in range(layers)]
    if not any(pattern):
        raise config.refusal("decoder_sparse_step", "no layer has experts")
    config.get("num_local_experts")  # the same number under a newer name
    number = config.count("num_experts", config.values.get("num_local_experts") or default_experts)
    return {
        "num_experts": number,
        "moe_layer_freq": "1" if all(pattern) else f"[{','.join(map(str, pattern))}]",
        "moe_router_topk": config.count("num_experts_per_tok"),
        "moe_router_pre_softmax": not config.is_set("norm_topk_prob", False),
    }


def _qwen2_moe(config: Config) -> Settings:
    config.expect("qkv_bias", True)
    return (
        _qwen2(config)
        | _some_experts(config, 60)
        | {
            "moe_ffn_hidden_size": config.count("moe_intermediate_size"),
            "moe_shared_expert_intermediate_size": config.count("shared_expert_intermediate_size"),
            "moe_shared_expert_gate": True,
        }
    )


def _qwen3_moe(config: Config) -> Settings:
    found = _qwen3(config) | _some_experts(config, 128)
    return found | {"moe_ffn_hidden_size": config.count("moe_intermediate_size")}


def _olmoe(config: Config) -> Settings:
    config.expect("clip_qkv", None)
    found = _llama(config) | _some_experts(config, 64)
    return found | {
        "moe_ffn_hidden_size": found["ffn_hidden_size"],
        "qk_layernorm": True,
        "qk_layernorm_over": "all_heads",
    }


def _bert(config: Config) -> Settings:
    config.expect("is_decoder", False)
    config.expect("add_cross_attention", False)
    config.expect("position_embedding_type", "absolute")
    config.expect("tie_word_embeddings", True)
    _activation(config, "hidden_act", "gelu", {"gelu": {}})
    if config.get("pruned_heads"):
        raise config.refusal("pruned_heads", "heads cannot be missing in our model")
    segments = config.count("type_vocab_size", 2)
    if segments > 2:
        raise config.refusal("type_vocab_size", "our BERT has 1 or 2 segments")
    return {
        "num_layers": config.count("num_hidden_layers", limit=MOST_LAYERS),
        "hidden_size": config.count("hidden_size"),
        "num_attention_heads": config.count("num_attention_heads"),
        "ffn_hidden_size": config.count("intermediate_size"),
        "max_position_embeddings": config.count("max_position_embeddings"),
        "norm_epsilon": config.number("layer_norm_eps", 1e-12),
        "bert_layout": "original",
        "bert_no_binary_head": segments == 1,
    }


def _megatron_bert(config: Config) -> Settings:
    return _bert(config) | {"bert_layout": "megatron"}


READERS: dict[str, Callable[[Config], Settings]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "olmoe": _olmoe,
    "bert": _bert,
    "megatron-bert": _megatron_bert,
}


@dataclass(frozen=True)
class ReadConfig:
    """What a config.json says in our words. `notes`: keys that were not understood."""

    family: str
    settings: Settings
    vocab_size: int
    notes: tuple[str, ...]


def settings_of(config: Config, family: str) -> ReadConfig:
    """Our settings for a config of that family. Raises CheckpointError."""
    settings = READERS[family](config)
    vocab_size = config.count("vocab_size")
    unknown = sorted(name for name in config.values if name not in config.asked.union(HARMLESS.split()))
    unknown = [name for name in unknown if config.values[name] not in (None, False)]
    notes = (f"{config.path}: not understood and left out: {', '.join(unknown)}",) if unknown else ()
    return ReadConfig(family, settings, vocab_size, notes)
