"""Reads `.bin` and `.idx` files. Floor 4. Source: formats C.1.

Everything the index says is checked against the sizes of both files when a dataset is opened, so that a damaged index
is an error that names the file and the field, and never a read outside the `.bin`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_parm.data.index_checks import CHUNK, index_problems, read_header
from megatron_parm.data.index_format import FLOAT_CODES, HEADER, TOKEN_DTYPES, bin_path, idx_path, number_dtype
from megatron_parm.data.token_file import MappedTokens, PlainTokens, TokenFile, file_size, map_file
from megatron_parm.errors import DataError


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


class RawIndex:
    """The arrays of an `.idx` as they stand, whatever they say; only the header is checked. Raises DataError."""

    def __init__(self, prefix: str | Path) -> None:
        idx = map_file(idx_path(prefix), "index")
        self.bin_bytes = file_size(bin_path(prefix), "token")
        self.header = read_header(idx, idx_path(prefix))
        num_sequences, num_entries = self.header.num_sequences, self.header.num_entries
        start = HEADER.size
        self.lengths: NDArray[np.int32] = np.frombuffer(idx, "<i4", num_sequences, start)
        self.offsets: NDArray[np.int64] = np.frombuffer(idx, "<i8", num_sequences, start + 4 * num_sequences)
        self.document_index: NDArray[np.int64] = np.frombuffer(idx, "<i8", num_entries, start + 12 * num_sequences)
        has_modes = num_sequences > 0 and self.header.trailing_bytes == num_sequences
        behind = start + 12 * num_sequences + 8 * num_entries
        self.modes: NDArray[np.int8] | None = np.frombuffer(idx, "i1", num_sequences, behind) if has_modes else None
        self.dtype = number_dtype(self.header.code, self.lengths, self.bin_bytes)


class IndexedDataset:
    """The sequences and documents of one prefix. Opened again, not copied, when it travels to another process.

    maps_tokens: read through a memory map, otherwise with plain reads. allows_floats: open files of floating numbers
    too, which are no token ids. `modes` has the mode of each sequence of a multimodal file, which no text needs.
    """

    def __init__(self, prefix: str | Path, *, maps_tokens: bool = True, allows_floats: bool = False) -> None:
        self.name = str(prefix)
        self._maps_tokens, self._allows_floats = maps_tokens, allows_floats
        raw = RawIndex(prefix)
        code = raw.header.code
        if code in FLOAT_CODES and not allows_floats:
            raise DataError(
                f"{idx_path(prefix)}: dtype code {code} is a floating type; token ids need one of "
                f"{sorted(TOKEN_DTYPES)}"
            )
        self.dtype, self.modes = raw.dtype, raw.modes
        self.lengths, self.offsets, self.document_index = raw.lengths, raw.offsets, raw.document_index
        item_bytes = self.dtype.itemsize
        arrays = (self.lengths, self.offsets, self.document_index)
        for problem in index_problems(*arrays, item_bytes, raw.bin_bytes, prefix):
            raise DataError(problem)
        self.num_tokens = raw.bin_bytes // item_bytes
        kind = MappedTokens if maps_tokens else PlainTokens
        self._file: TokenFile = kind(bin_path(prefix), self.dtype)

    def __len__(self) -> int:
        return len(self.lengths)

    def __reduce__(self) -> tuple[object, tuple[str, bool, bool]]:
        return _open, (self.name, self._maps_tokens, self._allows_floats)

    @property
    def num_documents(self) -> int:
        """Documents in the file; a GPT file has one sequence in each."""
        return len(self.document_index) - 1

    def read(self, sequence: int, start: int = 0, stop: int | None = None) -> NDArray[np.integer]:
        """The ids [start, stop) of one sequence, read-only."""
        if not 0 <= sequence < len(self.lengths):
            raise IndexError(f"{self.name}: sequence {sequence} of {len(self.lengths)}")
        length = int(self.lengths[sequence])
        stop = length if stop is None else stop
        if not 0 <= start <= stop <= length:
            raise IndexError(f"{self.name}: tokens [{start}, {stop}) of sequence {sequence}, which has {length}")
        first = int(self.offsets[sequence]) // self.dtype.itemsize
        return self._file.read(first + start, stop - start)

    def document(self, number: int) -> list[NDArray[np.integer]]:
        """The sequences of one document."""
        if not 0 <= number < self.num_documents:
            raise IndexError(f"{self.name}: document {number} of {self.num_documents}")
        first, last = int(self.document_index[number]), int(self.document_index[number + 1])
        return [self.read(sequence) for sequence in range(first, last)]

    def chunks(self) -> Iterator[NDArray[np.integer]]:
        """All token ids in order, some millions at a time."""
        for start in range(0, self.num_tokens, CHUNK):
            yield self._file.read(start, min(CHUNK, self.num_tokens - start))

    def locate(self, token: int) -> tuple[int, int]:
        """The sequence that holds the token at place `token` of the `.bin`, and the place within it."""
        offset = token * self.dtype.itemsize
        sequence = int(np.searchsorted(self.offsets, offset, side="right")) - 1
        return sequence, token - int(self.offsets[sequence]) // self.dtype.itemsize


def _open(name: str, maps_tokens: bool, allows_floats: bool) -> IndexedDataset:
    return IndexedDataset(name, maps_tokens=maps_tokens, allows_floats=allows_floats)
