"""Reading .bin and .idx. Reference: what the writer was given; damaged files must be errors, never other content."""

import pickle
import random
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_parm.data.index_cache import IndexCache
from megatron_parm.data.index_format import TOKEN_DTYPES
from megatron_parm.data.indexed_dataset import IndexedDataset
from megatron_parm.data.indexed_writer import IndexedWriter
from megatron_parm.data.vocabulary_check import check_token_ids
from megatron_parm.errors import DataError
from tests.data.corpora import write_documents

DOCUMENTS = [[3, 4, 5], [6], [7, 8, 9, 10], [11, 12]]


def test_what_is_written_is_read(tmp_path_factory) -> None:
    sequence = st.lists(st.integers(0, 127), max_size=9)
    corpus = st.lists(st.lists(sequence, max_size=4), max_size=6)

    @settings(max_examples=60, derandomize=True, deadline=None)
    @given(corpus, st.sampled_from(sorted(TOKEN_DTYPES)))
    def check(documents, code) -> None:
        prefix = tmp_path_factory.mktemp("round") / "x"
        with IndexedWriter(prefix, TOKEN_DTYPES[code]) as writer:
            for document in documents:
                ids = np.array([token for part in document for token in part], dtype=np.int64)
                writer.add_document(ids, [len(part) for part in document])
        dataset = IndexedDataset(prefix)
        read = [[part.tolist() for part in dataset.document(number)] for number in range(dataset.num_documents)]
        assert read == documents
        assert dataset.dtype == TOKEN_DTYPES[code]
        assert dataset.num_tokens == sum(len(part) for document in documents for part in document)

    check()


def test_parts_places_and_copies(tmp_path) -> None:
    dataset = IndexedDataset(write_documents(tmp_path / "x", DOCUMENTS))
    assert dataset.read(2, 1, 3).tolist() == [8, 9]
    assert dataset.read(2, 1).tolist() == [8, 9, 10]
    assert [dataset.locate(place) for place in range(10)][3:6] == [(1, 0), (2, 0), (2, 1)]
    assert np.concatenate(list(dataset.chunks())).tolist() == list(range(3, 13))
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy.read(3).tolist() == [11, 12]
    assert len(pickle.dumps(dataset)) < 400  # opened again, not copied
    with pytest.raises(IndexError, match="which has 4"):
        dataset.read(2, 1, 5)


@pytest.mark.parametrize(("trailing", "modes"), [(b"\0\1\0\1", [0, 1, 0, 1]), (b"\0\1\0", None), (b"", None)])
def test_modes_behind_the_arrays_need_no_notice(tmp_path, trailing, modes) -> None:
    prefix = write_documents(tmp_path / "x", DOCUMENTS)
    with (tmp_path / "x.idx").open("ab") as idx:
        idx.write(trailing)
    dataset = IndexedDataset(prefix)
    assert dataset.read(1).tolist() == [6]
    assert (dataset.modes.tolist() if dataset.modes is not None else None) == modes


@pytest.mark.parametrize(("dtype", "written", "code"), [("f8", 6, 6), ("f4", 7, 7), ("f8", 6, 7)])
def test_floats_of_both_generations_are_read_where_allowed(tmp_path, dtype, written, code) -> None:
    """Code 7 is float64 in Megatron 2.x and float32 in Megatron-Core."""
    with IndexedWriter(tmp_path / "x", np.dtype(dtype)) as writer:
        writer.add_document(np.array([0.5, 2.5]))
        writer.add_document(np.array([-1.5]))
    index = bytearray((tmp_path / "x.idx").read_bytes())
    assert index[17] == written
    index[17] = code
    (tmp_path / "x.idx").write_bytes(index)
    dataset = IndexedDataset(tmp_path / "x", allows_floats=True)
    assert (dataset.dtype, dataset.read(0).tolist(), dataset.read(1).tolist()) == (dtype, [0.5, 2.5], [-1.5])
    with pytest.raises(DataError, match=f"dtype code {code} is a floating type"):
        IndexedDataset(tmp_path / "x")


HEADER = struct.Struct("<9sQBQQ")


def damaged(**fields):
    """A function that changes header fields of an index."""

    def change(data: bytes) -> bytes:
        names = ("magic", "version", "code", "sequences", "entries")
        header = dict(zip(names, HEADER.unpack(data[:34]), strict=True)) | fields
        return HEADER.pack(*header.values()) + data[34:]

    return change


def patched(offset: int, value: bytes):
    return lambda data: data[:offset] + value + data[offset + len(value) :]


S = len(DOCUMENTS)
DAMAGE = [
    (lambda data: b"", "magic"),
    (lambda data: data[:20], "size is 20 bytes, the header alone has 34"),
    (lambda data: data[:-1], "size is .* bytes, but 4 sequences and 5 document entries need"),
    (damaged(magic=b"XXXXXXXXX"), "magic is b'XXXXXXXXX', must be b'MMIDIDX"),
    (lambda data: b"TNTIDX\0\0" + data[8:], "old lazy/cached format"),
    (damaged(version=2), "version is 2, must be 1"),
    (damaged(code=9), "dtype code is 9"),
    (damaged(code=7), "dtype code 7 is a floating type"),
    (damaged(code=6), "dtype code 6 is a floating type"),
    (damaged(code=4), "offset of sequence 1 is 6"),
    (damaged(sequences=2**63), "need"),
    (damaged(entries=2**60), "need"),
    (damaged(entries=0), "document index must begin with 0; its first entry is missing"),
    (damaged(entries=3), "document index ends at 2, must end at the 4 sequences; Megatron 2.x's merge"),
    (patched(34, struct.pack("<i", -3)), "length of sequence 0 is -3"),
    (patched(34 + 4 * (S - 1), struct.pack("<i", 3)), r"x.bin: size is 20 bytes, but the lengths .* add up to 22"),
    (patched(34 + 4 * S, struct.pack("<q", -2)), "offset of sequence 0 is -2"),
    (patched(34 + 4 * S + 8, struct.pack("<q", 2**62)), "offset of sequence 1 is 4611686018427387904"),
    (patched(34 + 12 * S, struct.pack("<q", 1)), "document index must begin with 0; its first entry is 1"),
    (patched(34 + 12 * S + 8, struct.pack("<q", 3)), "document index falls from 3 to 2 at entry 2"),
]


@pytest.mark.parametrize(("change", "message"), DAMAGE)
def test_a_damaged_index_is_named_with_field_and_values(tmp_path, change, message) -> None:
    prefix = write_documents(tmp_path / "x", DOCUMENTS)
    idx = tmp_path / "x.idx"
    idx.write_bytes(change(idx.read_bytes()))
    with pytest.raises(DataError, match=message) as caught:
        IndexedDataset(prefix)
    assert str(tmp_path / "x") in str(caught.value)


@pytest.mark.parametrize("size", [0, 3, 19, 21, 24])
def test_a_bin_of_another_size_is_named(tmp_path, size) -> None:
    prefix = write_documents(tmp_path / "x", DOCUMENTS)
    (tmp_path / "x.bin").write_bytes(bytes(size))
    with pytest.raises(DataError, match=rf"x.bin: size is {size} bytes, but the lengths .* add up to 20"):
        IndexedDataset(prefix)


@pytest.mark.parametrize("suffix", [".idx", ".bin"])
def test_a_missing_file_is_named(tmp_path, suffix) -> None:
    prefix = write_documents(tmp_path / "x", DOCUMENTS)
    (tmp_path / f"x{suffix}").unlink()
    with pytest.raises(DataError, match=rf"--data-path: .*x{suffix} does not exist"):
        IndexedDataset(prefix)


@pytest.mark.parametrize("maps_tokens", [True, False])
def test_a_thousand_damaged_pairs_load_equal_or_are_refused(tmp_path, maps_tokens) -> None:
    """500 pairs each for maps and plain reads, 1 of 4 with a damaged `.bin`: never another exception.

    What loads has the sequences that the bytes of its `.bin` spell, and documents that are ranges of them; a change of
    an id inside the vocabulary, or of a document bound between its neighbours, is one that the format cannot see.
    """
    prefix = write_documents(tmp_path / "x", DOCUMENTS)
    originals = {suffix: (tmp_path / f"x{suffix}").read_bytes() for suffix in (".idx", ".bin")}
    draw = random.Random(1234 + maps_tokens)
    errors = {".idx": 0, ".bin": 0}
    for number in range(500):
        victim = ".bin" if number % 4 == 0 else ".idx"
        for suffix, original in originals.items():
            (tmp_path / f"x{suffix}").write_bytes(mutant(original, draw) if suffix == victim else original)
        try:
            dataset = IndexedDataset(prefix, maps_tokens=maps_tokens)
            check_token_ids(dataset, 20, IndexCache(None))
        except DataError:
            errors[victim] += 1
            continue
        spelled = np.frombuffer((tmp_path / "x.bin").read_bytes(), "<u2").tolist()
        assert np.concatenate([dataset.read(number) for number in range(len(dataset))]).tolist() == spelled
        assert dataset.lengths.tolist() == [len(document) for document in DOCUMENTS]
        assert victim == ".bin" or spelled == [token for document in DOCUMENTS for token in document]
        documents = [dataset.document(number) for number in range(dataset.num_documents)]
        assert [part.tolist() for document in documents for part in document] == [
            dataset.read(number).tolist() for number in range(len(dataset))
        ]
        assert max(spelled) < 20
        with pytest.raises(IndexError):
            dataset.read(len(dataset))
        with pytest.raises(IndexError):
            dataset.document(-1)
    assert errors[".idx"] > 290 and errors[".bin"] > 80, errors


def mutant(data: bytes, draw: random.Random) -> bytes:
    place, count = draw.randrange(len(data)), draw.choice([1, 1, 2, 4, 8])
    kind = draw.randrange(5)
    if kind == 0:
        return data[:place] + draw.randbytes(count) + data[place + count :]
    if kind == 1:
        return data[:place] + bytes([data[place] ^ (1 << draw.randrange(8))]) + data[place + 1 :]
    if kind == 2:
        return data[:place] + data[place + count :]
    if kind == 3:
        return data[:place] + data[place : place + count] + data[place:]
    extreme = draw.choice([b"\xff", b"\x00", b"\x7f"]) * count
    return data[:place] + extreme + data[place + count :]
