"""Cuts text files into chunks of whole documents that workers read on their own. Floor 4.

A `.jsonl` file has one JSON object a line. A plain text file has documents separated by blank lines. The chunks of a
compressed file carry their text. Memory is bounded by the longest document that is taken, whatever the file holds.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from megatron_parm.data.compressed import is_compressed, open_stream
from megatron_parm.errors import DataError

MAX_DOCUMENT_BYTES = 8 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class TextChunk:
    """Whole documents of one file: a range of bytes of its plain text, and the number of its first line.

    max_document_bytes: what is longer is no document. read: bytes of the file itself. content: the text, where workers
    cannot read the range on their own. rows: the values of a table, in place of text. is_too_long: one document that
    was not kept.
    """

    path: Path
    offset: int
    size: int
    first_line: int
    is_json: bool
    max_document_bytes: int = MAX_DOCUMENT_BYTES
    read: int = 0
    content: bytes | None = None
    rows: tuple[tuple[object, ...], ...] | None = None
    is_too_long: bool = False


@dataclass(frozen=True)
class BrokenLine:
    """A place in the text that gives no document, and why."""

    path: Path
    line: int
    reason: str
    is_too_long: bool = False

    def __str__(self) -> str:
        return f"{self.path} line {self.line}: {self.reason}"


class BrokenTextError(DataError):
    """A document that cannot be read; `reason` says why."""

    def __init__(self, reason: str, is_too_long: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.is_too_long = is_too_long


def find_chunks(
    path: Path, is_json: bool, chunk_bytes: int, max_document_bytes: int = MAX_DOCUMENT_BYTES
) -> Iterator[TextChunk]:
    """The chunks of a file in order, each of `chunk_bytes` and what its last document has beyond that."""
    keeps_text = is_compressed(path)
    with open_stream(path) as (stream, position):
        read = 0
        for offset, line, text, skipped in _cut(stream, is_json, chunk_bytes, max_document_bytes):
            behind = position()
            yield TextChunk(
                path,
                offset,
                len(text) + skipped,
                line,
                is_json,
                max_document_bytes,
                read=behind - read,
                content=text if keeps_text else None,
                is_too_long=skipped > 0,
            )
            read = behind


def read_documents(chunk: TextChunk) -> Iterator[tuple[int, bytes]]:
    """The documents of a chunk, undecoded, each with the number of its first line. Blank lines are no documents."""
    text = chunk.content
    if text is None:
        with chunk.path.open("rb") as file:
            file.seek(chunk.offset)
            text = file.read(chunk.size)
    lines = text.split(b"\n")
    if chunk.offset == 0:
        lines[0] = lines[0].removeprefix(_BYTE_ORDER_MARK)
    if chunk.is_json:
        yield from ((number, line) for number, line in enumerate(lines, start=chunk.first_line) if line.strip())
        return
    paragraph: list[bytes] = []
    for number, line in enumerate([*lines, b""], start=chunk.first_line):
        if line.strip():
            paragraph.append(line)
        elif paragraph:
            yield number - len(paragraph), b"\n".join(paragraph)
            paragraph = []


def read_texts(chunk: TextChunk, keys: Sequence[str]) -> tuple[list[tuple[int, list[str]]], list[BrokenLine]]:
    """The texts of each document of a chunk with its line, and the places that give none."""
    found: list[tuple[int, list[str]]] = []
    broken: list[BrokenLine] = []
    if chunk.is_too_long:
        reason = _too_long(chunk.size, chunk.max_document_bytes)
        return found, [BrokenLine(chunk.path, chunk.first_line, reason, is_too_long=True)]
    if chunk.rows is not None:
        for number, row in enumerate(chunk.rows, start=chunk.first_line):
            try:
                texts = [_is_text(value, key) for value, key in zip(row, keys, strict=True)]
                size = sum(map(len, texts))
                if size > chunk.max_document_bytes:
                    raise BrokenTextError(_too_long(size, chunk.max_document_bytes), is_too_long=True)
                found.append((number, texts))
            except BrokenTextError as error:
                broken.append(BrokenLine(chunk.path, number, error.reason, error.is_too_long))
        return found, broken
    for line, document in read_documents(chunk):
        try:
            if len(document) > chunk.max_document_bytes:
                raise BrokenTextError(_too_long(len(document), chunk.max_document_bytes), is_too_long=True)
            found.append((line, texts_of(document, chunk.is_json, keys)))
        except BrokenTextError as error:
            broken.append(BrokenLine(chunk.path, line, error.reason, error.is_too_long))
    return found, broken


def texts_of(document: bytes, is_json: bool, keys: Sequence[str]) -> list[str]:
    """The text of each key; a plain document has one text, whatever the key. Raises BrokenTextError."""
    try:
        decoded = document.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BrokenTextError(f"not UTF-8: byte {document[error.start]:#04x} at place {error.start}") from error
    if not is_json:
        return [decoded]
    fields = json_object(decoded)
    return [_text(fields, key) for key in keys]


def json_object(line: str) -> dict[str, object]:
    """The one JSON object of a line. Raises BrokenTextError."""
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        reason = "more than one JSON object on the line" if error.msg == "Extra data" else f"broken JSON: {error.msg}"
        raise BrokenTextError(f"{reason} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise BrokenTextError(f"JSON that cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise BrokenTextError(f"a JSON object is wanted, found {type(fields).__name__}")
    return fields


def _text(fields: dict[str, object], key: str) -> str:
    if key not in fields:
        names = ", ".join(list(fields)[:8]) or "none"
        raise BrokenTextError(f"no field {key!r} (--json-keys); the fields are: {names}")
    return _is_text(fields[key], key)


def _is_text(value: object, key: str) -> str:
    if not isinstance(value, str):
        raise BrokenTextError(f"field {key!r} must be text, found {type(value).__name__}")
    return value


def _too_long(size: int, limit: int) -> str:
    found, most = (round(count / (1 << 20), 4) for count in (size, limit))
    return (
        f"too long: {found:g} MiB, more than the {most:g} MiB of --max-document-mib; "
        "cut the document, or raise the limit (memory grows with it)"
    )


def _cut(stream: BinaryIO, is_json: bool, chunk_bytes: int, limit: int) -> Iterator[tuple[int, int, bytes, int]]:
    """(offset, first line, text, bytes skipped): whole documents, or one document of more than `limit` without text."""
    offset, line = 0, 1
    while text := stream.read(chunk_bytes):
        rest, is_whole = _rest_of_document(stream, is_json, limit)
        text += rest
        head = len(text) if is_whole else _start_of_last(text, is_json)
        if head:
            yield offset, line, text[:head], 0
            line += text.count(b"\n", 0, head)
            offset += head
        if not is_whole:
            size, lines = _skip_document(stream, is_json, limit)
            size += len(text) - head
            yield offset, line, b"", size
            line += text.count(b"\n", head) + lines
            offset += size


def _rest_of_document(stream: BinaryIO, is_json: bool, limit: int) -> tuple[bytes, bool]:
    """What follows up to the end of the line, or for plain text to a blank line; False if it is more than `limit`."""
    rest: list[bytes] = []
    size = 0
    at_start = False  # of a line
    while piece := stream.readline(limit + 1 - size):
        rest.append(piece)
        size += len(piece)
        is_blank_line = at_start and not piece.strip()
        at_start = piece.endswith(b"\n")
        if at_start and (is_json or is_blank_line):
            break
        if size > limit:
            return b"".join(rest), False
    return b"".join(rest), True


def _start_of_last(text: bytes, is_json: bool) -> int:
    """Where the last document of `text` begins."""
    if is_json:
        return text.rfind(b"\n") + 1
    start = 0
    place = 0
    for piece in text.splitlines(keepends=True):
        place += len(piece)
        if not piece.strip():
            start = place
    return start


def _skip_document(stream: BinaryIO, is_json: bool, limit: int) -> tuple[int, int]:
    """Read on to the end of a document and keep nothing: its bytes and line ends."""
    size = lines = 0
    at_start = False  # of a line
    while piece := stream.readline(limit):
        size += len(piece)
        is_blank_line = at_start and not piece.strip()
        at_start = piece.endswith(b"\n")
        lines += at_start
        if at_start and (is_json or is_blank_line):
            break
    return size, lines
