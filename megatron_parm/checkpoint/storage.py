"""Safetensors files: written piece by piece and hashed meanwhile, read slice by slice. Floor 6.

The files are those that torch's distributed checkpointing writes as safetensors, with its note of where each part
begins, so `torch.distributed.checkpoint` reads them too. Written here because its writer builds a whole file in memory
before the first byte goes out, and hashing would need to read it again.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import safe_open
from torch import Tensor

from megatron_parm.checkpoint.boxes import Box, overlaps, within
from megatron_parm.checkpoint.manifest import FileEntry, TensorEntry

ALIGNMENT = 64  # bytes, of a value among copies
CHUNK_BYTES = 4 << 20  # written at a time, while the last one is hashed
NAMES = {  # of dtypes, as safetensors writes them
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


@dataclass(frozen=True)
class Stored:
    """Values to be written, and where they begin in their global tensor."""

    values: Tensor
    offsets: tuple[int, ...]


class HostCopies:
    """Host memory for copies of values that training goes on changing.

    Kept from one save to the next: memory that is touched for the first time costs several times the copy. Page-locked
    where the values lie on an accelerator.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def of(self, stored: Mapping[str, Stored]) -> dict[str, Stored]:
        """The same with values of their own. They hold until the next call."""
        starts, end = {}, 0
        for name, one in stored.items():
            starts[name] = end
            end += -(-one.values.nbytes // ALIGNMENT) * ALIGNMENT
        if end > self._memory.numel():
            is_pinned = any(one.values.is_cuda for one in stored.values())
            self._memory = torch.empty(end, dtype=torch.uint8, pin_memory=is_pinned)
        found = {}
        for name, one in stored.items():
            room = self._memory[starts[name] : starts[name] + one.values.nbytes]
            values = room.view(one.values.dtype).view(one.values.shape)
            values.copy_(one.values.detach())
            found[name] = replace(one, values=values)
        return found


def write_shard(path: Path, stored: Mapping[str, Stored]) -> FileEntry:
    """Write one file of the pieces by name and wait until it is on the disk. Holds one chunk beside the pieces.

    Raises OSError with the file's name.
    """
    names = sorted(stored, key=lambda name: (-stored[name].values.dtype.itemsize, name))  # so that all are aligned
    try:
        with path.open("wb", buffering=0) as file, ThreadPoolExecutor(1) as hasher:
            sha256 = hashlib.sha256()
            size = 0
            for data in _chunks(_header(stored, names), (stored[name].values for name in names)):
                hasher.submit(sha256.update, data)
                write_all(file, data)
                size += len(data)
            os.fsync(file.fileno())
    except OSError as error:
        if error.filename is None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    return FileEntry(size, sha256.hexdigest())


def write_all(file: IO[bytes], data: memoryview) -> None:
    """Write all of `data`: a system call may take less."""
    while data:
        data = data[file.write(data) :]


def _header(stored: Mapping[str, Stored], names: Sequence[str]) -> bytes:
    starts = {name: {"saved_offsets": list(stored[name].offsets)} for name in names}
    about = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(starts)}
    content: dict[str, Any] = {"__metadata__": about}
    end = 0
    for name in names:
        values = stored[name].values
        dtype = NAMES[str(values.dtype).removeprefix("torch.")]
        content[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [end, end + values.nbytes]}
        end += values.nbytes
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _chunks(header: bytes, tensors: Iterator[Tensor]) -> Iterator[memoryview]:
    yield memoryview(header)
    for values in tensors:
        flat = values.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
        for start in range(0, flat.numel(), CHUNK_BYTES):
            yield flat[start : start + CHUNK_BYTES].numpy().data


def read_boxes(folder: Path, boxes: Mapping[str, Box], saved: Mapping[str, TensorEntry]) -> None:
    """Fill the boxes in place from the saved parts that overlap them; what no part covers keeps its values.

    Only the needed slices are read, one at a time.
    """
    wanted: dict[str, list[Callable[[Any], None]]] = {}
    for name, box in boxes.items():
        for overlap in overlaps(saved[name], box.offsets, box.local.shape):
            target = box.local.detach()[within(overlap.offsets, overlap.shape, box.offsets)]
            source = within(overlap.offsets, overlap.shape, overlap.part_offsets)
            wanted.setdefault(overlap.file, []).append(_copy(name, source, target))
    for file, copies in wanted.items():
        with ExitStack() as stack:
            opened = stack.enter_context(safe_open(folder / file, framework="pt"))
            for copy in copies:
                copy(opened)


def _copy(name: str, source: tuple[slice, ...], target: Tensor) -> Callable[[Any], None]:
    def copy(opened: Any) -> None:
        piece = opened.get_slice(name)[source] if source else opened.get_tensor(name)
        if piece.shape != target.shape:
            raise ValueError(f"{name} has {list(piece.shape)} where its manifest says {list(target.shape)}")
        target.copy_(piece)

    return copy
