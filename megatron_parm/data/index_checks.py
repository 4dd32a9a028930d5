"""What can be wrong with an `.idx`, each as a sentence that names the file, the field and the values. Floor 4.

Opening a dataset raises the first of them (`indexed_dataset.py`); an examination lists them (`examine.py`).
Source: formats C.1.
"""

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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

CHUNK = 1 << 22


@dataclass(frozen=True)
class IndexHeader:
    """The numbers at the head of an index, and the bytes that follow its arrays."""

    code: int
    num_sequences: int
    num_entries: int
    trailing_bytes: int


def read_header(idx: mmap.mmap | bytes, path: Path) -> IndexHeader:
    """The header, checked against the size of the file. Raises DataError: nothing can be read beyond a wrong one."""
    if idx[: len(LEGACY_MAGIC)] == LEGACY_MAGIC:
        raise DataError(f"{path}: magic {LEGACY_MAGIC!r} is the old lazy/cached format; preprocess the text again")
    if idx[: len(MAGIC)] != MAGIC:
        raise DataError(f"{path}: magic is {bytes(idx[: len(MAGIC)])!r}, must be {MAGIC!r}; this is no index file")
    if len(idx) < HEADER.size:
        raise DataError(f"{path}: size is {len(idx)} bytes, the header alone has {HEADER.size}; the file was cut")
    _, version, code, num_sequences, num_entries = HEADER.unpack(idx[: HEADER.size])
    if version != VERSION:
        raise DataError(f"{path}: version is {version}, must be {VERSION}")
    if code not in TOKEN_DTYPES and code not in FLOAT_CODES:
        raise DataError(f"{path}: dtype code is {code}, must be one of {sorted((*TOKEN_DTYPES, *FLOAT_CODES))}")
    needed = HEADER.size + 12 * num_sequences + 8 * num_entries
    if len(idx) < needed:
        raise DataError(
            f"{path}: size is {len(idx)} bytes, but {num_sequences} sequences and {num_entries} document entries need "
            f"{needed}; the file was cut or its header is damaged"
        )
    return IndexHeader(code, num_sequences, num_entries, len(idx) - needed)


def index_problems(
    lengths: NDArray[np.int32],
    offsets: NDArray[np.int64],
    document_index: NDArray[np.int64],
    item_bytes: int,
    bin_size: int,
    prefix: str | Path,
) -> Iterator[str]:
    """Everything that is wrong with the arrays of an index whose `.bin` has `bin_size` bytes."""
    yield from _negative_lengths(lengths, prefix)
    yield from offset_problems(lengths, offsets, item_bytes, bin_size, prefix)
    total = int(lengths.sum(dtype=np.int64)) * item_bytes
    if total != bin_size:
        yield (
            f"{bin_path(prefix)}: size is {bin_size} bytes, but the lengths in {idx_path(prefix)} add up to {total}; "
            "one of the two files was cut or belongs to another run: preprocess again"
        )
    yield from document_problems(document_index, len(lengths), idx_path(prefix))


def _negative_lengths(lengths: NDArray[np.int32], prefix: str | Path) -> Iterator[str]:
    for start in range(0, len(lengths), CHUNK):
        for bad in np.flatnonzero(lengths[start : start + CHUNK] < 0):
            number = start + int(bad)
            yield f"{idx_path(prefix)}: length of sequence {number} is {lengths[number]}, must not be negative"


def offset_problems(
    lengths: NDArray[np.int32], offsets: NDArray[np.int64], item_bytes: int, bin_size: int, prefix: str | Path
) -> Iterator[str]:
    """Sequences that do not begin where the ones before end."""
    place = 0
    for start in range(0, len(lengths), CHUNK):
        sizes = lengths[start : start + CHUNK].astype(np.int64)
        ends = place + np.cumsum(sizes) * item_bytes
        expected = ends - sizes * item_bytes
        for bad in np.flatnonzero(offsets[start : start + CHUNK] != expected):
            number = start + int(bad)
            yield (
                f"{idx_path(prefix)}: offset of sequence {number} is {offsets[number]}, but the sequences before it "
                f"end at byte {expected[bad]} of {bin_path(prefix)} ({bin_size} bytes); the index is damaged"
            )
        place = int(ends[-1])


def document_problems(document_index: NDArray[np.int64], num_sequences: int, path: Path) -> Iterator[str]:
    """Entries that do not lead from the first sequence to behind the last, never backwards."""
    if not len(document_index) or document_index[0] != 0:
        first = document_index[0] if len(document_index) else "missing"
        yield f"{path}: document index must begin with 0; its first entry is {first}"
        return
    if document_index[-1] != num_sequences:
        yield (
            f"{path}: document index ends at {document_index[-1]}, must end at the {num_sequences} sequences; Megatron "
            "2.x's merge leaves such files: tools/inspect_data.py PREFIX --repair NEW_PREFIX writes a whole one, or "
            "merge the parts again with tools/merge_datasets.py"
        )
    for start in range(0, len(document_index) - 1, CHUNK):
        steps = np.diff(document_index[start : start + CHUNK + 1])
        for fall in np.flatnonzero(steps < 0):
            bad = start + int(fall)
            yield (
                f"{path}: document index falls from {document_index[bad]} to {document_index[bad + 1]} at entry "
                f"{bad + 1}; the index is damaged"
            )
