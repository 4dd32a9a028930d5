"""Numbers of a file. Reference: numpy's own reading of it, whether mapped or read."""

import os
import pickle

import numpy as np
import pytest

from megatron_parm.data.indexed_dataset import IndexedDataset
from megatron_parm.data.token_file import MappedTokens, PlainTokens
from megatron_parm.errors import DataError
from tests.data.corpora import write_documents

KINDS = [MappedTokens, PlainTokens]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["u1", "u2", "i4", "i8", "f4"])
def test_numbers_of_a_range(tmp_path, kind, dtype) -> None:
    expected = np.arange(50).astype(dtype)
    expected.tofile(tmp_path / "x.bin")
    file = kind(tmp_path / "x.bin", np.dtype(dtype))
    for first, count in ((0, 50), (7, 11), (49, 1), (3, 0)):
        found = file.read(first, count)
        assert found.tolist() == expected[first : first + count].tolist()
        assert found.dtype == dtype and not found.flags.writeable


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_file_and_none(tmp_path, kind) -> None:
    (tmp_path / "x.bin").write_bytes(b"")
    assert kind(tmp_path / "x.bin", np.dtype("u2")).read(0, 0).tolist() == []
    with pytest.raises(DataError, match=r"--data-path: token file .*y.bin does not exist"):
        kind(tmp_path / "y.bin", np.dtype("u2"))


def test_a_file_that_shrinks_is_an_error_for_plain_reads(tmp_path) -> None:
    dataset = IndexedDataset(write_documents(tmp_path / "x", [[1, 2, 3], [4, 5]]), maps_tokens=False)
    os.truncate(tmp_path / "x.bin", 4)
    assert dataset.read(0, 0, 2).tolist() == [1, 2]
    with pytest.raises(DataError, match=r"x.bin: ends at byte 4, which it did not when it was opened"):
        dataset.read(0)


def test_a_long_read_may_come_in_parts(tmp_path, monkeypatch) -> None:
    """The system may return fewer bytes than were asked for, also in the middle of a number."""
    np.arange(20, dtype="i4").tofile(tmp_path / "x.bin")
    whole = os.pread
    monkeypatch.setattr(os, "pread", lambda file, count, offset: whole(file, min(count, 7), offset))
    assert PlainTokens(tmp_path / "x.bin", np.dtype("i4")).read(2, 18).tolist() == list(range(2, 20))


def test_a_copy_for_another_process_reads_in_the_same_way(tmp_path) -> None:
    dataset = IndexedDataset(write_documents(tmp_path / "x", [[1, 2, 3], [4, 5]]), maps_tokens=False)
    copy = pickle.loads(pickle.dumps(dataset))
    assert isinstance(copy._file, PlainTokens)
    assert copy.read(1).tolist() == [4, 5]
