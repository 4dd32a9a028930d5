"""Torch DCP's safetensors files: a writer that hashes while it writes, a reader led by the manifest. Floor 6."""

import errno
import hashlib
import io
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import torch
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter, LoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron_parm.checkpoint.manifest import DTYPES, FileEntry, TensorEntry

T = TypeVar("T")


class _HashingStream:
    """Forwards to a binary file and hashes what passes, so that no file is read again to be hashed."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._sha256 = hashlib.sha256()
        self._bytes = 0

    def write(self, data: bytes) -> int:
        self._sha256.update(data)
        self._bytes += len(data)
        return self._file.write(data)

    def entry(self) -> FileEntry:
        return FileEntry(self._bytes, self._sha256.hexdigest())

    def tell(self) -> int:
        return self._file.tell()

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        self._file.flush()  # DCP asks for it to fsync: what is still in our buffer must be in the file by then
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()


class _HashingFileSystem(FileSystem):
    """Local files; `written` has the size and hash of each, by name."""

    def __init__(self) -> None:
        self.written: dict[str, FileEntry] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        """Open `path`; an OSError that does not say which file it is about gets to say it."""
        try:
            with Path(path).open(mode) as file:
                stream = _HashingStream(cast(IO[bytes], file))
                yield cast(io.IOBase, stream)
        except OSError as error:
            if error.filename is None:
                raise OSError(error.errno, error.strerror, str(path)) from error
            raise
        self.written[Path(path).name] = stream.entry()


class ShardWriter(HuggingFaceStorageWriter):
    """DCP's safetensors writer, one file a rank, that hashes while it writes; `written` is what this rank wrote."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), save_distributed=True)
        self.folder = folder
        self._hashing = _HashingFileSystem()
        self.fs = self._hashing

    @property
    def written(self) -> Mapping[str, FileEntry]:
        """Size and hash of the files of this rank."""
        return self._hashing.written

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The first rank has made the folder; where it is not seen, the disk is not shared."""
        if not self.folder.is_dir():
            raise FileNotFoundError(
                errno.ENOENT, "not seen here though rank 0 made it; all ranks must share the folder", str(self.folder)
            )
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        """Write this rank's file."""
        return _picklable(lambda: super(ShardWriter, self).write_data(plan, planner))


class PartReader(HuggingFaceStorageReader):
    """DCP's safetensors reader that takes shapes and places from the manifest, and so opens only the files it needs."""

    def __init__(self, folder: Path, tensors: Mapping[str, TensorEntry]) -> None:
        super().__init__(str(folder))
        self.folder = folder
        self.tensors = tensors

    def read_metadata(self) -> Metadata:
        """The manifest in DCP's words."""
        saved: dict[str, Any] = {}
        places: dict[MetadataIndex, _Place] = {}
        for name, entry in self.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.shape)) for part in entry.parts]
            saved[name] = TensorStorageMetadata(TensorProperties(DTYPES[entry.dtype]), torch.Size(entry.shape), chunks)
            for part in entry.parts:
                places[MetadataIndex(name, part.offsets)] = _Place(str(self.folder / part.file))
        return Metadata(state_dict_metadata=saved, storage_data=places)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        """Read what overlaps this rank's boxes."""
        return _picklable(lambda: super(PartReader, self).read_data(plan, planner))


@dataclass(frozen=True)
class _Place:
    """Where DCP's reader finds a part."""

    relative_path: str


def _picklable(action: Callable[[], T]) -> T:
    """DCP pickles a rank's exception to show it to the others; the foreign ones (safetensors') do not survive that."""
    try:
        return action()
    except OSError:
        raise
    except Exception as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from None
