"""config/data.py. Reference: Megatron's --split, three parts, missing ones 0."""

import pytest

from megatron_parm.config.data import DataConfig
from megatron_parm.errors import ConfigError


@pytest.mark.parametrize(
    ("split", "weights"),
    [
        ("969, 30, 1", (969, 30, 1)),
        ("100,0,0", (100, 0, 0)),
        ("90/10", (90, 10, 0)),
        ("1", (1, 0, 0)),
        ("0.5,0.25,0.25", (0.5, 0.25, 0.25)),
    ],
)
def test_split_weights(split: str, weights: tuple[float, float, float]) -> None:
    assert DataConfig(seq_length=16, split=split).split_weights == weights


@pytest.mark.parametrize("split", ["", "1,2,3,4", "a,b,c", "0,0,0", "-1,2,3", "nan,1,1", "inf,1,1"])
def test_other_splits_are_refused(split: str) -> None:
    with pytest.raises(ConfigError, match="--split"):
        _ = DataConfig(seq_length=16, split=split).split_weights
