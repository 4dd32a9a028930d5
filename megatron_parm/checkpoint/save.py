"""Saves a checkpoint: all of it or nothing, seen the same way by all ranks. Floor 6.

Order: agree and count the room; every rank writes its shard into a temporary folder; rank 0 writes the state and, last,
the manifest with every hash; rename; tracker file. A process killed anywhere leaves the older checkpoints untouched and
a temporary folder that the next save removes.
"""

import errno
import hashlib
import json
import os
import time
import uuid
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

import megatron_parm
from megatron_parm.checkpoint import paths
from megatron_parm.checkpoint.agreement import CheckpointStorageError, on_every_rank, on_first_rank
from megatron_parm.checkpoint.boxes import Box, BoxSavePlanner
from megatron_parm.checkpoint.manifest import DTYPES, FileEntry, Json, Manifest, fingerprint, manifest_text
from megatron_parm.checkpoint.storage import ShardWriter
from megatron_parm.errors import CheckpointError
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.sharding import ShardSpec

FREE_SHARE = 0.9  # of the free bytes a checkpoint may take; the rest is for logs and for what others write meanwhile
OVERHEAD_BYTES = 64 * 1024  # headers of the shards, the state and the manifest, on top of the tensors
OUT_OF_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class SaveReport:
    """A finished save. `bytes` are those of all files of all ranks; `notes` are lines to log."""

    path: Path
    bytes: int
    seconds: float
    notes: tuple[str, ...]


def rank_prefix(rank: int) -> str:
    """What the names of the rank-local tensors of `rank` begin with."""
    return f"rank_{rank:05d}."


def layout_of(ctx: ParallelContext) -> dict[str, int]:
    """The sizes of the axes, as a manifest records them."""
    return {"world": ctx.world.size} | {name: ctx.grid.size(name) for name in ("pp", "dp", "tp", "edp", "ep", "esp")}


def save_checkpoint(
    root: Path,
    iteration: int,
    tensors: Mapping[str, tuple[Tensor, ShardSpec]],
    rank_tensors: Mapping[str, Tensor],
    state: Mapping[str, Json],
    ctx: ParallelContext,
) -> SaveReport:
    """Save `root/iter_0000100` and point the tracker file to it. Call on all ranks.

    `tensors` maps global names to this rank's box; ranks of a pipeline may give different names. `rank_tensors` belong
    to this rank alone (random states). `state` must be the same on all ranks. A folder of the same iteration is
    replaced, never mixed. Raises CheckpointStorageError (exit code 1) on all ranks if the disk refuses on one, and
    leaves nothing.
    """
    started = time.monotonic()
    boxes = _boxes(tensors, rank_tensors, ctx)
    doing = f"saving {root / paths.folder_name(iteration)}"
    offers = on_every_rank(ctx.world, doing, lambda: _offer(root, iteration, boxes, tensors, state, ctx))
    needed = _check_offers([json.loads(offer) for offer in offers], root)
    opened = json.loads(on_first_rank(ctx.world, doing, lambda: _open_temporary(root, iteration)))
    temporary, save_id = root / opened["folder"], opened["save_id"]
    writer, planner = ShardWriter(temporary), BoxSavePlanner(boxes)

    def write_shard() -> str:
        return _explained(lambda: _write_shard(writer, planner, boxes, ctx), temporary, needed)

    def complete() -> str:
        files = {name: FileEntry(*entry) for text in written for name, entry in json.loads(text).items()}
        return _explained(
            lambda: _complete(temporary, iteration, save_id, planner, files, state, ctx), temporary, needed
        )

    def publish() -> str:
        paths.publish(temporary, root, iteration, save_id)
        return ""

    try:
        written = on_every_rank(ctx.world, doing, write_shard)
        total = int(on_first_rank(ctx.world, doing, complete))
        on_first_rank(ctx.world, doing, publish)
    except CheckpointError:  # the same on all ranks, so all come here
        on_first_rank(ctx.world, f"removing {temporary}", lambda: _discard(temporary))
        raise
    seconds = time.monotonic() - started
    return SaveReport(root / paths.folder_name(iteration), total, seconds, tuple(opened["notes"]))


def _boxes(
    tensors: Mapping[str, tuple[Tensor, ShardSpec]], rank_tensors: Mapping[str, Tensor], ctx: ParallelContext
) -> dict[str, Box]:
    prefix = rank_prefix(ctx.world.rank)
    boxes = {name: Box.of(local, spec) for name, (local, spec) in tensors.items()}
    return boxes | {prefix + name: Box.whole(local) for name, local in rank_tensors.items()}


def _offer(
    root: Path,
    iteration: int,
    boxes: Mapping[str, Box],
    tensors: Mapping[str, tuple[Tensor, ShardSpec]],
    state: Mapping[str, Json],
    ctx: ParallelContext,
) -> str:
    """What this rank wants to save and the room it sees; raises for what cannot be saved."""
    for name, box in boxes.items():
        if str(box.local.dtype).removeprefix("torch.") not in DTYPES:
            raise ValueError(f"{name} has dtype {box.local.dtype}, which safetensors cannot hold")
    for name, (local, spec) in tensors.items():
        if name.startswith("rank_"):
            raise ValueError(f"{name}: names that begin with rank_ are kept for rank-local tensors")
        if tuple(local.shape) != spec.local_shape:
            raise ValueError(f"{name} has shape {tuple(local.shape)}, its spec says {spec.local_shape}")
    counted = sum(box.local.nbytes for name, box in boxes.items() if name not in tensors) + sum(
        local.nbytes for local, spec in tensors.values() if spec.is_counted_here(ctx)
    )
    return json.dumps(
        {
            "iteration": iteration,
            "state": {key: fingerprint(value) for key, value in state.items()},
            "stage": ctx.pp.rank,
            "tensors": fingerprint(
                {name: [*spec.global_shape, str(local.dtype)] for name, (local, spec) in tensors.items()}
            ),
            "bytes": counted,
            "free": _free_bytes(root),
        }
    )


def _free_bytes(folder: Path) -> int:
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    status = os.statvfs(existing)
    return status.f_bavail * status.f_frsize


def _check_offers(offers: list[dict[str, Json]], root: Path) -> int:
    """The bytes needed. Every rank has the same offers, so all raise or none."""
    _check_agreement(offers)
    needed = sum(_number(offer["bytes"]) for offer in offers) + OVERHEAD_BYTES
    for rank, offer in enumerate(offers):
        free = _number(offer["free"])
        if needed > free * FREE_SHARE:
            raise CheckpointStorageError(
                f"No space left for a checkpoint in {root}: it needs {needed} bytes, rank {rank} sees {free} free, of "
                f"which {1 - FREE_SHARE:.0%} stay unused. Nothing was written; make room or choose another --save"
            )
    return needed


def _check_agreement(offers: list[dict[str, Json]]) -> None:
    first = offers[0]
    stages: dict[Json, tuple[int, Json]] = {}
    for rank, offer in enumerate(offers):
        if offer["iteration"] != first["iteration"]:
            told = f"iteration {offer['iteration']}, rank 0 iteration {first['iteration']}"
            raise CheckpointStorageError(f"rank {rank} wants to save {told}")
        mine, other = first["state"], offer["state"]
        assert isinstance(mine, dict) and isinstance(other, dict)
        differing = sorted(key for key in mine.keys() | other.keys() if mine.get(key) != other.get(key))
        if differing:
            raise CheckpointStorageError(f"rank {rank} wants to save another state than rank 0: {', '.join(differing)}")
        peer, tensors = stages.setdefault(offer["stage"], (rank, offer["tensors"]))
        if tensors != offer["tensors"]:
            raise CheckpointStorageError(
                f"ranks {peer} and {rank} of one pipeline stage want to save tensors of other names, shapes or dtypes"
            )


def _number(value: Json) -> int:
    assert isinstance(value, int)
    return value


def _open_temporary(root: Path, iteration: int) -> str:
    root.mkdir(parents=True, exist_ok=True)
    notes = paths.repair(root) + paths.remove_leftovers(root)
    save_id = uuid.uuid4().hex[:16]
    temporary = root / f"{paths.folder_name(iteration)}.tmp-{save_id}"
    temporary.mkdir()
    return json.dumps({"folder": temporary.name, "save_id": save_id, "notes": notes})


def _write_shard(writer: ShardWriter, planner: BoxSavePlanner, boxes: Mapping[str, Box], ctx: ParallelContext) -> str:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is a case of its own
        dcp.save(
            {name: box.local for name, box in boxes.items()},
            storage_writer=writer,
            planner=planner,
            process_group=ctx.world.group,
            no_dist=ctx.world.size == 1,
        )
    return json.dumps({name: (entry.bytes, entry.sha256) for name, entry in writer.written.items()})


def _complete(
    temporary: Path,
    iteration: int,
    save_id: str,
    planner: BoxSavePlanner,
    files: dict[str, FileEntry],
    state: Mapping[str, Json],
    ctx: ParallelContext,
) -> str:
    """Write the state and the manifest. Returns the bytes of all files."""
    _write_state(temporary, state, files)
    for name, entry in files.items():
        found = (temporary / name).stat().st_size
        if found != entry.bytes:
            raise OSError(errno.EIO, f"{entry.bytes} bytes were written, {found} are there", str(temporary / name))
    parts = planner.parts()
    manifest = Manifest(
        iteration=iteration,
        save_id=save_id,
        layout=layout_of(ctx),
        versions={
            "megatron_parm": megatron_parm.__version__,
            "torch": str(torch.__version__),
            "safetensors": safetensors.__version__,
        },
        tensors={name: entry for name, entry in parts.items() if not name.startswith("rank_")},
        rank_tensors={name: entry for name, entry in parts.items() if name.startswith("rank_")},
        files=files,
    )
    _write_manifest(temporary, manifest)
    return str(manifest.total_bytes)


def _write_state(temporary: Path, state: Mapping[str, Json], files: dict[str, FileEntry]) -> None:
    text = json.dumps(dict(state), indent=1) + "\n"
    paths.write_durably(temporary / paths.STATE, text.encode())
    files[paths.STATE] = FileEntry(len(text.encode()), hashlib.sha256(text.encode()).hexdigest())


def _write_manifest(temporary: Path, manifest: Manifest) -> None:
    paths.write_durably(temporary / paths.MANIFEST, manifest_text(manifest).encode())
    paths.sync_folder(temporary)


def _discard(temporary: Path) -> str:
    if temporary.exists():  # else it was renamed: what is left to do, the next start or save will finish
        (temporary.parent / paths.PENDING_TRACKER).unlink(missing_ok=True)
        paths.delete(temporary)
    return ""


def _explained(action: Callable[[], str], folder: Path, needed: int) -> str:
    """Run `action`; a disk that is full gets to say how much was needed and how much is free."""
    try:
        return action()
    except CheckpointException as error:
        full = {rank: found for rank, (found, _) in sorted(error.failures.items()) if _is_full(found)}
        if not full:
            raise
        rank = min(full)
        raise CheckpointStorageError(f"rank {rank}: {_no_space(full[rank], folder, needed)}") from None
    except OSError as error:
        if not _is_full(error):
            raise
        raise CheckpointStorageError(_no_space(error, folder, needed)) from None


def _is_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in OUT_OF_ROOM


def _no_space(error: BaseException, folder: Path, needed: int) -> str:
    return (
        f"No space left: {error}; the checkpoint needs {needed} bytes, {_free_bytes(folder)} are free in "
        f"{folder.parent} (a quota or a limit on file sizes may be lower). The older checkpoints are untouched; make "
        "room and start again"
    )
