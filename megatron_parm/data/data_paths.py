"""Which prefixes a run reads: the words of the flags, or of the files that hold them. Floor 4. Source: formats C.5."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_parm.data.splits import SPLIT_NAMES
from megatron_parm.errors import ConfigError


@dataclass(frozen=True)
class DataPaths:
    """The words of one corpus that --split cuts, or those of a corpus for each split; the other is empty."""

    whole: tuple[str, ...] = ()
    by_split: tuple[tuple[str, ...], ...] = ((), (), ())


def read_data_paths(
    data_path: Sequence[str],
    paths_by_split: Sequence[Sequence[str]] = ((), (), ()),
    *,
    data_args_path: str | None = None,
    per_split_data_args_path: str | None = None,
) -> DataPaths:
    """The paths of whichever source is given.

    `data_args_path` is a text file with the words of --data-path; `per_split_data_args_path` a JSON file whose keys
    train, valid and test each hold such words, as one text or a list. Paths are relative to the current folder, as on
    the command line. Raises ConfigError naming the file.
    """
    if data_args_path is not None:
        words = tuple(_text_of(data_args_path, "--data-args-path").split())
        if not words:
            raise ConfigError(f"--data-args-path {data_args_path}: the file is empty; give it the words of --data-path")
        return DataPaths(whole=words)
    if per_split_data_args_path is not None:
        return DataPaths(by_split=_read_splits(per_split_data_args_path))
    return DataPaths(tuple(data_path), tuple(tuple(words) for words in paths_by_split))


def _read_splits(path: str) -> tuple[tuple[str, ...], ...]:
    flag = f"--per-split-data-args-path {path}"
    try:
        found = json.loads(_text_of(path, "--per-split-data-args-path"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f'{flag}: not JSON ({error}); expected {{"train": "PREFIX", "valid": "PREFIX"}}') from None
    if not isinstance(found, Mapping):
        raise ConfigError(f"{flag}: expected an object with the keys train, valid and test, found {found!r:.40}")
    unknown = [name for name in found if name not in SPLIT_NAMES]
    if unknown or not found.get("train"):
        problem = f"unknown key {unknown[0]!r}" if unknown else "train is missing"
        raise ConfigError(f"{flag}: {problem}; the keys are train, valid and test, and train is needed")
    return tuple(_words(found.get(name), name, flag) for name in SPLIT_NAMES)


def _words(value: object, name: str, flag: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return tuple(value.split())
    if isinstance(value, list) and all(isinstance(word, str | int | float) for word in value):
        return tuple(str(word) for word in value)
    raise ConfigError(f"{flag}: {name} must be a text or a list of weights and prefixes, found {value!r:.40}")


def _text_of(path: str, flag: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a UTF-8 text"
        raise ConfigError(f"{flag} {path}: cannot be read ({reason})") from None
