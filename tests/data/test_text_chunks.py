"""Chunks of whole documents. Reference: the file cut by Python's own line reading."""

import pytest

from megatron_parm.data.text_chunks import BrokenTextError, find_chunks, read_documents, texts_of


@pytest.mark.parametrize("chunk_bytes", [1, 5, 17, 1000])
@pytest.mark.parametrize("ending", ["\n", ""])
def test_json_lines_come_whole_and_numbered(tmp_path, chunk_bytes, ending) -> None:
    lines = [b'{"a": 1}', b"", b'{"text": "xxxxxxxxxxxxxxxxxxxxxxxxxxx"}', b"  ", b"{}", b"\r", b"{broken"]
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\n".join(lines) + ending.encode())
    chunks = list(find_chunks(path, True, chunk_bytes))
    assert sum(chunk.size for chunk in chunks) == path.stat().st_size
    read = [document for chunk in chunks for document in read_documents(chunk)]
    assert read == [(1, lines[0]), (3, lines[2]), (5, lines[4]), (7, lines[6])]


@pytest.mark.parametrize("chunk_bytes", [1, 5, 17, 1000])
def test_plain_text_is_cut_at_blank_lines(tmp_path, chunk_bytes) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(b"\n\none\ntwo\n \n\t\nthree\n\n\n\nfour\nfive\nsix")
    read = [document for chunk in find_chunks(path, False, chunk_bytes) for document in read_documents(chunk)]
    assert read == [(3, b"one\ntwo"), (7, b"three"), (11, b"four\nfive\nsix")]


def test_a_byte_order_mark_is_no_text(tmp_path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n')
    assert [document for chunk in find_chunks(path, True, 99) for document in read_documents(chunk)] == [
        (1, b'{"text": "a"}')
    ]


def test_an_empty_file_has_no_chunk(tmp_path) -> None:
    (tmp_path / "x.txt").write_bytes(b"")
    assert list(find_chunks(tmp_path / "x.txt", False, 10)) == []


def test_texts_of_keys() -> None:
    assert texts_of(b'{"a": "1", "b": "2\\n"}', True, ["b", "a"]) == ["2\n", "1"]
    assert texts_of("{Caf\u00e9".encode(), False, ["text"]) == ["{Caf\u00e9"]
    assert texts_of(b'{"text": "\\ud83d x"}', True, ["text"]) == ["\ud83d x"]


@pytest.mark.parametrize(  # FC-04
    ("line", "reason"),
    [
        (b'{"text": "abc', "broken JSON: Unterminated string.* at column 10"),
        (b'{"text": "a"} {"text": "b"}', "more than one JSON object on the line at column 15"),
        (b'{"txt": "abc"}', r"no field 'text' \(--json-keys\); the fields are: txt"),
        (b"{}", "the fields are: none"),
        (b'{"text": 5}', "field 'text' must be text, found int"),
        (b'["text"]', "a JSON object is wanted, found list"),
        (b'{"text": "\xff"}', "not UTF-8: byte 0xff at place 10"),
        (b"[" * 100_000, "JSON that cannot be read"),
        (b'{"text": "a", "n": ' + b"9" * 5000 + b"}", "JSON that cannot be read"),
    ],
)
def test_broken_lines_have_a_reason(line, reason) -> None:
    with pytest.raises(BrokenTextError, match=reason):
        texts_of(line, True, ["text"])
