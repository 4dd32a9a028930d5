"""The manifest of a checkpoint: which files it has, their hashes, and where each part of each tensor lies. Floor 6.

Written last, so a folder without one is not a checkpoint. It carries its own hash: a flipped bit in it is found too.
The loader takes shapes, dtypes and file names from here, not from what the shard files say. Nothing here touches the
disk.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias, TypeVar

import torch

from megatron_parm.checkpoint.paths import STATE, is_plain
from megatron_parm.errors import CheckpointError, UntrustedCheckpointError

Json: TypeAlias = "Mapping[str, Json] | Sequence[Json] | str | int | float | bool | None"

T = TypeVar("T")

FORMAT_VERSION = 1
SELF_HASH = "manifest_sha256"

# what safetensors can hold
DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


@dataclass(frozen=True)
class FileEntry:
    """Size and SHA-256 of one file of the checkpoint."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Part:
    """A box of a tensor and the file that holds it."""

    file: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorEntry:
    """Global shape, dtype name and the parts that make up a tensor."""

    shape: tuple[int, ...]
    dtype: str
    parts: tuple[Part, ...]

    def __str__(self) -> str:
        return f"{list(self.shape)} {self.dtype}"


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds. `layout` are the sizes of the axes it was saved on, `versions` what wrote it.

    `rank_tensors` belong to one rank of that layout each; their names begin with `rank_00003.`.
    """

    iteration: int
    save_id: str
    layout: Mapping[str, int]
    versions: Mapping[str, str]
    tensors: Mapping[str, TensorEntry]
    rank_tensors: Mapping[str, TensorEntry]
    files: Mapping[str, FileEntry]

    @property
    def total_bytes(self) -> int:
        """Bytes of all files, without the manifest."""
        return sum(entry.bytes for entry in self.files.values())


def fingerprint(value: Json) -> str:
    """SHA-256 of the canonical JSON form of `value`."""
    return hashlib.sha256(_canonical(value).encode()).hexdigest()


def _canonical(value: Json) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _as_json(manifest: Manifest) -> dict[str, Json]:
    def table(tensors: Mapping[str, TensorEntry]) -> dict[str, Json]:
        return {
            name: {
                "shape": list(entry.shape),
                "dtype": entry.dtype,
                "parts": [[part.file, list(part.offsets), list(part.shape)] for part in entry.parts],
            }
            for name, entry in tensors.items()
        }

    return {
        "format_version": FORMAT_VERSION,
        "iteration": manifest.iteration,
        "save_id": manifest.save_id,
        "layout": dict(manifest.layout),
        "versions": dict(manifest.versions),
        "tensors": table(manifest.tensors),
        "rank_tensors": table(manifest.rank_tensors),
        "files": {name: {"bytes": entry.bytes, "sha256": entry.sha256} for name, entry in manifest.files.items()},
    }


def manifest_text(manifest: Manifest) -> str:
    """The manifest as JSON, one file or tensor a line, with its own hash at the end."""
    content = _as_json(manifest)
    lines = []
    for key, value in (content | {SELF_HASH: fingerprint(content)}).items():
        if isinstance(value, dict) and key in ("tensors", "rank_tensors", "files"):
            entries = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in sorted(value.items()))
            lines.append(f" {json.dumps(key)}: {{\n{entries}\n }}" if entries else f" {json.dumps(key)}: {{}}")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def parse_manifest(data: bytes, where: str) -> Manifest:
    """The manifest of `manifest_text`. `where` is its path, for messages.

    Raises CheckpointError if it is damaged or of a newer format, UntrustedCheckpointError for a file name that leads
    out of the folder.
    """
    try:
        content: Any = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is damaged: it is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{where} is damaged: it is not a JSON object")
    _check_version(content, where)
    _check_names(content, where)
    expected = content.pop(SELF_HASH, None)
    found = fingerprint(content)
    if expected != found:
        raise CheckpointError(f"{where} is damaged: its content has the hash {found}, it says {expected}")
    try:
        manifest = Manifest(
            iteration=_of_type(int, content["iteration"]),
            save_id=_of_type(str, content["save_id"]),
            layout={name: _of_type(int, size) for name, size in content["layout"].items()},
            versions={name: _of_type(str, version) for name, version in content["versions"].items()},
            tensors=_parse_table(content["tensors"]),
            rank_tensors=_parse_table(content["rank_tensors"]),
            files={
                name: FileEntry(_of_type(int, entry["bytes"]), _of_type(str, entry["sha256"]))
                for name, entry in content["files"].items()
            },
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{where} is not a manifest of this program: {type(error).__name__} {error}") from None
    _check_parts(manifest, where)
    return manifest


def _check_version(content: Mapping[str, Any], where: str) -> None:
    version = content.get("format_version")
    if type(version) is not int or version < 1:
        raise CheckpointError(f"{where} is damaged: format_version is {version!r}, it must be a number from 1")
    if version > FORMAT_VERSION:
        versions = content.get("versions")
        writer = versions.get("megatron_parm") if isinstance(versions, dict) else None
        raise CheckpointError(
            f"{where} has checkpoint format {version}; this program reads formats up to {FORMAT_VERSION}. "
            f"Install megatron_parm {writer or 'of the version that wrote it'} or newer"
        )


def _check_names(content: Mapping[str, Any], where: str) -> None:
    files = content.get("files")
    for name in files if isinstance(files, dict) else ():
        if not is_plain(name):
            raise UntrustedCheckpointError(
                f"{where} names the file {name!r}, which could lead out of its folder; file names may have letters, "
                "digits and ._- only. Nothing was read from it; do not use this checkpoint"
            )


def _parse_table(table: Mapping[str, Any]) -> dict[str, TensorEntry]:
    return {
        name: TensorEntry(
            _sizes(entry["shape"]),
            _of_type(str, entry["dtype"]),
            tuple(Part(_of_type(str, file), _sizes(offsets), _sizes(shape)) for file, offsets, shape in entry["parts"]),
        )
        for name, entry in table.items()
    }


def _of_type(kind: type[T], value: object) -> T:
    if type(value) is not kind:  # not isinstance: True is no number here
        raise TypeError(f"{value!r} is not {kind.__name__}")
    return value


def _sizes(value: object) -> tuple[int, ...]:
    return tuple(_of_type(int, size) for size in _of_type(list, value))


def _check_parts(manifest: Manifest, where: str) -> None:
    """Every part lies inside its tensor and in a listed file, and together they fill the tensor."""
    if STATE not in manifest.files:
        raise CheckpointError(f"{where} is damaged: it does not list {STATE}")
    for name, entry in (*manifest.tensors.items(), *manifest.rank_tensors.items()):
        known = all(part.file in manifest.files for part in entry.parts) and entry.dtype in DTYPES
        inside = all(
            len(part.offsets) == len(part.shape) == len(entry.shape)
            and all(
                0 <= start <= start + size <= end
                for start, size, end in zip(part.offsets, part.shape, entry.shape, strict=True)
            )
            for part in entry.parts
        )
        if not known or not inside or sum(prod(part.shape) for part in entry.parts) != prod(entry.shape):
            raise CheckpointError(f"{where} is damaged: its parts do not make up the tensor {name} {entry}")
