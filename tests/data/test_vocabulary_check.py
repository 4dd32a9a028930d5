"""Ids outside the vocabulary. Reference: the ids written here."""

import pytest

from megatron_parm.data import vocabulary_check
from megatron_parm.data.index_cache import IndexCache
from megatron_parm.data.indexed_dataset import IndexedDataset
from megatron_parm.data.vocabulary_check import check_token_ids
from megatron_parm.errors import DataError
from tests.data.corpora import write_documents

NO_CACHE = IndexCache(None)


def test_the_first_too_large_id_is_named_with_its_place(tmp_path) -> None:
    dataset = IndexedDataset(write_documents(tmp_path / "x", [[1, 2], [], [3, 7, 5], [7]]))
    check_token_ids(dataset, 8, NO_CACHE)
    with pytest.raises(DataError, match=r"x.bin: token id 7 at place 1 of sequence 2 .* 0\.\.6; .*--vocab-file"):
        check_token_ids(dataset, 7, NO_CACHE)


def test_a_negative_id_is_named(tmp_path) -> None:
    dataset = IndexedDataset(write_documents(tmp_path / "x", [[1], [2, -5]], dtype="i4"))
    with pytest.raises(DataError, match="token id -5 at place 1 of sequence 1"):
        check_token_ids(dataset, 100, NO_CACHE)


def test_the_file_is_read_once_for_all_vocabularies(tmp_path, monkeypatch) -> None:
    prefix = write_documents(tmp_path / "x", [[1, 2], [3]])
    cache = IndexCache(tmp_path / "cache")
    check_token_ids(IndexedDataset(prefix), 4, cache)
    monkeypatch.setattr(vocabulary_check, "_extremes", None)
    check_token_ids(IndexedDataset(prefix), 9, cache)
    with pytest.raises(DataError, match="token id 3"):
        check_token_ids(IndexedDataset(prefix), 3, cache)


def test_a_file_written_anew_is_read_anew(tmp_path) -> None:  # FC-08
    cache = IndexCache(tmp_path / "cache")
    check_token_ids(IndexedDataset(write_documents(tmp_path / "x", [[1, 2], [3]])), 4, cache)
    same_sizes = IndexedDataset(write_documents(tmp_path / "x", [[1, 9], [3]]))
    with pytest.raises(DataError, match="token id 9"):
        check_token_ids(same_sizes, 4, cache)


def test_chunks_are_joined(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("megatron_parm.data.indexed_dataset.CHUNK", 3)
    dataset = IndexedDataset(write_documents(tmp_path / "x", [[1, 2, 3, 4], [5, 6, 40, 1]]))
    with pytest.raises(DataError, match="token id 40 at place 2 of sequence 1"):
        check_token_ids(dataset, 40, NO_CACHE)
