"""Chunks of whole documents. Reference: the file cut by Python's own line reading."""

import gzip

import pytest

from megatron_parm.data.text_chunks import BrokenTextError, find_chunks, read_documents, read_texts, texts_of


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


@pytest.mark.parametrize("chunk_bytes", [1, 7, 40, 1000])
@pytest.mark.parametrize("long_at", [0, 1, 3, 4])
def test_a_document_that_is_too_long_is_named_and_never_kept(tmp_path, chunk_bytes, long_at) -> None:
    lines = [b'{"text": "%d"}' % number for number in range(5)]
    lines[long_at] = b'{"text": "%s"}' % (b"x" * 300)
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\n".join(lines))
    chunks = list(find_chunks(path, True, chunk_bytes, max_document_bytes=50))
    assert sum(chunk.size for chunk in chunks) == path.stat().st_size
    read = [read_texts(chunk, ["text"]) for chunk in chunks]
    assert [found for some, _ in read for found in some] == [(n + 1, [str(n)]) for n in range(5) if n != long_at]
    (broken,) = [place for _, some in read for place in some]
    assert (broken.line, broken.is_too_long) == (long_at + 1, True) and "--max-document-mib" in broken.reason
    assert all(chunk.size <= chunk_bytes + 50 + 20 for chunk in chunks if not chunk.is_too_long)


@pytest.mark.parametrize("chunk_bytes", [1, 9, 1000])
def test_a_plain_document_that_is_too_long(tmp_path, chunk_bytes) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(b"one\n\n" + b"long line\n" * 30 + b"\n\ntwo\nlines\n\n" + b"y" * 99)
    read = [read_texts(chunk, ["text"]) for chunk in find_chunks(path, False, chunk_bytes, max_document_bytes=60)]
    assert [found for some, _ in read for found in some] == [(1, ["one"]), (35, ["two\nlines"])]
    assert [(place.line, place.is_too_long) for _, some in read for place in some] == [(3, True), (38, True)]


@pytest.mark.parametrize("suffix", ["jsonl", "txt"])
def test_a_compressed_file_gives_the_chunks_of_the_plain_one(tmp_path, suffix) -> None:
    text = b"".join(b'{"text": "%d"}\n%s' % (number, b"\n" * (number % 3)) for number in range(300))
    plain, packed = tmp_path / f"x.{suffix}", tmp_path / f"x.{suffix}.gz"
    plain.write_bytes(text)
    packed.write_bytes(gzip.compress(text))
    documents = [
        [document for chunk in find_chunks(path, suffix == "jsonl", 500) for document in read_documents(chunk)]
        for path in (plain, packed)
    ]
    assert documents[0] == documents[1] and len(documents[0]) > 100
    assert sum(chunk.read for chunk in find_chunks(packed, suffix == "jsonl", 500)) == packed.stat().st_size
