"""config/model.py. Reference: Megatron-Core's defaults, written out."""

import pytest

from megatron_parm.config.model import ModelConfig


def model(**changes: object) -> ModelConfig:
    return ModelConfig(
        **{"num_layers": 2, "hidden_size": 256, "num_attention_heads": 8, "max_position_embeddings": 64} | changes
    )


def test_the_feed_forward_is_four_times_as_wide() -> None:
    assert model().feed_forward_size == 1024
    assert model(ffn_hidden_size=48).feed_forward_size == 48


@pytest.mark.parametrize(("hidden", "width"), [(256, 640), (4096, 10880), (96, 256), (16, 0)])
def test_swiglu_is_eight_thirds_floored_to_64(hidden: int, width: int) -> None:
    assert model(hidden_size=hidden, swiglu=True).feed_forward_size == width == int(hidden * 8 / 3) // 64 * 64


def test_heads_and_groups() -> None:
    assert model().head_dim == 32
    assert model(kv_channels=40).head_dim == 40
    assert model(num_query_groups=2).query_groups == 8
    assert model(num_query_groups=2, group_query_attention=True).query_groups == 2
    assert model(rotary_percent=0.25).rotary_dim == 8


@pytest.mark.parametrize("name", ["openai_gelu", "squared_relu", "swiglu"])
def test_activations(name: str) -> None:
    assert model().activation == "gelu"
    assert model(**{name: True}).activation == name


def test_biases() -> None:
    assert model().has_linear_bias
    assert model().has_qkv_bias
    assert not model(disable_bias_linear=True).has_qkv_bias
    assert model(disable_bias_linear=True, add_qkv_bias=True).has_qkv_bias
