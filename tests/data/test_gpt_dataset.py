"""Samples of a GPT. Reference: the joined documents in reading order, cut by hand; masks by a plain double loop."""

import contextlib

import numpy as np
import pytest

from megatron_parm.data.gpt_dataset import DocumentRules, GPTDataset, make_sample
from megatron_parm.data.indexed_dataset import IndexedDataset
from megatron_parm.data.token_index import build_token_index, plan_epochs
from megatron_parm.errors import DataError
from tests.data.corpora import numbered_documents, write_documents

EOD = 99


def dataset_of(prefix, lengths, sequence_length, samples, rules=DocumentRules()):  # noqa: B008
    source = IndexedDataset(write_documents(prefix, numbered_documents(lengths, EOD)))
    plan = plan_epochs(source.num_tokens, sequence_length, samples, source.name)
    index = build_token_index(source.lengths, np.arange(len(source)), plan, seed=1234)
    return GPTDataset(source, index, sequence_length, rules)


@pytest.mark.parametrize("sequence_length", [1, 2, 8, 16])
def test_samples_are_windows_of_the_joined_documents(tmp_path, sequence_length) -> None:
    dataset = dataset_of(tmp_path / "x", [7, 4, 9, 3, 6], sequence_length, 9)
    stream = np.concatenate([dataset.source.read(int(number)) for number in dataset.index.document])
    for number in range(len(dataset)):
        start = int(dataset.index.shuffle[number]) * sequence_length
        sample = dataset[number]
        assert sample["tokens"].tolist() == stream[start : start + sequence_length].tolist()
        assert sample["labels"].tolist() == stream[start + 1 : start + 1 + sequence_length].tolist()
        assert sample["tokens"].dtype == sample["labels"].dtype == sample["position_ids"].dtype == np.int64
        assert sample["loss_mask"].dtype == np.float32 and sample["loss_mask"].all()
        assert sample["position_ids"].tolist() == list(range(sequence_length))
        assert "attention_mask" not in sample
    with pytest.raises(IndexError):
        dataset[len(dataset)]
    with pytest.raises(IndexError):
        dataset[-1]


def test_neighbours_share_one_token(tmp_path) -> None:  # FC-07
    dataset = dataset_of(tmp_path / "x", [7] * 10, 16, 8)
    ids = {int(row): dataset.token_ids(number) for number, row in enumerate(dataset.index.shuffle)}
    assert all(len(window) == 17 for window in ids.values())
    assert all(ids[row][-1] == ids[row + 1][0] for row in range(len(ids) - 1))


@pytest.mark.parametrize(
    ("array", "place", "value"),
    [
        ("shuffle", 0, 2**31),
        ("sample", (1, 0), 77),
        ("sample", (1, 0), -1),
        ("sample", (1, 1), 8),
        ("sample", (1, 1), -3),
        ("document", 0, 1000),
        ("document", 0, -1),
        ("document", 0, 1),  # a sequence of another length
    ],
)
def test_a_damaged_index_is_never_read_out_of_range(tmp_path, array, place, value) -> None:
    dataset = dataset_of(tmp_path / "x", [7, 4, 9, 3, 6], 8, 3)
    getattr(dataset.index, array)[place] = value
    for number in range(len(dataset)):
        with contextlib.suppress(DataError):
            assert len(dataset.token_ids(number)) == 9
    with pytest.raises(DataError, match=r"the index of .*x is damaged: .*delete the index cache"):
        [dataset.token_ids(number) for number in range(len(dataset))]


TOKENS = [5, EOD, 6, 7, EOD, EOD, 8]
SAMPLE = np.array([*TOKENS, 9], dtype=np.int64)


def test_without_rules_the_end_of_a_document_is_a_token_like_others() -> None:
    sample = make_sample(SAMPLE, DocumentRules(EOD))
    assert sample["loss_mask"].tolist() == [1.0] * 7
    assert sample["position_ids"].tolist() == list(range(7))


def test_eod_mask_loss_looks_at_the_input() -> None:
    assert make_sample(SAMPLE, DocumentRules(EOD, eod_mask_loss=True))["loss_mask"].tolist() == [1, 0, 1, 1, 0, 0, 1]


def test_positions_begin_anew_after_each_end() -> None:
    sample = make_sample(SAMPLE, DocumentRules(EOD, reset_position_ids=True))
    assert sample["position_ids"].tolist() == [0, 1, 0, 1, 2, 0, 0]


def test_the_mask_hides_what_is_later_and_other_documents() -> None:
    mask = make_sample(SAMPLE, DocumentRules(EOD, reset_attention_mask=True))["attention_mask"]
    assert mask.shape == (1, 7, 7) and mask.dtype == np.bool_
    for row in range(7):
        last_end = max((place for place in range(row) if TOKENS[place] == EOD), default=-1)
        assert mask[0, row].tolist() == [not last_end < column <= row for column in range(7)]
