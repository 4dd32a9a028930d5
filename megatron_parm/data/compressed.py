"""Text files that may be compressed, read as one stream that knows its place in the file. Floor 4."""

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from megatron_parm.errors import ConfigError, DataError

GZIP = (".gz", ".gzip")
ZSTANDARD = (".zst", ".zstd")


def is_compressed(path: Path) -> bool:
    """Whether the name says that a file is compressed."""
    return path.suffix.lower() in GZIP + ZSTANDARD


def plain_suffix(path: Path) -> str:
    """The suffix of a file's name, below that of its compression: ".jsonl" for x.jsonl.gz."""
    return (Path(path.stem) if is_compressed(path) else path).suffix.lower()


@contextmanager
def open_stream(path: Path) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """The plain bytes of a file, and a function that tells how many bytes of the file itself are read.

    Raises DataError for compressed data that is cut or damaged, ConfigError where `zstandard` is missing.
    """
    with path.open("rb") as file:
        if not is_compressed(path):
            yield file, file.tell
            return
        stream = gzip.GzipFile(fileobj=file) if path.suffix.lower() in GZIP else _zstandard(path, file)
        try:
            yield cast(BinaryIO, stream), file.tell
        except (EOFError, gzip.BadGzipFile, zlib.error, _ZstandardError) as error:
            raise DataError(f"{path}: compressed data that is cut or damaged ({error}); make the file anew") from error


class _ZstandardError(Exception):
    """A damaged zstandard stream."""


class _ZstandardStream(io.RawIOBase):
    """zstandard's reader with its own error in ours, and an error where the data ends in the middle of a frame."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise ConfigError(
                f"{path}: reading zstandard needs a package that is not installed: pip install zstandard"
            ) from error
        self._error = zstandard.ZstdError
        self._file = file
        self._decoder = zstandard.ZstdDecompressor()
        self._frame = self._decoder.decompressobj()
        self._is_inside = False
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if not self._fill():
                return 0
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _fill(self) -> bool:
        """Decompress some more; False at the end."""
        content = self._frame.unused_data if self._frame.eof else b""
        if self._frame.eof:
            self._frame, self._is_inside = self._decoder.decompressobj(), False
        content = content or self._file.read(1 << 16)
        if not content:
            if self._is_inside:
                raise _ZstandardError("it ends in the middle of a frame")
            return False
        self._is_inside = True
        try:
            self._ready = memoryview(self._frame.decompress(content))
        except self._error as error:
            raise _ZstandardError(str(error)) from error
        return True


def _zstandard(path: Path, file: BinaryIO) -> BinaryIO:
    return io.BufferedReader(_ZstandardStream(path, file), 1 << 18)
