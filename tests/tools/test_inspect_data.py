"""The inspection tool from its command line. Reference: files whose contents the test wrote."""

import pytest

from tests.data.corpora import write_documents
from tests.data.test_examine import bert_parts, broken_merge, gpt_parts
from tests.data.test_merge import bytes_of, write
from tools.inspect_data import main

NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size"]


def test_what_is_in_a_file(tmp_path, capsys) -> None:
    prefix = write(tmp_path / "x", [[[1, 2, 3], [9]], [[4, 5], [9]], []], modes=0)
    assert main([f"{prefix}.bin", *NULL, "9"]) == 0
    shown = capsys.readouterr().out
    for part in (
        "uint16 (code 8), 14 bytes",
        "tokens      7",
        "4, 1 to 3 tokens, median 1",
        "3, several sequences a document",
        "0 sequences, 1 documents",
        "4 bytes: the modes of a multimodal file",
        "ids 1 to 9",
        "10 ids, NullTokenizer",
        "2 sequences end with 9, 0 more lie inside",
    ):
        assert part in shown


def test_a_document_is_decoded(tmp_path, capsys) -> None:
    prefix = write(tmp_path / "x", [[[1]], [[7, 8], [2]]])
    assert main([prefix, "--document", "1", *NULL, "10"]) == 0
    lines = capsys.readouterr().out.splitlines()[-4:]
    assert lines == ["document 1, sequence 0: 7 8", "7 8", "document 1, sequence 1: 2", "2"]
    assert main([prefix, "--document", "1", *NULL, "5"]) == 0
    assert "(not decoded: id 7 is outside the vocabulary of 6 ids)" in capsys.readouterr().out
    assert main([prefix, "--document", "2"]) == 2
    assert "has the documents 0 to 1" in capsys.readouterr().err


def test_long_documents_are_cut_unless_asked(tmp_path, capsys) -> None:
    prefix = write_documents(tmp_path / "x", [[3] * 100])
    main([prefix, "--document", "0"])
    assert " 3 ... (100 in all)" in capsys.readouterr().out
    main([prefix, "--document", "0", "--all-ids"])
    assert "... (" not in capsys.readouterr().out


def test_verify_reads_every_id(tmp_path, capsys) -> None:
    prefix = write_documents(tmp_path / "x", [[1, 2], [5]])
    assert main([prefix, "--verify", *NULL, "10"]) == 0
    assert "every length, offset and document bound; every id" in capsys.readouterr().out
    assert main([prefix, "--verify"]) == 0
    assert "no id, for no tokenizer is given" in capsys.readouterr().out
    assert main([prefix, "--verify", *NULL, "4"]) == 2
    assert "wrong: " in (error := capsys.readouterr().err) and "token id 5 at place 0 of sequence 1" in error


def test_a_broken_merge_is_told_and_repaired_elsewhere(tmp_path, capsys) -> None:
    broken = broken_merge(tmp_path, gpt_parts(tmp_path), 2)
    assert main([broken]) == 2
    assert "document index ends at 2, must end at the 5 sequences" in capsys.readouterr().err
    assert main([broken, "--repair", str(tmp_path / "new"), "--verify"]) == 0
    assert "repaired: 5 documents in place of 2: each is one sequence" in capsys.readouterr().out
    assert bytes_of(tmp_path / "new") == bytes_of(tmp_path / "whole")


def test_a_repair_by_end_of_document_takes_it_from_the_tokenizer(tmp_path) -> None:
    broken = broken_merge(tmp_path, bert_parts(tmp_path), 2)
    assert main([broken, "--repair", str(tmp_path / "new"), "--documents", "eod", *NULL, "9"]) == 0
    assert bytes_of(tmp_path / "new") == bytes_of(tmp_path / "whole")


@pytest.mark.parametrize("content", [b"", b"MMIDIDX\0\0short", b"TNTIDX\0\0", None])
def test_a_file_that_is_none_is_one_line(tmp_path, capsys, content) -> None:
    prefix = write_documents(tmp_path / "x", [[1]])
    if content is None:
        (tmp_path / "x.bin").unlink()
    else:
        (tmp_path / "x.idx").write_bytes(content)
    assert main([prefix, "--verify"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and f"{tmp_path}/x." in error
