"""Reads `.bin` and `.idx` files through memory maps. Floor 4.

Everything the index says is checked against the sizes of both files when a dataset is opened, so that a damaged index
is an error that names the file and the field, and never a read outside the `.bin`.
"""

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_parm.data.index_format import (
    FLOAT_CODES,
    HEADER,
    LEGACY_MAGIC,
    MAGIC,
    TOKEN_DTYPES,
    VERSION,
    bin_path,
    idx_path,
)
from megatron_parm.errors import DataError

_CHUNK = 1 << 22


class TokenSource(Protocol):
    """Sequences of token ids that a dataset is cut from."""

    @property
    def name(self) -> str:
        """The source in the user's words, usually its prefix."""

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of every sequence."""

    def read(self, sequence: int, start: int = 0, stop: int | None = None) -> NDArray[np.integer]:
        """The ids [start, stop) of one sequence; to its end without `stop`."""


class IndexedDataset:
    """The sequences and documents of one prefix. Opened again, not copied, when it travels to another process."""

    def __init__(self, prefix: str | Path) -> None:
        self.name = str(prefix)
        idx = _map_file(idx_path(prefix), "index")
        bin_size = _file_size(bin_path(prefix), "token")
        code, num_sequences, num_entries = _read_header(idx, idx_path(prefix))
        self.dtype = TOKEN_DTYPES[code]
        start = HEADER.size
        self.lengths: NDArray[np.int32] = np.frombuffer(idx, "<i4", num_sequences, start)
        self.offsets: NDArray[np.int64] = np.frombuffer(idx, "<i8", num_sequences, start + 4 * num_sequences)
        self.document_index: NDArray[np.int64] = np.frombuffer(idx, "<i8", num_entries, start + 12 * num_sequences)
        self.num_tokens = _check_sequences(self.lengths, self.offsets, self.dtype.itemsize, bin_size, self.name)
        _check_document_index(self.document_index, num_sequences, idx_path(prefix))
        self.tokens: NDArray[np.integer] = np.frombuffer(_map_file(bin_path(prefix), "token"), self.dtype)

    def __len__(self) -> int:
        return len(self.lengths)

    def __reduce__(self) -> tuple[type["IndexedDataset"], tuple[str]]:
        return IndexedDataset, (self.name,)

    @property
    def num_documents(self) -> int:
        """Documents in the file; a GPT file has one sequence in each."""
        return len(self.document_index) - 1

    def read(self, sequence: int, start: int = 0, stop: int | None = None) -> NDArray[np.integer]:
        """The ids [start, stop) of one sequence, as a read-only view of the file."""
        length = int(self.lengths[sequence])
        stop = length if stop is None else stop
        if not 0 <= start <= stop <= length:
            raise IndexError(f"{self.name}: tokens [{start}, {stop}) of sequence {sequence}, which has {length}")
        first = int(self.offsets[sequence]) // self.dtype.itemsize
        return self.tokens[first + start : first + stop]

    def document(self, number: int) -> list[NDArray[np.integer]]:
        """The sequences of one document."""
        first, last = int(self.document_index[number]), int(self.document_index[number + 1])
        return [self.read(sequence) for sequence in range(first, last)]

    def chunks(self) -> Iterator[NDArray[np.integer]]:
        """All token ids in order, some millions at a time."""
        for start in range(0, len(self.tokens), _CHUNK):
            yield self.tokens[start : start + _CHUNK]

    def locate(self, token: int) -> tuple[int, int]:
        """The sequence that holds the token at place `token` of the `.bin`, and the place within it."""
        offset = token * self.dtype.itemsize
        sequence = int(np.searchsorted(self.offsets, offset, side="right")) - 1
        return sequence, token - int(self.offsets[sequence]) // self.dtype.itemsize


def _file_size(path: Path, kind: str) -> int:
    if not path.is_file():
        raise DataError(
            f"--data-path: {kind} file {path} does not exist; give the prefix that tools/preprocess_data.py wrote, "
            "without .bin or .idx"
        )
    return path.stat().st_size


def _map_file(path: Path, kind: str) -> mmap.mmap | bytes:
    if _file_size(path, kind) == 0:
        return b""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error


def _read_header(idx: mmap.mmap | bytes, path: Path) -> tuple[int, int, int]:
    """Check the header and the size it implies; the dtype code, the sequences and the document entries."""
    if idx[: len(LEGACY_MAGIC)] == LEGACY_MAGIC:
        raise DataError(f"{path}: magic {LEGACY_MAGIC!r} is the old lazy/cached format; preprocess the text again")
    if idx[: len(MAGIC)] != MAGIC:
        raise DataError(f"{path}: magic is {bytes(idx[: len(MAGIC)])!r}, must be {MAGIC!r}; this is no index file")
    if len(idx) < HEADER.size:
        raise DataError(f"{path}: size is {len(idx)} bytes, the header alone has {HEADER.size}; the file was cut")
    _, version, code, num_sequences, num_entries = HEADER.unpack(idx[: HEADER.size])
    if version != VERSION:
        raise DataError(f"{path}: version is {version}, must be {VERSION}")
    if code in FLOAT_CODES:
        raise DataError(f"{path}: dtype code {code} is a floating type; token ids need one of {sorted(TOKEN_DTYPES)}")
    if code not in TOKEN_DTYPES:
        raise DataError(f"{path}: dtype code is {code}, must be one of {sorted(TOKEN_DTYPES)}")
    needed = HEADER.size + 12 * num_sequences + 8 * num_entries
    if len(idx) < needed:
        raise DataError(
            f"{path}: size is {len(idx)} bytes, but {num_sequences} sequences and {num_entries} document entries need "
            f"{needed}; the file was cut or its header is damaged"
        )
    return code, num_sequences, num_entries


def _check_sequences(
    lengths: NDArray[np.int32], offsets: NDArray[np.int64], item_bytes: int, bin_size: int, prefix: str
) -> int:
    """Check that the sequences lie back to back and fill the `.bin` exactly; the number of tokens."""
    place = 0
    for start in range(0, len(lengths), _CHUNK):
        sizes = lengths[start : start + _CHUNK].astype(np.int64)
        if int(sizes.min()) < 0:
            bad = start + int(sizes.argmin())
            raise DataError(f"{idx_path(prefix)}: length of sequence {bad} is {lengths[bad]}, must not be negative")
        ends = place + np.cumsum(sizes) * item_bytes
        expected = ends - sizes * item_bytes
        wrong = np.flatnonzero(offsets[start : start + _CHUNK] != expected)
        if len(wrong):
            bad = start + int(wrong[0])
            raise DataError(
                f"{idx_path(prefix)}: offset of sequence {bad} is {offsets[bad]}, but the sequences before it end at "
                f"byte {expected[wrong[0]]} of {bin_path(prefix)} ({bin_size} bytes); the index is damaged"
            )
        place = int(ends[-1])
    if place != bin_size:
        raise DataError(
            f"{bin_path(prefix)}: size is {bin_size} bytes, but the lengths in {idx_path(prefix)} add up to {place}; "
            "one of the two files was cut or belongs to another run: preprocess again"
        )
    return place // item_bytes


def _check_document_index(document_index: NDArray[np.int64], num_sequences: int, path: Path) -> None:
    if not len(document_index) or document_index[0] != 0:
        first = document_index[0] if len(document_index) else "missing"
        raise DataError(f"{path}: document index must begin with 0; its first entry is {first}")
    if document_index[-1] != num_sequences:
        raise DataError(
            f"{path}: document index ends at {document_index[-1]}, must end at the {num_sequences} sequences; Megatron "
            "2.x's merge leaves such files: merge the parts again with a newer version, or preprocess again"
        )
    for start in range(0, len(document_index) - 1, _CHUNK):
        steps = np.diff(document_index[start : start + _CHUNK + 1])
        if int(steps.min()) < 0:
            bad = start + int(np.flatnonzero(steps < 0)[0])
            raise DataError(
                f"{path}: document index falls from {document_index[bad]} to {document_index[bad + 1]} at entry "
                f"{bad + 1}; the index is damaged"
            )
