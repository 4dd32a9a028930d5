"""Files of torch.save read without torch.load: the structure as data, the values one tensor at a time. Floor 6.

Since torch 1.6 a file is a zip archive of one pickle (`data.pkl`) and uncompressed storages (`data/0`, `data/1`, ...);
before, pickles and storages stood one after the other. Source: torch.serialization. Pickles: `pickle_values.py`.
"""

import io
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from megatron_parm.checkpoint.pickle_values import Global, Instance, Maker, instances_of, read_pickle
from megatron_parm.checkpoint.tensor_files import TensorInfo
from megatron_parm.errors import CheckpointError

LARGEST_PICKLE = 500_000_000  # bytes
LOCAL_HEADER = 30  # bytes of an entry of a zip archive before its name
OLD_MAGIC = 0x1950A86A20F9469CFC6C
DTYPES = {str(dtype): dtype for dtype in (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)}  # fmt: skip
STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
}  # fmt: skip
NUMBERS = ("f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "b1")


@dataclass(frozen=True)
class Storage:
    """Values back to back in a file. `read` gives all of them as bytes."""

    name: str
    dtype: torch.dtype
    count: int
    read: Callable[[], bytearray]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor whose values are still in the file."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    where: str

    @property
    def info(self) -> TensorInfo:
        """Shape and type."""
        return TensorInfo(self.shape, self.dtype)

    def read(self) -> Tensor:
        """The values."""
        if not self.info.bytes:
            return torch.empty(self.shape, dtype=self.dtype)
        data = self.storage.read()
        if len(data) != self.storage.count * self.storage.dtype.itemsize:
            raise CheckpointError(
                f"{self.where} is damaged: storage {self.storage.name} has {len(data)} bytes, its pickle speaks of "
                f"{self.storage.count} values of {self.storage.dtype}"
            )
        values = torch.frombuffer(data, dtype=self.dtype)
        return values.as_strided(self.shape, self.stride, self.offset).contiguous()


def _tensor(where: str) -> Maker:
    def make(storage: Any, offset: Any, shape: Any, stride: Any, *_: object, dtype: Any = None) -> StoredTensor:
        numbers = (offset, *shape, *stride)
        if not isinstance(storage, Storage) or not all(type(number) is int and number >= 0 for number in numbers):
            raise CheckpointError(f"{where} is damaged: a tensor has no storage, or sizes that are no counts")
        kind = storage.dtype if dtype is None else DTYPES[dtype.name]
        reach = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1
        held = storage.count * storage.dtype.itemsize // kind.itemsize
        if prod(shape) and reach > held:
            raise CheckpointError(
                f"{where} is damaged: a tensor reaches to value {reach} of storage {storage.name}, which has {held}"
            )
        return StoredTensor(storage, offset, tuple(shape), tuple(stride), kind, where)

    return make


def _encoded(text: str, encoding: str = "latin1") -> bytes:
    if encoding != "latin1":
        raise ValueError(f"encoding {encoding!r}")
    return text.encode("latin1")


def _number(kind: Any, data: bytes | None = None) -> object:
    """A number of numpy."""
    code = kind.arguments[0] if isinstance(kind, Instance) else None
    if code not in NUMBERS or not isinstance(data, bytes):
        raise ValueError(f"a number of numpy of type {code!r}")
    return np.frombuffer(data, dtype=f"<{code}")[0].item()


def makers_of(where: str, more: Mapping[str, Maker]) -> dict[str, Maker]:
    """What may stand in a file of tensors and plain values, by full name; `more` are the caller's own."""
    tensor = _tensor(where)

    def of_a_class(make: Any, kind: object, arguments: Any, *_: object) -> object:
        if not isinstance(make, Global) or not make.name.startswith("torch._utils._rebuild_"):
            raise ValueError("a tensor that no known function makes")
        return makers[make.name](*arguments)

    def as_it_is(value: object, *_: object) -> object:
        return value

    def never(*_: object) -> object:
        raise ValueError("a type is used as a function")

    makers: dict[str, Maker] = {
        "torch._utils._rebuild_tensor": tensor,
        "torch._utils._rebuild_tensor_v2": tensor,
        "torch._utils._rebuild_tensor_v3": lambda *values: tensor(*values[:6], dtype=values[6]),
        "torch._utils._rebuild_parameter": as_it_is,
        "torch._utils._rebuild_parameter_with_state": as_it_is,
        "torch._tensor._rebuild_from_type_v2": of_a_class,
        "torch.Size": tuple,
        "torch.device": lambda *words: ":".join(map(str, words)),
        "collections.OrderedDict": dict,
        "_codecs.encode": _encoded,
    }
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        makers |= {f"{module}.scalar": _number} | instances_of(f"{module}._reconstruct")
    for module in ("builtins", "__builtin__"):  # pickles of protocol 2 have the old name
        makers |= {f"{module}.set": set, f"{module}.frozenset": frozenset}
    for name in ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.storage.UntypedStorage", *DTYPES):
        makers[name] = never
    makers |= dict.fromkeys((f"torch.{name}" for name in STORAGES), never)
    makers |= dict.fromkeys((f"torch.cuda.{name}" for name in STORAGES), never)
    makers |= instances_of("numpy.ndarray", "numpy.dtype", "argparse.Namespace", "_io.BytesIO")
    return makers | dict(more)


def _storage_of(words: object, read: Callable[[str], Callable[[], bytearray]]) -> Storage:
    """The storage of a persistent id: the word storage, its class, its name, its device, the number of values."""
    if not isinstance(words, tuple) or len(words) not in (5, 6) or words[0] != "storage":
        raise ValueError("a persistent id of no storage")
    kind, name, count = words[1], words[2], words[4]
    if not isinstance(kind, Global) or not isinstance(name, str) or type(count) is not int or count < 0:
        raise ValueError("a storage without class, name or size")
    if len(words) == 6 and words[5] is not None:
        raise ValueError("a view of a storage")
    return Storage(name, STORAGES[kind.name.rpartition(".")[2]], count, read(name))


class _Part(io.RawIOBase):
    """A range of bytes of a file as a file of its own."""

    def __init__(self, path: Path, start: int, length: int) -> None:
        self._file = path.open("rb")
        self._start, self._length, self._place = start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = max(0, offset + (0, self._place, self._length)[whence])
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._place)]
        self._file.seek(self._start + self._place)
        count = self._file.readinto(view)
        self._place += count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


@dataclass(frozen=True)
class TorchFile:
    """A file of torch.save, or the part of a larger file from `start` on that holds one. Raises CheckpointError."""

    path: Path
    start: int = 0
    length: int | None = None

    def open(self) -> io.BufferedReader:
        """Its bytes."""
        size = self.path.stat().st_size
        length = size - self.start if self.length is None else self.length
        if self.start < 0 or length < 0 or self.start + length > size:
            raise CheckpointError(
                f"{self.path} has {size} bytes; a part of {length} from {self.start} on is not there: it is damaged"
            )
        return io.BufferedReader(_Part(self.path, self.start, length))

    def value(self, more: Mapping[str, Maker]) -> Any:
        """What was saved, tensors as `StoredTensor`. Raises UntrustedCheckpointError for what is not in the table."""
        makers = makers_of(str(self.path), more)
        try:
            with self.open() as file:
                begin = file.read(4)
                file.seek(0)
                return self._of_archive(file, makers) if begin == b"PK\x03\x04" else self._of_old_file(file, makers)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror or error}") from None
        except (zipfile.BadZipFile, RuntimeError) as error:
            raise CheckpointError(f"{self.path} is damaged or no file of torch.save ({error})") from None

    def _of_archive(self, file: BinaryIO, makers: Mapping[str, Maker]) -> Any:
        with zipfile.ZipFile(file) as archive:
            entries = {entry.filename: entry for entry in archive.infolist()}
            pickles = [name for name in entries if name.endswith("/data.pkl") and name.count("/") == 1]
            if len(pickles) != 1:
                raise CheckpointError(f"{self.path} is damaged or no file of torch.save: it has no one data.pkl")
            root = pickles[0].removesuffix("data.pkl")
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries.values()):
                raise CheckpointError(f"{self.path} is no file of torch.save: it is compressed")
            if entries[pickles[0]].file_size > LARGEST_PICKLE:
                raise CheckpointError(f"{self.path}: its pickle has more than {LARGEST_PICKLE} bytes")
            order = f"{root}byteorder"
            if order in entries and archive.read(order) != b"little":
                raise CheckpointError(f"{self.path} was written on a machine of the other byte order")
            data = archive.read(pickles[0])

        def read(name: str) -> Callable[[], bytearray]:
            if f"{root}data/{name}" not in entries:
                raise CheckpointError(f"{self.path} is damaged: it has no storage {name[:100]}")
            return lambda: self._record(entries[f"{root}data/{name}"])

        return read_pickle(io.BytesIO(data), makers, str(self.path), lambda words: _storage_of(words, read))

    def _record(self, entry: zipfile.ZipInfo) -> bytearray:
        """The bytes of an uncompressed entry; the archive's checksum is compared."""
        with self.open() as file:
            file.seek(entry.header_offset)
            header = file.read(LOCAL_HEADER)
            names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
            file.seek(entry.header_offset + LOCAL_HEADER + names)
            data = bytearray(entry.file_size)
            found = file.readinto(data)
        if found != entry.file_size or zlib.crc32(data) != entry.CRC:
            raise CheckpointError(f"{self.path} is damaged: the values of {entry.filename} have another checksum")
        return data

    def _of_old_file(self, file: BinaryIO, makers: Mapping[str, Maker]) -> Any:
        where = str(self.path)
        if read_pickle(file, {}, where) != OLD_MAGIC:
            raise CheckpointError(f"{where} is damaged or no file of torch.save")
        read_pickle(file, {}, where)  # version of the protocol
        about = read_pickle(file, {}, where)
        if not isinstance(about, dict) or about.get("little_endian") is not True:
            raise CheckpointError(f"{where} was written on a machine of the other byte order")
        places: dict[str, tuple[int, int]] = {}  # of each storage: where its values begin, how many bytes
        sizes: dict[str, int] = {}

        def read(name: str) -> Callable[[], bytearray]:
            return lambda: self._bytes(*places[name])

        def stored(words: object) -> Storage:
            storage = _storage_of(words, read)
            sizes[storage.name] = storage.dtype.itemsize
            return storage

        value = read_pickle(file, makers, where, stored)
        for name in read_pickle(file, {}, where):
            count = int.from_bytes(file.read(8), "little")
            if name not in sizes:
                raise CheckpointError(f"{where} is damaged: a storage has no tensor")
            places[name] = file.tell(), count * sizes[name]
            file.seek(count * sizes[name], io.SEEK_CUR)
        missing = sizes.keys() - places.keys()
        if missing:
            raise CheckpointError(f"{where} is damaged: {len(missing)} storages are missing")
        return value

    def _bytes(self, start: int, length: int) -> bytearray:
        with self.open() as file:
            file.seek(start)
            return bytearray(file.read(length))
