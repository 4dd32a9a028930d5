"""Safetensors files read and written tensor by tensor, so that a model larger than memory passes. Floor 6.

Format: https://github.com/huggingface/safetensors - 8 bytes of header length, JSON, then the values back to back. The
header is checked as a whole before any value is used.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_parm.checkpoint.manifest import FileEntry
from megatron_parm.errors import CheckpointError

LARGEST_HEADER = 100_000_000  # bytes; safetensors' own limit
ALIGNMENT = 8
CODES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES_OF_CODES = {dtype: code for code, dtype in CODES.items()}


@dataclass(frozen=True)
class TensorInfo:
    """What is known of a tensor before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Bytes of the values."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def outline(self) -> Tensor:
        """A tensor of that shape and type without values, to try an operation on."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    @staticmethod
    def of(tensor: Tensor) -> "TensorInfo":
        """That of a tensor."""
        return TensorInfo(tuple(tensor.shape), tensor.dtype)

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


class TensorSource(Protocol):
    """Named whole tensors that are read one at a time."""

    @property
    def entries(self) -> Mapping[str, TensorInfo]:
        """All of them."""

    def read(self, name: str, /) -> Tensor:
        """The values of one, on the CPU."""


class SafetensorsFile:
    """One file of tensors. Raises CheckpointError naming the file and what is wrong with it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._places: dict[str, tuple[TensorInfo, int]] = {}
        try:
            self._read_header()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None

    @property
    def entries(self) -> Mapping[str, TensorInfo]:
        """The tensors of the file."""
        return {name: info for name, (info, _) in self._places.items()}

    def read(self, name: str) -> Tensor:
        """The values of one tensor, on the CPU."""
        info, start = self._places[name]
        values = torch.empty(info.shape, dtype=info.dtype)
        if not info.bytes:
            return values
        with self.path.open("rb") as file:
            file.seek(start)
            found = file.readinto(values.view(-1).view(torch.uint8).numpy().data)
        if found != info.bytes:
            raise CheckpointError(f"{self.path} ends inside {name}: {found} of {info.bytes} bytes are there")
        return values

    def _read_header(self) -> None:
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, LARGEST_HEADER):
                raise self._damage(f"it has {size} bytes and says that its header has {length}")
            text = file.read(length)
        try:
            header: Any = json.loads(text)
        except (ValueError, RecursionError):
            raise self._damage("its header is not JSON") from None
        if not isinstance(header, dict):
            raise self._damage("its header is no JSON object")
        header.pop("__metadata__", None)
        spans = []
        for name, entry in header.items():
            info, begin, end = self._parsed(name, entry)
            self._places[name] = info, 8 + length + begin
            spans.append((begin, end))
        reached = 0
        for begin, end in sorted(spans):
            if begin != reached:
                raise self._damage(f"its tensors overlap or leave a gap at byte {reached}")
            reached = end
        if 8 + length + reached != size:
            raise self._damage(f"it has {size} bytes, its header speaks of {8 + length + reached}")

    def _parsed(self, name: str, entry: Any) -> tuple[TensorInfo, int, int]:
        try:
            shape, (begin, end) = entry["shape"], entry["data_offsets"]
            code = entry["dtype"]
        except (KeyError, TypeError, ValueError):
            raise self._damage(f"the entry of {name!r} is not one of a tensor") from None
        numbers = [*shape, begin, end] if isinstance(shape, list) else [None]
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise self._damage(f"the entry of {name!r} has sizes that are no counts")
        if code not in CODES:
            raise CheckpointError(f"{self.path}: {name} has the type {code!r}; known are {', '.join(CODES)}")
        info = TensorInfo(tuple(shape), CODES[code])
        if end - begin != info.bytes:
            raise self._damage(f"{name} is {info} in {end - begin} bytes")
        return info, begin, end

    def _damage(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is damaged or no safetensors file: {what}")


def write_safetensors(
    path: Path, tensors: Mapping[str, TensorInfo], read: Callable[[str], Tensor], metadata: Mapping[str, str]
) -> FileEntry:
    """Write `tensors`, asking `read` for the values of one at a time. Returns the size and hash of the file."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for name, info in tensors.items():
        header[name] = {
            "dtype": NAMES_OF_CODES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [begin, begin + info.bytes],
        }
        begin += info.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    digest, total = hashlib.sha256(), 0
    with path.open("wb") as file:

        def put(data: bytes | memoryview) -> None:
            digest.update(data)
            file.write(data)

        put(len(text).to_bytes(8, "little"))
        put(text)
        for name, info in tensors.items():
            values = read(name)
            assert TensorInfo.of(values) == info, f"{name} is {TensorInfo.of(values)}, announced was {info}"
            if info.bytes:
                put(values.contiguous().view(-1).view(torch.uint8).numpy().data)
        total = file.tell()
    return FileEntry(total, digest.hexdigest())


def in_files(tensors: Mapping[str, TensorInfo], largest: int) -> list[dict[str, TensorInfo]]:
    """The tensors in their order, as many a file as `largest` bytes hold; a larger tensor is alone in its file."""
    files: list[dict[str, TensorInfo]] = [{}]
    filled = 0
    for name, info in tensors.items():
        if files[-1] and filled + info.bytes > largest:
            files.append({})
            filled = 0
        files[-1][name] = info
        filled += info.bytes
    return files


def names(tensors: Iterable[str], shown: int = 12) -> str:
    """Names for a message that fits on a screen."""
    found = sorted(tensors)
    return ", ".join(found[:shown]) + (f" and {len(found) - shown} more" if len(found) > shown else "")
