"""Whole numbers that only grow in count, kept on disk, so that memory does not grow with them. Floor 4."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_PART = 1 << 20


class GrowingColumn:
    """A column of numbers in a file without a name: whatever stops the process, nothing stays behind.

    Raises OSError where the disk refuses.
    """

    def __init__(self, folder: Path, dtype: "np.dtype[np.integer]") -> None:
        self._dtype = dtype
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - it lives as long as the column
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, numbers: NDArray[np.integer]) -> None:
        """Add numbers at the end."""
        self._file.write(np.ascontiguousarray(numbers, dtype=self._dtype).data)
        self._count += len(numbers)

    def parts(self) -> Iterator[NDArray[np.integer]]:
        """All numbers in order, some at a time. Nothing can be added after."""
        self._file.seek(0)
        while content := self._file.read(_PART * self._dtype.itemsize):
            yield np.frombuffer(content, dtype=self._dtype)

    def close(self) -> None:
        """Give the disk space back."""
        self._file.close()
