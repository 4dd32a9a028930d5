"""Rules of the corpus. Reference: Megatron's sources of text, of which a run has one."""

import itertools

import pytest

from megatron_parm.config.checks_data import check_data
from megatron_parm.config.data import DataConfig
from megatron_parm.errors import ConfigError

SOURCES = {
    "data_path": ("x",),
    "data_args_path": "x",
    "mock_data": True,
    "train_data_path": ("x",),
    "per_split_data_args_path": "x",
}


def config(**fields) -> DataConfig:
    return DataConfig(seq_length=16, tokenizer_type="NullTokenizer", vocab_size=9, **fields)


@pytest.mark.parametrize("name", SOURCES)
def test_each_source_alone_is_enough(name) -> None:
    check_data(config(**{name: SOURCES[name]}))


def test_two_sources_are_refused_and_none() -> None:
    for first, second in itertools.combinations(SOURCES, 2):
        flags = "|".join("--" + name.replace("_", "-") for name in (first, second))
        with pytest.raises(ConfigError, match=f"(?:(?:{flags}) and (?:{flags})).*one source of text"):
            check_data(config(**{first: SOURCES[first], second: SOURCES[second]}))
    with pytest.raises(ConfigError, match="--data-path PREFIX is required"):
        check_data(config())


def test_held_out_paths_belong_to_a_training_path() -> None:
    check_data(config(train_data_path=("x",), valid_data_path=("y",), test_data_path=("z",)))
    with pytest.raises(ConfigError, match="--valid-data-path: the text to train on is missing"):
        check_data(config(valid_data_path=("y",)))
