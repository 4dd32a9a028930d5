"""Where a run's prefixes come from. Reference: the words on the command line; Megatron's two kinds of files."""

import pytest

from megatron_parm.data.data_paths import DataPaths, read_data_paths
from megatron_parm.errors import ConfigError


def test_flags_are_taken_as_they_are() -> None:
    assert read_data_paths(("1", "a", "2", "b")) == DataPaths(whole=("1", "a", "2", "b"))
    assert read_data_paths((), (("a",), ("b", "c"), ())) == DataPaths(by_split=(("a",), ("b", "c"), ()))


def test_a_file_holds_the_words_of_the_flag(tmp_path) -> None:
    (tmp_path / "args").write_text("0.3 first\n0.7\tsecond\n")
    assert read_data_paths((), data_args_path=str(tmp_path / "args")).whole == ("0.3", "first", "0.7", "second")


@pytest.mark.parametrize(
    ("text", "by_split"),
    [
        ('{"train": "1 a 2 b", "valid": ["c"], "test": null}', (("1", "a", "2", "b"), ("c",), ())),
        ('{"train": [0.5, "a", 0.5, "b"]}', (("0.5", "a", "0.5", "b"), (), ())),
    ],
)
def test_a_json_file_holds_a_corpus_for_each_split(tmp_path, text, by_split) -> None:
    (tmp_path / "args.json").write_text(text)
    assert read_data_paths((), per_split_data_args_path=str(tmp_path / "args.json")).by_split == by_split


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[1]", r"expected an object .* found \[1\]"),
        ('{"train": "a", "vaild": "b"}', "unknown key 'vaild'; the keys are train, valid and test"),
        ('{"valid": "b"}', "train is missing"),
        ('{"train": {"a": 1}}', "train must be a text or a list"),
    ],
)
def test_a_wrong_json_file_is_named_with_its_problem(tmp_path, text, message) -> None:
    (tmp_path / "args.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"--per-split-data-args-path .*args.json: {message}"):
        read_data_paths((), per_split_data_args_path=str(tmp_path / "args.json"))


@pytest.mark.parametrize("name", ["data_args_path", "per_split_data_args_path"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, name) -> None:
    flag = "--" + name.replace("_", "-")
    with pytest.raises(ConfigError, match=rf"{flag} .*nowhere.*No such file"):
        read_data_paths((), **{name: str(tmp_path / "nowhere")})
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=rf"{flag} .*bytes.*not a UTF-8 text"):
        read_data_paths((), **{name: str(tmp_path / "bytes")})


def test_an_empty_file_is_named(tmp_path) -> None:
    (tmp_path / "args").write_text(" \n")
    with pytest.raises(ConfigError, match=r"--data-args-path .*args: the file is empty"):
        read_data_paths((), data_args_path=str(tmp_path / "args"))
