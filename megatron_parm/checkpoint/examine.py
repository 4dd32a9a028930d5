"""What a checkpoint folder holds, told to a person; two of them compared. Floor 6.

One process, without a model: everything comes from the manifest, the state and the files themselves.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_parm.checkpoint import paths
from megatron_parm.checkpoint.boxes import Box
from megatron_parm.checkpoint.find import find_checkpoint
from megatron_parm.checkpoint.manifest import DTYPES, Manifest, TensorEntry
from megatron_parm.checkpoint.storage import read_boxes
from megatron_parm.checkpoint.verify import VerifiedCheckpoint, VerifyLevel, state_of, verify_checkpoint
from megatron_parm.parallel.context import ParallelContext


def open_alone(path: Path, verify: VerifyLevel, ckpt_step: int | None = None) -> VerifiedCheckpoint:
    """The checkpoint at `path`: an `iter_0000100` folder, or the one that a folder of checkpoints names.

    Raises CheckpointError.
    """
    ctx = ParallelContext.single()
    if (path / paths.MANIFEST).exists():
        return verify_checkpoint(path, verify, ctx)
    return find_checkpoint(path, ctx, ckpt_step=ckpt_step, verify=verify)


def summary(checkpoint: VerifiedCheckpoint) -> Iterator[str]:
    """Lines on the whole: iteration, layout, versions, sizes, progress."""
    manifest, state = checkpoint.manifest, state_of(checkpoint.path, checkpoint.manifest)
    yield f"{checkpoint.path}: iteration {manifest.iteration}, save {manifest.save_id}"
    yield "layout: " + ", ".join(f"{name} {size}" for name, size in manifest.layout.items())
    yield "written by: " + ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    for prefix, entries in _by_prefix(manifest).items():
        numbers = sum(prod(entry.shape) for entry in entries)
        size = sum(prod(entry.shape) * DTYPES[entry.dtype].itemsize for entry in entries)
        kinds = ", ".join(sorted({entry.dtype for entry in entries}))
        yield f"{prefix}: {len(entries)} tensors, {numbers:,} numbers, {size:,} bytes, {kinds}"
    progress = state.get("progress")
    if isinstance(progress, dict):
        yield "progress: " + ", ".join(f"{name} {value}" for name, value in progress.items())
    yield f"{len(manifest.files)} files, {manifest.total_bytes:,} bytes"


def _by_prefix(manifest: Manifest) -> dict[str, list[TensorEntry]]:
    found: dict[str, list[TensorEntry]] = {}
    for name, entry in {**manifest.tensors, **manifest.rank_tensors}.items():
        parts = name.split(".")
        prefix = parts[0] if parts[0] != "optimizer" else ".".join(parts[:2])
        found.setdefault("random states" if name.startswith("rank_") else prefix, []).append(entry)
    return found


def file_lines(checkpoint: VerifiedCheckpoint) -> Iterator[str]:
    """A line for each file: its hash, size and name."""
    for name, entry in sorted(checkpoint.manifest.files.items()):
        yield f"{entry.sha256}  {entry.bytes:>14,}  {name}"


def tensor_lines(checkpoint: VerifiedCheckpoint, matching: str) -> Iterator[str]:
    """A line for each tensor whose name contains `matching`: shape, dtype and in how many files it lies."""
    for name, entry in sorted({**checkpoint.manifest.tensors, **checkpoint.manifest.rank_tensors}.items()):
        if matching in name:
            files = {part.file for part in entry.parts}
            yield f"{name}  {entry}  in {len(files)} file{'s' if len(files) > 1 else ''}"


@dataclass(frozen=True)
class Difference:
    """What differs between two checkpoints; all empty if nothing does. A line each."""

    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    shapes: tuple[str, ...]
    values: tuple[str, ...]
    settings: tuple[str, ...]

    @property
    def is_of_tensors(self) -> bool:
        """Whether a name, a shape or a value differs."""
        return bool(self.only_first or self.only_second or self.shapes or self.values)


def compare(first: VerifiedCheckpoint, second: VerifiedCheckpoint) -> Difference:
    """Compare the tensors of two checkpoints of any layouts, bit by bit, and the settings; random states are left out.

    Holds two tensors in memory at a time.
    """
    ours, theirs = first.manifest.tensors, second.manifest.tensors
    shapes, values = [], []
    for name in sorted(ours.keys() & theirs.keys()):
        if (ours[name].shape, ours[name].dtype) != (theirs[name].shape, theirs[name].dtype):
            shapes.append(f"{name}: {ours[name]} and {theirs[name]}")
            continue
        mine, other = _whole(first, name), _whole(second, name)
        if not torch.equal(mine.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)):
            differing = int((mine != other).sum())
            largest = (mine.double() - other.double()).abs().max().item()
            values.append(f"{name}: {differing:,} of {mine.numel():,} numbers differ, by {largest:.3g} at most")
    configs = [state_of(one.path, one.manifest).get("config") for one in (first, second)]
    return Difference(
        only_first=tuple(sorted(ours.keys() - theirs.keys())),
        only_second=tuple(sorted(theirs.keys() - ours.keys())),
        shapes=tuple(shapes),
        values=tuple(values),
        settings=tuple(_differing_settings(*configs)),
    )


def _whole(checkpoint: VerifiedCheckpoint, name: str) -> Tensor:
    entry = checkpoint.manifest.tensors[name]
    values = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    read_boxes(checkpoint.path, {name: Box.whole(values)}, checkpoint.manifest.tensors)
    return values


def _differing_settings(first: Any, second: Any) -> Iterator[str]:
    if not isinstance(first, dict) or not isinstance(second, dict):
        return
    for name in sorted(first.keys() | second.keys()):
        if first.get(name) != second.get(name):
            yield f"{name}: {first.get(name)} and {second.get(name)}"
