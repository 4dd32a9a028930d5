"""The shape's defaults are those of Megatron's help, and the output layers start narrower."""

import math

from tests.models.gpt_cases import small_shape


def test_output_layers_start_narrower_by_the_depth() -> None:
    shape = small_shape(num_layers=8)
    assert shape.initialiser.std == 0.02
    assert math.isclose(shape.output_initialiser.std, 0.02 / 4)


def test_norm_of_heads_follows_the_norm_of_the_model() -> None:
    assert small_shape().attention.norm_of_heads is None
    assert small_shape(has_norm_of_heads=True, normalisation="RMSNorm").attention.norm_of_heads == "RMSNorm"
