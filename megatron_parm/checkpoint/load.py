"""Loads a verified checkpoint into the tensors of a model, on any layout. Floor 6."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_parm.checkpoint.boxes import Box
from megatron_parm.checkpoint.manifest import DTYPES, TensorEntry
from megatron_parm.checkpoint.save import layout_of, rank_prefix
from megatron_parm.checkpoint.storage import read_boxes
from megatron_parm.checkpoint.verify import VerifiedCheckpoint, state_of
from megatron_parm.errors import CheckpointError
from megatron_parm.parallel.agreement import on_every_rank
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.sharding import ShardSpec

SHOWN = 12  # differing tensors listed in a message; it shall fit on a screen


@dataclass(frozen=True)
class LoadReport:
    """What a partial load left out: `missing` tensors kept their values, `unexpected` ones were not read."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def read_state(checkpoint: VerifiedCheckpoint, ctx: ParallelContext) -> dict[str, Any]:
    """The JSON state that was saved. Its hash is always checked. Call on all ranks."""
    states: list[dict[str, Any]] = []

    def read() -> str:
        states.append(state_of(checkpoint.path, checkpoint.manifest))
        return ""

    on_every_rank(ctx.world, f"reading {checkpoint.path}", read)
    return states[0]


def has_same_layout(checkpoint: VerifiedCheckpoint, ctx: ParallelContext) -> bool:
    """Whether it was saved on the layout of `ctx`: only then can rank-local tensors be loaded."""
    return dict(checkpoint.manifest.layout) == layout_of(ctx)


def load_tensors(
    checkpoint: VerifiedCheckpoint,
    tensors: Mapping[str, tuple[Tensor, ShardSpec]],
    ctx: ParallelContext,
    *,
    ignored_prefixes: Sequence[str] = (),
    partial: bool = False,
    convert: bool = False,
    padded: Collection[str] = (),
) -> LoadReport:
    """Fill this rank's boxes in place from a checkpoint of any layout. Call on all ranks.

    Names, global shapes and dtypes must be those of the checkpoint, else CheckpointError on all ranks with a table of
    the differences, before anything is changed. `ignored_prefixes`: names of the checkpoint that are not wanted (the
    optimizer's, for sampling). `partial` allows missing and unexpected names and reports them. `convert` allows
    another dtype. Those in `padded` may have another number of rows: rows that the checkpoint lacks keep their values,
    rows that it has in excess are left out.
    """
    saved = checkpoint.manifest.tensors
    differing = {
        name: (saved[name], TensorEntry(spec.global_shape, _dtype_name(local), ()))
        for name, (local, spec) in tensors.items()
        if name in saved and not _fits(saved[name], local, spec, convert=convert, is_padded=name in padded)
    }
    mine = {
        "missing": sorted(name for name in tensors if name not in saved),
        "differing": [
            f"{name}: checkpoint {theirs}, model {ours}" for name, (theirs, ours) in sorted(differing.items())
        ],
    }
    asked = on_every_rank(ctx.pp, "comparing names", lambda: json.dumps(sorted(tensors)))  # stages hold different ones
    known = {name for text in asked for name in json.loads(text)}
    unexpected = sorted(name for name in saved if name not in known and not name.startswith(tuple(ignored_prefixes)))
    texts = [json.loads(text) for text in on_every_rank(ctx.world, "comparing names", lambda: json.dumps(mine))]
    missing = sorted({name for text in texts for name in text["missing"]})
    mismatched = sorted({line for text in texts for line in text["differing"]})
    if mismatched or (not partial and (missing or unexpected)):
        absent = [f"{name} {saved[name]}" for name in unexpected]
        raise CheckpointError(_difference(checkpoint.path, mismatched, missing, absent))
    boxes = {name: Box.of(local, spec) for name, (local, spec) in tensors.items() if name in saved}
    _read(checkpoint.path, boxes, saved, ctx)
    return LoadReport(tuple(missing), tuple(unexpected))


def load_rank_tensors(checkpoint: VerifiedCheckpoint, names: Sequence[str], ctx: ParallelContext) -> dict[str, Tensor]:
    """The rank-local tensors of this rank, on the CPU. Call on all ranks.

    Raises CheckpointError if a name is missing or if the checkpoint was saved on another layout: then these states
    belong to no rank of this run (ask `has_same_layout` before).
    """
    if not has_same_layout(checkpoint, ctx):
        raise CheckpointError(
            f"{checkpoint.path} was saved on the layout {dict(checkpoint.manifest.layout)}, this run has "
            f"{layout_of(ctx)}: the random states of its ranks fit no rank here"
        )
    saved = checkpoint.manifest.rank_tensors
    prefix = rank_prefix(ctx.world.rank)

    def check() -> str:
        missing = [name for name in names if prefix + name not in saved]
        if missing:
            raise CheckpointError(f"{checkpoint.path} has no {', '.join(missing)} for rank {ctx.world.rank}")
        return ""

    on_every_rank(ctx.world, f"reading {checkpoint.path}", check)
    values = {name: torch.empty(saved[prefix + name].shape, dtype=DTYPES[saved[prefix + name].dtype]) for name in names}
    _read(checkpoint.path, {prefix + name: Box.whole(value) for name, value in values.items()}, saved, ctx)
    return values


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _fits(entry: TensorEntry, local: Tensor, spec: ShardSpec, *, convert: bool, is_padded: bool) -> bool:
    first = 1 if is_padded else 0  # dim that must agree
    same_shape = len(entry.shape) == len(spec.global_shape) and entry.shape[first:] == spec.global_shape[first:]
    return same_shape and (convert or entry.dtype == _dtype_name(local))


def _difference(path: Path, mismatched: list[str], missing: list[str], unexpected: list[str]) -> str:
    lines = [f"{path} does not fit this model; use the model flags it was saved with"]
    for title, names in (
        ("of another shape or dtype", mismatched),
        ("in the model, not in the checkpoint", missing),
        ("in the checkpoint, not in the model", unexpected),
    ):
        if names:
            lines += [f"{title} ({len(names)}):", *(f"  {name}" for name in names[:SHOWN])]
            lines += [f"  and {len(names) - SHOWN} more"] if len(names) > SHOWN else []
    return "\n".join(lines)


def _read(path: Path, boxes: Mapping[str, Box], saved: Mapping[str, TensorEntry], ctx: ParallelContext) -> None:
    def read() -> str:
        read_boxes(path, boxes, saved)
        return ""

    on_every_rank(ctx.world, f"reading {path}", read)
