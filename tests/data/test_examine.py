"""Looking into files, and repairs. Reference: the sound file of the same documents, byte for byte."""

import struct

import numpy as np
import pytest

from megatron_parm.data.examine import MOST_PROBLEMS, census, contents, problems, repair
from megatron_parm.data.indexed_dataset import IndexedDataset
from megatron_parm.data.merge import merge
from megatron_parm.errors import ConfigError, DataError
from tests.data.corpora import write_documents
from tests.data.test_merge import bytes_of, write

EOD = 9
GPT_PARTS = [[[1, 2, EOD], [3, EOD]], [[4, EOD], [EOD], [5, EOD]]]
BERT_PARTS = [[[[1, 2], [3, EOD]], [[4, EOD]]], [[[5], [6, 7], [8, EOD]]]]


def broken_merge(folder, parts, known_documents) -> str:
    """The merge of `parts` as Megatron 2.x wrote it: the document index of the first entries alone."""
    whole = merge(parts, str(folder / "whole"))
    index = (folder / "whole.idx").read_bytes()
    sequences = whole.sequences
    documents = 34 + 12 * sequences
    entries = index[documents : documents + 8 * (known_documents + 1)]
    header = index[:26] + struct.pack("<Q", known_documents + 1)
    (folder / "broken.idx").write_bytes(header + index[34:documents] + entries)
    (folder / "broken.bin").write_bytes((folder / "whole.bin").read_bytes())
    return str(folder / "broken")


def gpt_parts(folder) -> list[str]:
    return [write_documents(folder / f"part{number}", part) for number, part in enumerate(GPT_PARTS)]


def bert_parts(folder) -> list[str]:
    return [write(folder / f"part{number}", part) for number, part in enumerate(BERT_PARTS)]


def test_contents_of_a_sound_file(tmp_path) -> None:
    prefix = write(tmp_path / "x", [[[1, 2, 3], [4]], [], [[], [5, EOD]]])
    found = contents(prefix)
    assert (found.dtype, found.code, found.sequences, found.document_entries, found.tokens) == ("uint16", 8, 4, 4, 6)
    assert (found.shortest, found.median, found.longest) == (0, 1, 3)
    assert (found.empty_sequences, found.empty_documents, found.is_one_sequence_a_document) == (1, 1, False)
    assert problems(prefix, vocab_size=10) == []
    counted = census(prefix, EOD)
    assert (counted.smallest, counted.largest, counted.eod_at_ends, counted.eod_inside) == (1, EOD, 1, 0)
    assert contents(write_documents(tmp_path / "y", GPT_PARTS[0])).is_one_sequence_a_document


def test_an_empty_file_and_one_of_floats(tmp_path) -> None:
    empty = write_documents(tmp_path / "x", [])
    assert (contents(empty).sequences, problems(empty, 5), census(empty, 1).largest) == (0, [], 0)
    floats = write(tmp_path / "y", BERT_PARTS[0], "f4")
    assert (contents(floats).dtype, contents(floats).code, problems(floats, 3)) == ("float32", 7, [])


def test_every_problem_is_listed_up_to_a_limit(tmp_path) -> None:
    prefix = write_documents(tmp_path / "x", [[1, 2]] * 30)
    index = bytearray((tmp_path / "x.idx").read_bytes())
    index[34 + 12 * 30 + 8 : 34 + 12 * 30 + 16] = np.int64(7).tobytes()
    for number in range(2, 30):
        place = 34 + 4 * 30 + 8 * number
        index[place : place + 8] = np.int64(-1).tobytes()
    (tmp_path / "x.idx").write_bytes(index)
    found = problems(prefix)
    assert len(found) == MOST_PROBLEMS + 1
    assert "offset of sequence 2 is -1" in found[0] and "falls from 7 to 2 at entry 2" in found[-1]
    assert problems(str(tmp_path / "none"))[0].endswith("without .bin or .idx")


def test_every_id_outside_the_vocabulary_is_named(tmp_path) -> None:
    prefix = write_documents(tmp_path / "x", [[1, 7], [8, 2, 9]])
    found = problems(prefix, vocab_size=8)
    assert [text.partition(": ")[2].split(" is ")[0] for text in found] == [
        "token id 8 at place 0 of sequence 1",
        "token id 9 at place 2 of sequence 1",
    ]


@pytest.mark.parametrize(
    ("known", "how"),
    [(2, {}), (0, {"documents": "sequence"}), (0, {"documents": "eod", "eod": EOD}), (0, {"parts": True})],
)
def test_a_broken_gpt_merge_becomes_whole(tmp_path, known, how) -> None:
    parts = gpt_parts(tmp_path)
    broken = broken_merge(tmp_path, parts, known)
    with pytest.raises(DataError, match=r"Megatron 2\.x's merge .*--repair"):
        IndexedDataset(broken)
    before = bytes_of(broken)
    done = repair(broken, str(tmp_path / "repaired"), **(how | ({"parts": parts} if "parts" in how else {})))
    assert bytes_of(tmp_path / "repaired") == bytes_of(tmp_path / "whole")
    assert bytes_of(broken) == before
    assert len(done) == 1 and f"5 documents in place of {known}" in done[0]


@pytest.mark.parametrize("by", ["parts", "eod"])
def test_a_broken_bert_merge_becomes_whole(tmp_path, by) -> None:
    parts = bert_parts(tmp_path)
    broken = broken_merge(tmp_path, parts, 2)
    with pytest.raises(DataError, match="several sequences each, so the lost ones cannot be told"):
        repair(broken, str(tmp_path / "repaired"))
    assert not list(tmp_path.glob("repaired*"))
    repair(
        broken, str(tmp_path / "repaired"), **({"parts": parts} if by == "parts" else {"documents": "eod", "eod": EOD})
    )
    assert bytes_of(tmp_path / "repaired") == bytes_of(tmp_path / "whole")


def test_overflowed_offsets_are_counted_anew(tmp_path) -> None:  # FC-06
    prefix = merge(gpt_parts(tmp_path), str(tmp_path / "whole")) and str(tmp_path / "broken")
    index = bytearray((tmp_path / "whole.idx").read_bytes())
    index[34 + 4 * 5 + 8 : 34 + 12 * 5] = np.full(4, -(2**31), dtype="<i8").tobytes()
    (tmp_path / "broken.idx").write_bytes(index)
    (tmp_path / "broken.bin").write_bytes((tmp_path / "whole.bin").read_bytes())
    assert repair(prefix, str(tmp_path / "repaired")) == ["4 offsets counted anew in 64 bits"]
    assert bytes_of(tmp_path / "repaired") == bytes_of(tmp_path / "whole")


def test_what_cannot_be_known_is_refused(tmp_path) -> None:
    parts = gpt_parts(tmp_path)
    broken, new = broken_merge(tmp_path, parts, 0), str(tmp_path / "repaired")
    with pytest.raises(ConfigError, match=r"no document is left to tell .*--documents sequence"):
        repair(broken, new)
    with pytest.raises(ConfigError, match="--eod ID"):
        repair(broken, new, documents="eod")
    with pytest.raises(DataError, match="no sequence ends with the end of document 77"):
        repair(broken, new, documents="eod", eod=77)
    with pytest.raises(DataError, match="their 2 sequences are not the 5 of"):
        repair(broken, new, parts=parts[:1])
    with pytest.raises(ConfigError, match="never made in place"):
        repair(broken, broken, documents="sequence")
    (tmp_path / "broken.bin").write_bytes(b"12")
    with pytest.raises(DataError, match=r"broken.bin: size is 2 bytes.*no repair can bring back"):
        repair(broken, new, documents="sequence")
    assert not list(tmp_path.glob("repaired*"))


def test_a_sound_file_is_copied(tmp_path) -> None:
    prefix = write(tmp_path / "x", BERT_PARTS[0], modes=1)
    assert repair(prefix, str(tmp_path / "y")) == ["nothing was wrong: the copy equals the original"]
    assert bytes_of(tmp_path / "y") == bytes_of(prefix)
