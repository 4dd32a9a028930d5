"""Sharded checkpoints of Megatron-Core (torch_dist), as far as they hold tensors. Floor 6. Source: formats C.8.

`.metadata` is a plain pickle of torch DCP's classes, read as data: for each tensor its whole shape and, for each piece,
the file, place and length. A piece is a small file of torch.save inside `__X_Y.distcp`. Entries of bytes (random
states, `_extra_state`) hold pickles of any kind: they are never opened. Layers may be stacked under one name.
"""

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_parm.checkpoint.huggingface_folder import plain_file, regular_file
from megatron_parm.checkpoint.megatron import whole_model
from megatron_parm.checkpoint.megatron_config import SavedArguments
from megatron_parm.checkpoint.megatron_folder import MEGATRON_MAKERS, METADATA
from megatron_parm.checkpoint.megatron_names import core_name
from megatron_parm.checkpoint.pickle_values import Global, Instance, Maker, instances_of, read_pickle
from megatron_parm.checkpoint.tensor_files import TensorInfo
from megatron_parm.checkpoint.torch_files import DTYPES, StoredTensor, TorchFile, makers_of
from megatron_parm.checkpoint.whole_model import WholeModel
from megatron_parm.errors import CheckpointError, UntrustedCheckpointError

COMMON = "common.pt"
LARGEST_METADATA = 2_000_000_000  # bytes
_DCP = "torch.distributed.checkpoint"
_TENSOR, _BYTES = f"{_DCP}.metadata.TensorStorageMetadata", f"{_DCP}.metadata.BytesStorageMetadata"
_OPTIMIZER = re.compile(
    r"(optimizer|chained_\d+\.optimizer|rng_state|rerun_state_machine.*|opt_param_scheduler)(\W.*)?"
)
_STACKED = re.compile(r"(decoder|encoder)\.layers\.([a-z].+)")
_EXPERTS = re.compile(r"(.+\.mlp\.experts\.)experts\.(linear_fc[12])\.(weight|bias)")


@dataclass(frozen=True)
class Piece:
    """A box of a whole tensor and where its values are."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: TorchFile


@dataclass(frozen=True)
class Sharded:
    """A whole tensor in pieces."""

    info: TensorInfo
    pieces: tuple[Piece, ...]

    def read(self, name: str, first: tuple[int, ...] = ()) -> Tensor:
        """The part of it at the places `first` of its first dims; the whole without."""
        begin = (*first, *(0 for _ in self.info.shape[len(first) :]))
        size = (*(1 for _ in first), *self.info.shape[len(first) :])
        values = torch.empty(size, dtype=self.info.dtype)
        filled = 0
        for piece in self.pieces:
            low = [max(a, b) for a, b in zip(piece.offsets, begin, strict=True)]
            high = [min(a + s, b + t) for a, s, b, t in zip(piece.offsets, piece.shape, begin, size, strict=True)]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            held = piece.file.value({})
            if not isinstance(held, StoredTensor) or held.info != TensorInfo(piece.shape, self.info.dtype):
                raise CheckpointError(f"{piece.file.path} does not hold the piece of {name} that {METADATA} names")
            inside = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, piece.offsets, strict=True))
            target = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, begin, strict=True))
            part = held.read()[inside]
            values[target] = part
            filled += part.numel()
        if filled != values.numel():
            raise CheckpointError(f"{name}: the pieces hold {filled} of its {values.numel()} values")
        return values.reshape(self.info.shape[len(first) :])


@dataclass(frozen=True)
class _Place:
    """A tensor by its core name: a whole one, or one layer or expert of several stacked ones."""

    name: str
    first: tuple[int, ...]


class DistTensors:
    """The tensors of a model by core names."""

    def __init__(self, tensors: Mapping[str, Sharded]) -> None:
        self._tensors = tensors
        self._places: dict[str, _Place] = {}
        for name, sharded in tensors.items():
            for core, first in _unstacked(name, sharded.info.shape):
                if core in self._places:
                    raise CheckpointError(f"{METADATA}: {name} and {self._places[core].name} are both {core}")
                self._places[core] = _Place(name, first)

    @property
    def entries(self) -> Mapping[str, TensorInfo]:
        """All of them."""
        found = {}
        for core, place in self._places.items():
            info = self._tensors[place.name].info
            found[core] = TensorInfo(info.shape[len(place.first) :], info.dtype)
        return found

    def read(self, name: str) -> Tensor:
        """One of them."""
        place = self._places[name]
        return self._tensors[place.name].read(place.name, place.first)


def _unstacked(name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """The tensors that stand under one name, with their places in its first dims."""
    body = "encoder" if name.startswith("encoder.") else "decoder"
    stacked, experts = _STACKED.fullmatch(name), _EXPERTS.fullmatch(name)
    num_layers = shape[0] if stacked and shape else 1
    dims = 1 if stacked else 0
    if len(shape) < dims + (1 if experts else 0):
        raise CheckpointError(f"{METADATA}: {name} is {list(shape)}, which has no dim for its layers or experts")
    num_experts = shape[dims] if experts else 1
    if num_layers * num_experts > 10_000_000:
        raise CheckpointError(f"{METADATA}: {name} stands for {num_layers} x {num_experts} tensors")
    found = []
    for layer in range(num_layers):
        for expert in range(num_experts):
            one = name
            if experts:
                one = f"{experts[1]}local_experts.{expert}.{experts[2]}.{experts[3]}"
            if stacked:
                one = f"{body}.layers.{layer}.{one.split('.layers.', 1)[1]}"
            core = core_name(one, body)
            first = (*((layer,) if stacked else ()), *((expert,) if experts else ()))
            if core is not None:
                found.append((core, first))
    return found


def _sizes(value: object) -> tuple[int, ...]:
    if not isinstance(value, tuple) or not all(type(number) is int and number >= 0 for number in value):
        raise ValueError("sizes that are no counts")
    return value


def _dcp_makers() -> dict[str, Maker]:
    of_metadata = (
        "Metadata MetadataIndex TensorStorageMetadata BytesStorageMetadata TensorProperties ChunkStorageMetadata "
        "StorageMeta _MEM_FORMAT_ENCODING"
    )
    kinds = [f"{_DCP}.metadata.{name}" for name in of_metadata.split()]
    kinds += [f"{_DCP}.filesystem._StorageInfo", f"{_DCP}._extension.ExtensionRegistry", "torch.memory_format"]
    kinds += ["torch.serialization._get_layout", "pathlib.PosixPath", "pathlib._local.PosixPath"]
    kinds += ["megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata"]
    return instances_of(*kinds)


def _metadata(folder: Path) -> Instance:
    file = regular_file(folder / METADATA)
    if file.stat().st_size > LARGEST_METADATA:
        raise CheckpointError(f"{file} has more than {LARGEST_METADATA} bytes")
    data = file.read_bytes()
    found = read_pickle(io.BytesIO(data), makers_of(str(file), _dcp_makers()), str(file))
    if not isinstance(found, Instance) or not isinstance(found.get("state_dict_metadata"), dict):
        raise CheckpointError(f"{file} is no metadata of torch's distributed checkpoints")
    return found


def _pieces_of(storage: Mapping[Any, Any], folder: Path) -> dict[tuple[str, tuple[int, ...]], TorchFile]:
    """Where the values of each piece are, by its tensor and offsets."""
    found: dict[tuple[str, tuple[int, ...]], TorchFile] = {}
    checked: dict[str, Path] = {}
    for index, place in storage.items():
        offsets = index.get("offset")
        if offsets is None:
            continue
        if place.get("transform_descriptors"):
            raise CheckpointError(f"{folder / METADATA}: {index.get('fqn')} is compressed or encoded; that is not read")
        name, start, length = place.get("relative_path"), place.get("offset"), place.get("length")
        if not isinstance(name, str) or not all(type(number) is int and number >= 0 for number in (start, length)):
            raise ValueError("a piece without file, place or length")
        if name not in checked:
            checked[name] = plain_file(folder, name)
        found[str(index.get("fqn")), _sizes(offsets)] = TorchFile(checked[name], start, length)
    return found


def _tensors(metadata: Instance, folder: Path) -> tuple[dict[str, Sharded], int]:
    """The weights by their names there, and how many entries of bytes or of the optimizer were left out."""
    pieces = _pieces_of(metadata.get("storage_data") or {}, folder)
    found: dict[str, Sharded] = {}
    left_out = 0
    for name, entry in metadata.get("state_dict_metadata").items():
        if entry.kind == _BYTES or _OPTIMIZER.fullmatch(name):
            left_out += 1
            continue
        if entry.kind != _TENSOR:
            raise ValueError(f"{name} is a {entry.kind}")
        properties = entry.get("properties")
        dtype = properties.get("dtype") or _first(properties.state)
        if not isinstance(dtype, Global) or dtype.name not in DTYPES:
            raise CheckpointError(f"{folder / METADATA}: {name} has a type that is not known")
        shape, boxes = _sizes(entry.get("size")), []
        for chunk in entry.get("chunks"):
            offsets, sizes = _sizes(chunk.get("offsets")), _sizes(chunk.get("sizes"))
            is_inside = len(offsets) == len(sizes) == len(shape) and all(
                a + b <= c for a, b, c in zip(offsets, sizes, shape, strict=True)
            )
            if not is_inside or (name, offsets) not in pieces:
                raise CheckpointError(f"{folder / METADATA}: a piece of {name} at {list(offsets)} has no place")
            boxes.append(Piece(offsets, sizes, pieces[name, offsets]))
        found[name] = Sharded(TensorInfo(shape, DTYPES[dtype.name]), tuple(boxes))
    return found, left_out


def _first(state: object) -> object:
    """The type, of properties that say their fields as a tuple."""
    return state[0] if isinstance(state, tuple) and state else None


def read_dist(folder: Path) -> WholeModel:
    """The model in a torch_dist folder of one iteration. Raises CheckpointError, UntrustedCheckpointError."""
    if not (folder / COMMON).exists():
        raise CheckpointError(f"{folder} has {METADATA} but no {COMMON}: it is no torch_dist checkpoint of Megatron")
    metadata = _metadata(folder)
    try:
        tensors, left_out = _tensors(metadata, folder)
    except (CheckpointError, UntrustedCheckpointError):
        raise
    except (ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
        raise CheckpointError(f"{folder / METADATA} is damaged or of an unknown version ({error})") from None
    common = regular_file(folder / COMMON)
    state = TorchFile(common).value(MEGATRON_MAKERS)
    arguments = SavedArguments.of(state.get("args") if isinstance(state, dict) else None, str(common))
    prefix = "model." if all(name.startswith("model.") for name in tensors) else ""
    model = DistTensors({name.removeprefix(prefix): sharded for name, sharded in tensors.items()})
    notes = (f"{left_out} entries of the optimizer, random states and bytes are left unread",) if left_out else ()
    return whole_model(folder, model, arguments, notes)
