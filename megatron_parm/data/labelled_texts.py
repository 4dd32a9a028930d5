"""Files of labelled texts, one or two a line, for classification. Floor 4.

A .jsonl file has an object a line with `label`, `text` and, for pairs, `text_b` (or `sentence1`, `sentence2`). Any
other file is tab-separated under a line of the same names. Every line must have the same columns and a known label.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_parm.data.bert_dataset import SpecialIds
from megatron_parm.errors import ConfigError, DataError
from megatron_parm.tokenizers.base import Tokenizer

FIRST, SECOND = ("text", "text_a", "sentence", "sentence1"), ("text_b", "sentence2")
FILLER = -1  # the label of a sample that only fills a batch
Column = NDArray[np.int64]


@dataclass(frozen=True)
class Encoded:
    """Ids of the texts of each line ([] for no second one), and the numbers of their classes."""

    first: list[list[int]]
    second: list[list[int]]
    labels: list[int]


def read_labelled(path: Path, class_names: Sequence[str], tokenizer: Tokenizer) -> Encoded:
    """Read and encode a file. Raises DataError naming file, line and reason, ConfigError for a missing file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file of labelled texts") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 ({error}); correct it") from error
    rows = _json_rows(path, lines) if path.suffix in (".jsonl", ".json") else _tab_rows(path, lines)
    if not rows:
        raise DataError(f"{path}: no labelled text was found")
    places = {name: number for number, name in enumerate(class_names)}
    first, second, labels = [], [], []
    has_pairs = _value(rows[0][1], SECOND) is not None
    for number, row in rows:
        text, other, label = _value(row, FIRST), _value(row, SECOND), row.get("label")
        if text is None or label is None or (other is not None) is not has_pairs:
            raise DataError(
                f"{path} line {number}: expected label, text{' and text_b' if has_pairs else ''} as in the first line, "
                f"found {', '.join(row) or 'nothing'}"
            )
        if label not in places:
            raise DataError(f"{path} line {number}: the label {label!r} is none of --class-names {' '.join(places)}")
        first.append(text)
        second.append(other or "")
        labels.append(places[label])
    return Encoded([tokenizer.encode(text) for text in first], [tokenizer.encode(text) for text in second], labels)


def _value(row: dict[str, str], names: Sequence[str]) -> str | None:
    return next((row[name] for name in names if name in row), None)


def _json_rows(path: Path, lines: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path} line {number}: no JSON ({error}); correct it") from error
        if not isinstance(row, dict):
            raise DataError(f"{path} line {number}: expected an object with label and text")
        rows.append((number, {str(name): _as_text(value) for name, value in row.items()}))
    return rows


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _tab_rows(path: Path, lines: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    names = lines[0].split("\t") if lines else []
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        values = line.split("\t")
        if len(values) != len(names):
            raise DataError(f"{path} line {number}: {len(values)} columns under {len(names)} names; correct it")
        rows.append((number, dict(zip(names, values, strict=True))))
    return rows


def join_segments(
    first: Sequence[int], second: Sequence[int], special: SpecialIds, length: int
) -> tuple[list[int], list[int]]:
    """[CLS] A [SEP], and B [SEP] where there is one, with their segments; the longer text loses its end first."""
    room = length - (3 if second else 2)
    kept, other = len(first), len(second)
    while kept + other > room:
        if kept >= other:
            kept -= 1
        else:
            other -= 1
    ids = [special.cls, *first[:kept], special.sep]
    types = [0] * len(ids)
    if second:
        ids += [*second[:other], special.sep]
        types += [1] * (other + 1)
    return ids, types


class LabelledTexts:
    """Samples `text`, `types`, `padding_mask` [s] and `label` []: epochs, each in an order of its own.

    With `num_samples` None one epoch in the order of the file, filled up to a multiple of `multiple` by samples
    without a class.
    """

    def __init__(
        self,
        encoded: Encoded,
        special: SpecialIds,
        sequence_length: int,
        num_samples: int | None,
        seed: int,
        multiple: int = 1,
    ) -> None:
        self._encoded, self._special, self._length = encoded, special, sequence_length
        count = len(encoded.labels)
        if num_samples is None:
            self._order = np.arange(-(-count // multiple) * multiple)
        else:
            random = np.random.RandomState(seed)
            epochs = [random.permutation(count) for _ in range(-(-num_samples // count))]
            self._order = np.concatenate(epochs)[:num_samples] if epochs else np.arange(0)

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, number: int) -> dict[str, Column]:
        place = int(self._order[number])
        encoded, is_filler = self._encoded, place >= len(self._encoded.labels)
        place = 0 if is_filler else place
        ids, types = join_segments(encoded.first[place], encoded.second[place], self._special, self._length)
        text = np.full(self._length, self._special.pad, dtype=np.int64)
        segments, mask = np.zeros(self._length, dtype=np.int64), np.zeros(self._length, dtype=np.int64)
        text[: len(ids)], segments[: len(ids)], mask[: len(ids)] = ids, types, 1
        label = np.array(FILLER if is_filler else encoded.labels[place], dtype=np.int64)
        return {"text": text, "types": segments, "padding_mask": mask, "label": label}
