"""The bytes of .bin and .idx. Reference: sha256 of files that Megatron writes for the same sequences."""

import hashlib
import os
import resource

import numpy as np
import pytest

from megatron_parm.data.index_format import sequence_offsets, token_dtype
from megatron_parm.data.indexed_dataset import IndexedDataset
from megatron_parm.data.indexed_writer import IndexedWriter
from megatron_parm.errors import DataError

SHA_I4 = "9ac84189d119f7684ee4775f7a5d7c6f471025e13c1d4ba37513df75dd92392b"
SHA_U2 = "2cd433c202fa0eeb418cf4c9f35ba65e7cd8e1f72a70ae8f50c84aed0dcf0b00"


@pytest.mark.parametrize(("dtype", "sha"), [("i4", SHA_I4), ("u2", SHA_U2)])
def test_index_bytes_are_megatrons(tmp_path, dtype, sha) -> None:
    with IndexedWriter(tmp_path / "x", np.dtype(dtype)) as writer:
        writer.add_document(np.array([1, 2, 3, 4, 5]), [3, 2])
        writer.add_document(np.array([6, 7, 8, 9, 10]))
    index = (tmp_path / "x.idx").read_bytes()
    assert len(index) == 94
    assert hashlib.sha256(index).hexdigest() == sha
    assert (tmp_path / "x.bin").read_bytes() == np.arange(1, 11, dtype=dtype).tobytes()


def test_documents_in_bulk_and_one_by_one_give_the_same_bytes(tmp_path) -> None:
    documents = [[1, 2], [3], [4, 5, 6]]
    with IndexedWriter(tmp_path / "one", np.dtype("u2")) as one:
        for document in documents:
            one.add_document(np.array(document))
    with IndexedWriter(tmp_path / "bulk", np.dtype("u2")) as bulk:
        bulk.add_documents(np.array([1, 2, 3]), np.array([2, 1]))
        bulk.add_documents(np.array([4, 5, 6]), np.array([3]))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"bulk{suffix}").read_bytes()


def test_offsets_do_not_overflow() -> None:  # FC-06
    lengths = np.array([2**30, 2**30, 2**30], dtype=np.int32)
    assert sequence_offsets(lengths, 4).tolist() == [0, 4294967296, 8589934592]
    assert sequence_offsets(np.zeros(0, dtype=np.int32), 4).tolist() == []


@pytest.mark.parametrize(("vocab", "dtype"), [(257, "u2"), (65499, "u2"), (65500, "i4"), (100_000, "i4")])
def test_token_type_follows_the_vocabulary(vocab, dtype) -> None:
    assert token_dtype(vocab) == np.dtype(dtype)


@pytest.mark.parametrize("ids", [[70000], [-1]])
def test_an_id_that_does_not_fit_is_refused_and_nothing_is_left(tmp_path, ids) -> None:
    with pytest.raises(DataError, match=r"x.bin: token ids .* do not fit uint16"), _writer(tmp_path) as writer:
        writer.add_document(np.array([1]))
        writer.add_document(np.array(ids))
    assert list(tmp_path.iterdir()) == []


def test_lengths_must_add_up_and_fit(tmp_path) -> None:
    with pytest.raises(DataError, match="add up to 3, but 2 ids"), _writer(tmp_path) as writer:
        writer.add_document(np.array([1, 2]), [2, 1])
    with pytest.raises(DataError, match="sequence of 2147483648 tokens"), _writer(tmp_path) as writer:
        writer.add_documents(np.array([1, 2]), np.array([2**31]))


def test_an_interrupted_run_leaves_the_earlier_files(tmp_path) -> None:  # FC-04
    with _writer(tmp_path) as writer:
        writer.add_document(np.array([1, 2]))
    with pytest.raises(KeyboardInterrupt), _writer(tmp_path) as writer:
        writer.add_document(np.array([3, 4, 5]))
        raise KeyboardInterrupt
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "x.idx"]
    assert IndexedDataset(tmp_path / "x").read(0).tolist() == [1, 2]


def test_the_index_comes_last(tmp_path, monkeypatch) -> None:
    """Whatever stops the writer while it names its files, no index that opens is left."""
    with _writer(tmp_path) as writer:
        writer.add_document(np.array([1, 2]))
    writer = _writer(tmp_path)
    writer.add_document(np.array([3, 4, 5]))
    renamed = []

    def replace(path, target) -> None:
        renamed.append(target.suffix)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(tmp_path), "replace", replace)
    with pytest.raises(DataError, match="No space left"):
        writer.finish()
    assert renamed == [".bin"]
    assert not (tmp_path / "x.idx").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write .*file/x.bin"):
        IndexedWriter(tmp_path / "file" / "x", np.dtype("u2"))


def _writer(folder) -> IndexedWriter:
    return IndexedWriter(folder / "x", np.dtype("u2"))


def test_memory_does_not_grow_with_the_number_of_documents(tmp_path) -> None:
    """Ten million documents in a child of its own; the numbers of the index alone are 200 MB."""
    child = os.fork()
    if child == 0:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        ids, lengths = np.ones(100_000, dtype=np.uint16), np.ones(100_000, dtype=np.int32)
        with IndexedWriter(tmp_path / "x", np.dtype("u2")) as writer:
            for _ in range(100):
                writer.add_documents(ids, lengths)
        (tmp_path / "grown").write_text(str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    dataset = IndexedDataset(tmp_path / "x")
    assert dataset.num_documents == 10_000_000 and dataset.read(9_999_999).tolist() == [1]
    assert int((tmp_path / "grown").read_text()) < 80_000  # KiB
