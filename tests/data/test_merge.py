"""Merging. Reference: the file that one writer writes for the documents of all parts, byte for byte."""

import numpy as np
import pytest

from megatron_parm.data.indexed_dataset import IndexedDataset
from megatron_parm.data.indexed_writer import IndexedWriter
from megatron_parm.data.merge import exists, merge, pairs_of
from megatron_parm.errors import ConfigError, DataError
from tests.data.corpora import write_documents

PARTS = {"a": [[[1, 2], [3]], [[4]]], "b": [], "c": [[[5, 6, 7]], [], [[8], [9, 10]]]}


def write(prefix, documents, dtype="u2", modes=None) -> str:
    with IndexedWriter(prefix, np.dtype(dtype), has_modes=modes is not None) as writer:
        for document in documents:
            ids = np.array([token for sequence in document for token in sequence], dtype=np.int64)
            writer.add_document(
                ids, [len(sequence) for sequence in document], None if modes is None else [modes] * len(document)
            )
    return str(prefix)


def bytes_of(prefix) -> list[bytes]:
    return [open(f"{prefix}{suffix}", "rb").read() for suffix in (".bin", ".idx")]


@pytest.mark.parametrize("dtype", ["u1", "i1", "i2", "i4", "i8", "u2", "f4", "f8"])
def test_a_merge_equals_one_file_of_all_documents(tmp_path, dtype) -> None:
    parts = [write(tmp_path / name, documents, dtype) for name, documents in PARTS.items()]
    whole = write(tmp_path / "whole", [document for documents in PARTS.values() for document in documents], dtype)
    merged = merge(parts, str(tmp_path / "merged"))
    assert bytes_of(tmp_path / "merged") == bytes_of(whole)
    assert (merged.documents, merged.sequences, merged.tokens) == (5, 6, 10)


@pytest.mark.parametrize("keeps", [True, False])
def test_modes_are_carried_or_left_out(tmp_path, keeps) -> None:
    parts = [write(tmp_path / name, PARTS[name], modes=mode) for name, mode in (("a", 0), ("c", 1))]
    merged = merge(parts, str(tmp_path / "merged"), keeps_modes=keeps)
    modes = IndexedDataset(tmp_path / "merged").modes
    assert (modes is not None) is keeps
    if modes is not None:
        assert modes.tolist() == [0, 0, 0, 1, 1, 1]
    assert merged.without_modes == (() if keeps else tuple(parts))


def test_a_text_file_has_no_modes_to_keep(tmp_path) -> None:
    part = write(tmp_path / "a", PARTS["a"])
    with pytest.raises(DataError, match=r"a.idx: has no modes .*without --multimodal"):
        merge([part], str(tmp_path / "merged"), keeps_modes=True)
    assert not exists(str(tmp_path / "merged"))


def test_different_types_are_refused_with_their_files(tmp_path) -> None:
    parts = [write(tmp_path / "a", PARTS["a"]), write(tmp_path / "c", PARTS["c"], "i4")]
    with pytest.raises(DataError, match=r"uint16 in .*a, int32 in .*c"):
        merge(parts, str(tmp_path / "merged"))


def test_a_damaged_part_leaves_nothing(tmp_path) -> None:
    parts = [write(tmp_path / name, PARTS[name]) for name in ("a", "c")]
    (tmp_path / "c.bin").write_bytes(b"123")
    with pytest.raises(DataError, match=r"c.bin: size is 3 bytes"):
        merge(parts, str(tmp_path / "merged"))
    assert not list(tmp_path.glob("merged*"))


def test_never_in_place(tmp_path) -> None:
    part = write_documents(tmp_path / "a", [[1, 2]])
    with pytest.raises(ConfigError, match="is one of the inputs"):
        merge([part, part], f"{tmp_path}/./a")


def test_a_folder_gives_its_pairs_by_name(tmp_path) -> None:
    for name in ("b", "a10", "a2"):
        write_documents(tmp_path / name, [[1]])
    assert pairs_of(tmp_path) == [f"{tmp_path}/{name}" for name in ("a10", "a2", "b")]
    (tmp_path / "b.bin").unlink()
    with pytest.raises(DataError, match=r"b.idx has no .bin beside it"):
        pairs_of(tmp_path)


def test_a_folder_without_pairs_is_named(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"holds no \.bin and \.idx pair"):
        pairs_of(tmp_path)


def test_offsets_of_a_merge_are_counted_in_64_bits(tmp_path, monkeypatch) -> None:  # FC-06
    """Three parts of 2^30 ids each, whose `.bin` are holes: only the index is looked at."""
    for name in "abc":
        prefix = write_documents(tmp_path / name, [[0]], "i4")
        with open(f"{prefix}.bin", "r+b") as file:
            file.truncate(2**32)
        index = bytearray((tmp_path / f"{name}.idx").read_bytes())
        index[34:38] = np.int32(2**30).tobytes()
        (tmp_path / f"{name}.idx").write_bytes(index)
    monkeypatch.setattr(IndexedWriter, "_write", lambda self, ids: None)
    merge([str(tmp_path / name) for name in "abc"], str(tmp_path / "merged"))
    offsets = np.frombuffer((tmp_path / "merged.idx").read_bytes(), "<i8", 3, 34 + 4 * 3)
    assert offsets.tolist() == [0, 2**32, 2**33]
