"""Cuts text files into chunks of whole documents that workers read on their own. Floor 4.

A `.jsonl` file has one JSON object a line. A plain text file has documents separated by blank lines.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from megatron_parm.errors import DataError

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class TextChunk:
    """Whole documents of one file: a range of bytes, and the number of its first line."""

    path: Path
    offset: int
    size: int
    first_line: int
    is_json: bool


@dataclass(frozen=True)
class BrokenLine:
    """A place in the text that gives no document, and why."""

    path: Path
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path} line {self.line}: {self.reason}"


class BrokenTextError(DataError):
    """A document that cannot be read; `reason` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def find_chunks(path: Path, is_json: bool, chunk_bytes: int) -> Iterator[TextChunk]:
    """The chunks of a file in order, each of `chunk_bytes` and what its last document has beyond that."""
    line = 1
    with path.open("rb") as file:
        while True:
            offset = file.tell()
            text = file.read(chunk_bytes)
            if not text:
                return
            text += _rest_of_document(file, is_json)
            yield TextChunk(path, offset, len(text), line, is_json)
            line += text.count(b"\n")


def read_documents(chunk: TextChunk) -> Iterator[tuple[int, bytes]]:
    """The documents of a chunk, undecoded, each with the number of its first line. Blank lines are no documents."""
    with chunk.path.open("rb") as file:
        file.seek(chunk.offset)
        lines = file.read(chunk.size).split(b"\n")
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


def texts_of(document: bytes, is_json: bool, keys: Sequence[str]) -> list[str]:
    """The text of each key; a plain document has one text, whatever the key. Raises BrokenTextError."""
    try:
        decoded = document.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BrokenTextError(f"not UTF-8: byte {document[error.start]:#04x} at place {error.start}") from error
    if not is_json:
        return [decoded]
    try:
        fields = json.loads(decoded)
    except json.JSONDecodeError as error:
        reason = "more than one JSON object on the line" if error.msg == "Extra data" else f"broken JSON: {error.msg}"
        raise BrokenTextError(f"{reason} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise BrokenTextError(f"JSON that cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise BrokenTextError(f"a JSON object is wanted, found {type(fields).__name__}")
    return [_text(fields, key) for key in keys]


def _text(fields: dict[str, object], key: str) -> str:
    if key not in fields:
        names = ", ".join(list(fields)[:8]) or "none"
        raise BrokenTextError(f"no field {key!r} (--json-keys); the fields are: {names}")
    text = fields[key]
    if not isinstance(text, str):
        raise BrokenTextError(f"field {key!r} must be text, found {type(text).__name__}")
    return text


def _rest_of_document(file: BinaryIO, is_json: bool) -> bytes:
    """What follows up to the end of the line, or for plain text up to a blank line."""
    rest = [file.readline()]
    if not is_json:
        while line := file.readline():
            rest.append(line)
            if not line.strip():
                break
    return b"".join(rest)
