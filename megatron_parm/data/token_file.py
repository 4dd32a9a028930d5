"""Numbers out of a `.bin` file, through a memory map or with plain reads. Floor 4.

Plain reads (`--no-mmap-bin-files`) suit file systems on which maps are slow, and a file that shrinks meanwhile is an
error instead of a crash. Both give the same numbers.
"""

import mmap
import os
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_parm.errors import DataError


class TokenFile(Protocol):
    """The numbers of one file, by place."""

    def read(self, first: int, count: int) -> "NDArray[np.integer]":
        """The numbers [first, first + count), read-only. The caller keeps them inside the file."""


class MappedTokens:
    """A memory map; what is read is a view of it."""

    def __init__(self, path: Path, dtype: "np.dtype[np.integer]") -> None:
        self._numbers: NDArray[np.integer] = np.frombuffer(map_file(path, "token"), dtype)

    def read(self, first: int, count: int) -> "NDArray[np.integer]":
        """A view of the file."""
        return self._numbers[first : first + count]


class PlainTokens:
    """Reads at a place, without moving a position that worker processes would share."""

    def __init__(self, path: Path, dtype: "np.dtype[np.integer]") -> None:
        file_size(path, "token")
        self._path = path
        self._dtype = dtype
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from error

    def read(self, first: int, count: int) -> "NDArray[np.integer]":
        """A copy. Raises DataError if the file ends before."""
        wanted = count * self._dtype.itemsize
        offset = first * self._dtype.itemsize
        parts: list[bytes] = []
        while wanted:
            try:
                part = os.pread(self._file.fileno(), wanted, offset)
            except OSError as error:
                raise DataError(f"{self._path}: cannot be read at byte {offset} ({error.strerror})") from error
            if not part:
                raise DataError(f"{self._path}: ends at byte {offset}, which it did not when it was opened")
            parts.append(part)
            wanted -= len(part)
            offset += len(part)
        return np.frombuffer(b"".join(parts), self._dtype)


def file_size(path: Path, kind: str) -> int:
    """The bytes of a file of a corpus. Raises DataError if there is none."""
    if not path.is_file():
        raise DataError(
            f"--data-path: {kind} file {path} does not exist; give the prefix that tools/preprocess_data.py wrote, "
            "without .bin or .idx"
        )
    return path.stat().st_size


def map_file(path: Path, kind: str) -> mmap.mmap | bytes:
    """The bytes of a file as a read-only memory map; nothing where it is empty. Raises DataError."""
    if file_size(path, kind) == 0:
        return b""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
