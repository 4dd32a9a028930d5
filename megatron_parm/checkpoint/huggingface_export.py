"""From our settings to a family of Hugging Face and its config.json. Floor 6. Back: `huggingface_config.py`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_parm.config.run import RunConfig
from megatron_parm.errors import ConfigError

CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "bert": "BertForPreTraining",
    "megatron-bert": "MegatronBertForPreTraining",
}
Values = dict[str, Any]


@dataclass(frozen=True)
class _Needs:
    """What a family must find in the settings: description, whether it is so."""

    description: str
    is_met: bool


def family_of(config: RunConfig) -> str:
    """The family whose models compute what ours does. Raises ConfigError naming what no family has."""
    model, moe = config.model, config.moe
    if config.bert is not None:
        _require("BERT", _bert_needs(config))
        return "bert" if config.bert.bert_layout == "original" else "megatron-bert"
    if not model.rotates:
        _require("GPT-2", _gpt2_needs(config))
        return "gpt2"
    if moe is None:
        family = "llama"
        if model.qk_layernorm:
            family = "qwen3"
        elif model.add_qkv_bias:
            family = "qwen2"
        elif model.window is not None:
            family = "mistral"
        _require(
            family, _llama_needs(config) + _norm_needs(config, "head") + _window_needs(config, {"mistral"}, family)
        )
        return family
    family = "mixtral"
    if moe.moe_shared_expert_intermediate_size is not None:
        family = "qwen2_moe"
    elif model.qk_layernorm:
        family = "olmoe" if model.qk_layernorm_over == "all_heads" else "qwen3_moe"
    _require(family, _llama_needs(config) + _expert_needs(config, family) + _window_needs(config, {"mixtral"}, family))
    return family


def _require(family: str, needs: list[_Needs]) -> None:
    unmet = [need.description for need in needs if not need.is_met]
    if unmet:
        raise ConfigError(
            f"no model of Hugging Face computes what this one does; the nearest family, {family}, needs: "
            f"{'; '.join(unmet)}"
        )


def _bert_needs(config: RunConfig) -> list[_Needs]:
    model = config.model
    return [
        _Needs("no experts", config.moe is None),
        *_plain_needs(config),
        _Needs("the exact GELU (neither --openai-gelu nor another activation)", model.activation == "gelu"),
    ]


def _gpt2_needs(config: RunConfig) -> list[_Needs]:
    model = config.model
    return [
        _Needs("no experts", config.moe is None),
        *_plain_needs(config),
        _Needs("an activation that is not gated (no --swiglu)", model.activation != "swiglu"),
    ]


def _plain_needs(config: RunConfig) -> list[_Needs]:
    """Of GPT-2 and BERT alike."""
    model = config.model
    return [
        _Needs("learned positions", model.position_embedding_type == "learned_absolute"),
        _Needs("LayerNorm", model.normalization == "LayerNorm" and not model.apply_layernorm_1p),
        _Needs("biases", model.has_linear_bias),
        _Needs("as many key heads as query heads", model.query_groups == model.num_attention_heads),
        _Needs(
            "heads of hidden size / heads features", model.head_dim * model.num_attention_heads == model.hidden_size
        ),
        _Needs("no --qk-layernorm", not model.qk_layernorm),
        _Needs("no --window-size", model.window is None),
    ]


def _llama_needs(config: RunConfig) -> list[_Needs]:
    model = config.model
    return [
        _Needs("--normalization RMSNorm", model.normalization == "RMSNorm" and not model.apply_layernorm_1p),
        _Needs("--swiglu", model.activation == "swiglu"),
        _Needs("--disable-bias-linear", not model.has_linear_bias),
        _Needs("--rotary-percent 1", model.rotary_percent == 1.0),
        _Needs("no --rotary-interleaved", not model.rotary_interleaved),
    ]


def _norm_needs(config: RunConfig, over: str) -> list[_Needs]:
    model = config.model
    return [
        _Needs(f"--qk-layernorm-over {over}", not model.qk_layernorm or model.qk_layernorm_over == over),
        _Needs("no --add-qkv-bias beside --qk-layernorm", not (model.qk_layernorm and model.add_qkv_bias)),
    ]


def _window_needs(config: RunConfig, families: set[str], family: str) -> list[_Needs]:
    return [_Needs("no --window-size", config.model.window is None or family in families)]


def _expert_needs(config: RunConfig, family: str) -> list[_Needs]:
    model, moe = config.model, config.moe
    assert moe is not None
    needs = [
        _Needs("the softmax score", moe.moe_router_score_function == "softmax"),
        _Needs("no groups of experts", moe.moe_router_num_groups is None),
        _Needs("no --moe-router-topk-scaling-factor", moe.moe_router_topk_scaling_factor in (None, 1.0)),
        _Needs("no --moe-router-enable-expert-bias", not moe.moe_router_enable_expert_bias),
        _Needs("no sinkhorn balancing", moe.moe_router_load_balancing_type != "sinkhorn"),
    ]
    if family in ("mixtral", "olmoe"):
        needs += [
            _Needs("experts in every layer", all(config.moe_layers)),
        ]
    if family == "mixtral":
        needs += [_Needs("no --moe-router-pre-softmax", not moe.moe_router_pre_softmax)]
        needs += [_Needs("no --add-qkv-bias", not model.add_qkv_bias)]
    if family == "qwen2_moe":
        needs += [_Needs("--add-qkv-bias, no --qk-layernorm", model.add_qkv_bias and not model.qk_layernorm)]
        needs += [_Needs("--moe-shared-expert-gate", moe.moe_shared_expert_gate)]
        needs += [_Needs("heads of hidden size / heads features", _has_plain_heads(config))]
    if family == "olmoe":
        needs += [_Needs("heads of hidden size / heads features", _has_plain_heads(config))]
    if family in ("olmoe", "qwen3_moe"):
        needs += [_Needs("no --add-qkv-bias", not model.add_qkv_bias)]
    return needs


def _has_plain_heads(config: RunConfig) -> bool:
    model = config.model
    return model.head_dim * model.num_attention_heads == model.hidden_size


def _gpt2(config: RunConfig) -> Values:
    model = config.model
    activations = {"gelu": "gelu", "openai_gelu": "gelu_new", "squared_relu": "relu2"}
    return {
        "n_layer": model.num_layers,
        "n_embd": model.hidden_size,
        "n_head": model.num_attention_heads,
        "n_inner": model.feed_forward_size,
        "n_positions": model.max_position_embeddings,
        "layer_norm_epsilon": model.norm_epsilon,
        "activation_function": activations[model.activation],
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
        "attn_pdrop": model.attention_dropout,
    }


def _bert(config: RunConfig) -> Values:
    model, bert = config.model, config.bert
    assert bert is not None
    return {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "intermediate_size": model.feed_forward_size,
        "max_position_embeddings": model.max_position_embeddings,
        "layer_norm_eps": model.norm_epsilon,
        "hidden_act": "gelu",
        "type_vocab_size": 1 if bert.bert_no_binary_head else 2,
        "hidden_dropout_prob": model.hidden_dropout,
        "attention_probs_dropout_prob": model.attention_dropout,
        "tie_word_embeddings": True,
    }


def _llama(config: RunConfig) -> Values:
    model = config.model
    values: Values = {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.query_groups,
        "head_dim": model.head_dim,
        "intermediate_size": model.feed_forward_size,
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.norm_epsilon,
        "hidden_act": "silu",
        "attention_dropout": model.attention_dropout,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
    }
    scaling = _scaling(config)
    # both spellings: rope_parameters since transformers 5, the other two before
    values["rope_parameters"] = {"rope_theta": float(model.rotary_base), **(scaling or {"rope_type": "default"})}
    values["rope_theta"] = float(model.rotary_base)
    values["rope_scaling"] = scaling
    if model.window is not None:
        values["sliding_window"] = model.window + 1
    return values


def _scaling(config: RunConfig) -> Values | None:
    model = config.model
    if model.use_rope_scaling:
        return {
            "rope_type": "llama3",
            "factor": model.rope_scaling_factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": model.rope_original_max_position_embeddings,
        }
    if model.position_embedding_type == "yarn":
        return {
            "rope_type": "yarn",
            "factor": model.yarn_rotary_scaling_factor,
            "original_max_position_embeddings": model.yarn_original_positions,
        }
    if model.rotary_seq_len_interpolation_factor not in (None, 1.0):
        return {"rope_type": "linear", "factor": model.rotary_seq_len_interpolation_factor}
    return None


def _with_null_window(config: RunConfig) -> Values:
    return {"sliding_window": None} | _llama(config)


def _qwen(config: RunConfig) -> Values:
    return _llama(config) | {"use_sliding_window": False, "attention_bias": False}


def _mixtral(config: RunConfig) -> Values:
    assert config.moe is not None
    return _with_null_window(config) | {
        "intermediate_size": config.expert_size,
        "num_local_experts": config.moe.num_experts,
        "num_experts_per_tok": config.moe.moe_router_topk,
    }


def _olmoe(config: RunConfig) -> Values:
    assert config.moe is not None
    return _llama(config) | {
        "intermediate_size": config.expert_size,
        "num_experts": config.moe.num_experts,
        "num_experts_per_tok": config.moe.moe_router_topk,
        "norm_topk_prob": not config.moe.moe_router_pre_softmax,
        "clip_qkv": None,
        "attention_bias": False,
    }


def _qwen_moe(config: RunConfig) -> Values:
    moe = config.moe
    assert moe is not None
    values = _qwen(config) | {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.moe_router_topk,
        "norm_topk_prob": not moe.moe_router_pre_softmax,
        "moe_intermediate_size": config.expert_size,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, is_moe in enumerate(config.moe_layers) if not is_moe],
    }
    if moe.moe_shared_expert_intermediate_size is not None:
        values["shared_expert_intermediate_size"] = moe.moe_shared_expert_intermediate_size
    return values


WRITERS: dict[str, Callable[[RunConfig], Values]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _with_null_window,
    "qwen2": _qwen,
    "qwen3": _qwen,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen_moe,
    "qwen3_moe": _qwen_moe,
    "olmoe": _olmoe,
    "bert": _bert,
    "megatron-bert": _bert,
}


def config_values(config: RunConfig, family: str, vocab_size: int, dtype: str, architecture: str = "") -> Values:
    """The config.json of a model with our settings. `dtype` is torch's name, `architecture` a class of transformers."""
    values = {
        "architectures": [architecture or CLASSES[family]],
        "model_type": family,
        **WRITERS[family](config),
        "vocab_size": vocab_size,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    return values
