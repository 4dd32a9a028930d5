"""Writes `.bin` and `.idx`, byte for byte as Megatron does. Floor 4.

Both files grow under temporary names and take their own names only when complete, the `.idx` last: whatever stops the
writer, no index that opens is left behind. Memory does not grow with the number of sequences.
"""

import contextlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from megatron_parm.data.growing_column import GrowingColumn
from megatron_parm.data.index_format import (
    HEADER,
    MAGIC,
    VERSION,
    bin_path,
    check_lengths,
    dtype_code,
    idx_path,
    sequence_offsets,
)
from megatron_parm.data.indexed_dataset import IndexedDataset
from megatron_parm.data.unfinished import UnfinishedFile, remove_abandoned
from megatron_parm.errors import DataError


class IndexedWriter:
    """Adds documents one after another. As a context manager it finishes on success and discards on any exception.

    has_modes: a multimodal file, each of whose sequences has a mode, written behind the index. What writers of the
    same prefix that were killed left behind is removed at the start: `num_abandoned` files.
    """

    def __init__(self, prefix: str | Path, dtype: "np.dtype[np.integer]", *, has_modes: bool = False) -> None:
        self.prefix = Path(prefix)
        self.dtype = np.dtype(dtype)
        self.num_tokens = 0
        self._code = dtype_code(self.dtype)
        self._num_sequences = 0
        self._modes: array[int] | None = array("b") if has_modes else None
        try:
            self.prefix.parent.mkdir(parents=True, exist_ok=True)
            self.num_abandoned = sum(remove_abandoned(path(prefix)) for path in (bin_path, idx_path))
            self._bin = UnfinishedFile(bin_path(prefix))
            self._idx: UnfinishedFile | None = None
            self._lengths = GrowingColumn(self.prefix.parent, np.dtype("<i4"))
            self._document_index = GrowingColumn(self.prefix.parent, np.dtype("<i8"))
            self._document_index.add(np.zeros(1, dtype=np.int64))
        except OSError as error:
            raise DataError(f"cannot write {bin_path(prefix)}: {error.strerror}; choose a folder with room") from error

    @property
    def num_sequences(self) -> int:
        """Sequences written so far."""
        return self._num_sequences

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        else:
            self.discard()

    def add_document(
        self, ids: NDArray[np.integer], lengths: Sequence[int] | None = None, modes: Sequence[int] | None = None
    ) -> None:
        """Add one document: `ids` of all its sequences back to back; `lengths` of each (None: one sequence).

        modes: of each sequence, in a multimodal file alone.
        """
        sizes = np.array([len(ids)] if lengths is None else lengths, dtype=np.int64)
        self._add_sequences(ids, sizes)
        if self._modes is not None:
            self._add_modes(np.array(modes if modes is not None else [0] * len(sizes), dtype=np.int8), len(sizes))
        self._record(self._document_index, np.array([self._num_sequences]))

    def add_documents(
        self, ids: NDArray[np.integer], lengths: NDArray[np.integer], counts: NDArray[np.integer] | None = None
    ) -> None:
        """Add many documents: `ids` back to back, the length of each sequence, the sequences of each document (1)."""
        first = self._num_sequences
        self._add_sequences(ids, lengths)
        counts = np.ones(len(lengths), dtype=np.int64) if counts is None else counts
        self._record(self._document_index, first + np.cumsum(counts, dtype=np.int64))
        if self._modes is not None:
            self._add_modes(np.zeros(len(lengths), dtype=np.int8), len(lengths))

    def add_dataset(self, dataset: IndexedDataset) -> None:
        """Add all documents of a file of the same number type, byte for byte."""
        if dataset.dtype != self.dtype:
            raise DataError(
                f"{dataset.name}: its ids are {dataset.dtype}, those of {bin_path(self.prefix)} {self.dtype}; files of "
                "one kind are needed: preprocess the text of the other again, with the same tokenizer"
            )
        if self._modes is not None and dataset.modes is None and len(dataset):
            raise DataError(
                f"{idx_path(dataset.name)}: has no modes behind its arrays, so it is no multimodal file; merge without "
                "--multimodal"
            )
        self.add_arrays(dataset.chunks(), dataset.lengths, dataset.document_index, dataset.modes)

    def add_arrays(
        self,
        numbers: Iterable[NDArray[np.integer]],
        lengths: NDArray[np.integer],
        document_index: NDArray[np.integer],
        modes: NDArray[np.int8] | None = None,
    ) -> None:
        """Add documents as the arrays of an index have them; `numbers` are theirs, in pieces of any size."""
        first, before = self._num_sequences, self.num_tokens
        for piece in numbers:
            self._write(piece)
            self.num_tokens += len(piece)
        if self.num_tokens - before != int(lengths.sum(dtype=np.int64)) or document_index[-1] != len(lengths):
            raise DataError(f"{bin_path(self.prefix)}: the lengths or documents do not fit the ids given")
        self._record(self._lengths, lengths)
        self._num_sequences += len(lengths)
        self._record(self._document_index, document_index[1:] + np.int64(first))
        if self._modes is not None:
            self._add_modes(np.zeros(0, dtype=np.int8) if modes is None else modes, len(lengths))

    def finish(self) -> None:
        """Write the index and give both files their names."""
        try:
            self._bin.flush_to_disk()
            self._idx = idx = UnfinishedFile(idx_path(self.prefix))
            idx.file.write(HEADER.pack(MAGIC, VERSION, self._code, len(self._lengths), len(self._document_index)))
            for part in chain(self._lengths.parts(), self._offsets(), self._document_index.parts()):
                idx.file.write(part.data)
            if self._modes is not None:
                idx.file.write(self._modes.tobytes())
            idx.flush_to_disk()
            idx_path(self.prefix).unlink(missing_ok=True)
            self._bin.publish()
            idx.publish()
            self._close()
        except OSError as error:
            self.discard()
            raise DataError(f"cannot finish {bin_path(self.prefix)}: {error.strerror}; nothing was kept") from error

    def discard(self) -> None:
        """Remove what was written. Files of an earlier run under the same prefix stay as they were."""
        self._close()
        self._bin.discard()
        if self._idx is not None:
            self._idx.discard()

    def _add_sequences(self, ids: NDArray[np.integer], lengths: NDArray[np.integer]) -> None:
        check_lengths(lengths, bin_path(self.prefix))
        if int(lengths.sum(dtype=np.int64)) != len(ids):
            raise DataError(
                f"{bin_path(self.prefix)}: lengths add up to {lengths.sum()}, but {len(ids)} ids were given"
            )
        limits = np.iinfo(self.dtype) if self.dtype.kind != "f" else None
        if limits is not None and len(ids) and (int(ids.min()) < limits.min or int(ids.max()) > limits.max):
            raise DataError(
                f"{bin_path(self.prefix)}: token ids {ids.min()}..{ids.max()} do not fit {self.dtype} "
                f"({limits.min}..{limits.max}); the vocabulary size given to the writer is too small"
            )
        self._write(ids)
        self._record(self._lengths, lengths)
        self._num_sequences += len(lengths)
        self.num_tokens += len(ids)

    def _add_modes(self, modes: NDArray[np.int8], num_sequences: int) -> None:
        assert self._modes is not None
        if len(modes) != num_sequences:
            raise DataError(f"{bin_path(self.prefix)}: {len(modes)} modes for {num_sequences} sequences")
        self._modes.frombytes(np.ascontiguousarray(modes, dtype=np.int8).tobytes())

    def _offsets(self) -> Iterator[NDArray[np.int64]]:
        """The byte offset of every sequence, some at a time."""
        start = np.int64(0)
        for part in self._lengths.parts():
            yield (start + sequence_offsets(part, self.dtype.itemsize)).astype("<i8")
            start += part.sum(dtype=np.int64) * np.int64(self.dtype.itemsize)

    def _write(self, ids: NDArray[np.integer]) -> None:
        try:
            self._bin.file.write(np.ascontiguousarray(ids, dtype=self.dtype).data)
        except OSError as error:
            raise DataError(f"cannot write {bin_path(self.prefix)}: {error.strerror}; nothing was kept") from error

    def _record(self, column: GrowingColumn, numbers: NDArray[np.integer]) -> None:
        try:
            column.add(numbers)
        except OSError as error:
            raise DataError(f"cannot write beside {self.prefix}: {error.strerror}; nothing was kept") from error

    def _close(self) -> None:
        for column in (self._lengths, self._document_index):
            with contextlib.suppress(OSError):
                column.close()
