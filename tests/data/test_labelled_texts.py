"""Files of labelled texts. References: samples written out by hand."""

from pathlib import Path

import pytest

from megatron_parm.data.bert_dataset import SpecialIds
from megatron_parm.data.labelled_texts import FILLER, Encoded, LabelledTexts, join_segments, read_labelled
from megatron_parm.errors import DataError
from megatron_parm.tokenizers.null import NullTokenizer

SPECIAL = SpecialIds(cls=101, sep=102, mask=103, pad=0)
NULL = NullTokenizer(50)


def test_both_formats_give_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("text\tlabel\ttext_b\n1 2\tyes\t3\n4\tno\t5 6\n")
    (tmp_path / "a.jsonl").write_text(
        '{"label": "yes", "sentence1": "1 2", "sentence2": "3"}\n\n'
        '{"label": "no", "sentence1": "4", "sentence2": "5 6"}'
    )
    expected = Encoded([[1, 2], [4]], [[3], [5, 6]], [1, 0])
    assert read_labelled(tmp_path / "a.tsv", ("no", "yes"), NULL) == expected
    assert read_labelled(tmp_path / "a.jsonl", ("no", "yes"), NULL) == expected


def test_a_number_is_a_label(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"label": 1, "text": "7"}')
    assert read_labelled(tmp_path / "a.jsonl", ("0", "1"), NULL).labels == [1]


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.tsv", "label\ttext\nyes\t1\nyes\n", "line 3: 1 columns"),
        ("a.tsv", "label\ttext\nyes\t1\nperhaps\t2\n", "line 3: the label 'perhaps'"),
        ("a.tsv", "class\ttext\nyes\t1\n", "line 2: expected label, text"),
        ("a.jsonl", '{"label": "yes", "text": "1"}\n{"label": "yes", "text": "1", "text_b": "2"}', "line 2: expected"),
        ("a.jsonl", "{", "line 1: no JSON"),
        ("a.jsonl", "[]", "line 1: expected an object"),
        ("a.tsv", "label\ttext\n", "no labelled text"),
    ],
)
def test_a_line_that_is_no_labelled_text_is_named(tmp_path: Path, name: str, text: str, told: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=told):
        read_labelled(tmp_path / name, ("no", "yes"), NULL)


@pytest.mark.parametrize(
    ("first", "second", "ids", "types"),
    [
        ([1, 2], [], [101, 1, 2, 102], [0, 0, 0, 0]),
        ([1, 2, 3, 4, 5, 6, 7], [], [101, 1, 2, 3, 4, 5, 102], [0] * 7),
        ([1, 2, 3, 4, 5], [8], [101, 1, 2, 3, 102, 8, 102], [0, 0, 0, 0, 0, 1, 1]),
        ([1], [6, 7, 8, 9], [101, 1, 102, 6, 7, 8, 102], [0, 0, 0, 1, 1, 1, 1]),
    ],
)
def test_segments_are_joined_and_the_longer_one_is_cut(
    first: list[int], second: list[int], ids: list[int], types: list[int]
) -> None:
    assert join_segments(first, second, SPECIAL, 7) == (ids, types)


def test_epochs_have_orders_of_their_own_and_whole_sets_are_filled_up() -> None:
    encoded = Encoded([[number] for number in range(5)], [[]] * 5, [0, 1, 0, 1, 1])
    epochs = LabelledTexts(encoded, SPECIAL, 4, 12, seed=3)
    firsts = [int(epochs[number]["text"][1]) for number in range(12)]
    assert sorted(firsts[:5]) == sorted(firsts[5:10]) == [0, 1, 2, 3, 4] and firsts[:5] != firsts[5:10]
    whole = LabelledTexts(encoded, SPECIAL, 4, None, seed=3, multiple=4)
    assert [int(whole[number]["label"]) for number in range(len(whole))] == [0, 1, 0, 1, 1, FILLER, FILLER, FILLER]
    assert whole[1]["text"].tolist() == [101, 1, 102, 0] and whole[1]["padding_mask"].tolist() == [1, 1, 1, 0]
