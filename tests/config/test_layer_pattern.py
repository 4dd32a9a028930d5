"""config/layer_pattern.py. Reference: Python's list arithmetic, and Megatron's rule (layer i is MoE if i % N == 0)."""

import time

import pytest

from megatron_parm.config.layer_pattern import every_last_of, moe_layer_pattern
from megatron_parm.errors import ConfigError


@pytest.mark.parametrize(
    ("expression", "layers", "pattern"),
    [
        ("1", 3, [1, 1, 1]),
        ("2", 5, [1, 0, 1, 0, 1]),
        ("3", 4, [1, 0, 0, 1]),
        ("([0]+[1]*3)*2", 8, ([0] + [1] * 3) * 2),
        ("([0]+[1]*23)", 24, [0] + [1] * 23),
        ("[1, 0, 0]", 3, [1, 0, 0]),
        ("2*[0,1]", 4, [0, 1] * 2),
        ("[0]*(layers-1)+[1]", 6, [0] * 5 + [1]),
        (" [1]*(7//2) + [0]*(7%4-1)", 5, [1] * 3 + [0] * 2),
    ],
)
def test_expressions_mean_what_python_means(expression: str, layers: int, pattern: list[int]) -> None:
    assert moe_layer_pattern(expression, layers) == tuple(bool(entry) for entry in pattern)


@pytest.mark.parametrize("layers", [1, 4, 7])
@pytest.mark.parametrize("interval", [1, 2, 3])
def test_deepspeeds_interval_counts_layers_from_one(interval: int, layers: int) -> None:
    expected = tuple(number % interval == 0 for number in range(1, layers + 1))
    assert moe_layer_pattern(every_last_of(str(interval)), layers) == expected


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('true')",
        "open('x')",
        "[x for x in [1]]",
        "(1).bit_length()",
        "[1]*10000000000",
        "[[1]*9000]*9000",
        "9**9**9",
        "99999*99999",
        "1//0",
        "[1]+1",
        "[[1]]",
        "[2]",
        "0",
        "-1",
        "1.5",
        "True",
        "",
        "[1",
        "layer",
        "'1'",
        "(" * 400 + "1" + ")" * 400,
        "[1]*" * 900 + "1",
    ],
)
def test_everything_else_is_refused_at_once(expression: str) -> None:
    start = time.perf_counter()
    with pytest.raises(ConfigError, match="--moe-layer-freq"):
        moe_layer_pattern(expression, 4)
    assert time.perf_counter() - start < 2.0


def test_a_list_of_another_length_names_both_lengths() -> None:
    with pytest.raises(ConfigError, match="describes 8 layers, --num-layers is 12"):
        moe_layer_pattern("([0]+[1]*3)*2", 12)


@pytest.mark.parametrize("interval", ["0", "-2", "x", ""])
def test_an_interval_is_a_positive_number(interval: str) -> None:
    with pytest.raises(ConfigError, match="--expert-interval"):
        every_last_of(interval)
