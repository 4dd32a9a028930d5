"""Saves a checkpoint: all of it or nothing, seen the same way by all ranks. Floor 6.

Order: agree and count the room; every rank writes its shard into a temporary folder; rank 0 writes the state and, last,
the manifest with every hash; rename; tracker file. A process killed anywhere leaves the older checkpoints untouched and
a temporary folder that the next save removes. Only the writing of shards may run beside training (`background.py`): it
sends nothing to other ranks.
"""

import errno
import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

import megatron_parm
from megatron_parm.checkpoint import paths
from megatron_parm.checkpoint.boxes import Box, Held, entries, share_out, values_of
from megatron_parm.checkpoint.manifest import (
    DTYPES,
    FileEntry,
    Json,
    Manifest,
    fingerprint,
    manifest_text,
    parse_manifest,
)
from megatron_parm.checkpoint.storage import HostCopies, Stored, write_shard
from megatron_parm.errors import CheckpointError, CheckpointStorageError
from megatron_parm.parallel.agreement import on_every_rank, on_first_rank
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


class SaveUnderway:
    """A save that has begun. In order: `write`, once and in any thread, then `finish` on all ranks.

    `stored` are the pieces that this rank writes, `started` is when the save began. Made by `begin_save`.
    """

    def __init__(
        self,
        temporary: Path,
        manifest: Manifest,
        stored: Mapping[str, Stored],
        state: Mapping[str, Json],
        ctx: ParallelContext,
        notes: tuple[str, ...],
        needed: int,
        started: float,
    ) -> None:
        self.temporary = temporary
        self.iteration = manifest.iteration
        self.notes = notes
        self._manifest = manifest
        self._stored: Mapping[str, Stored] | None = stored
        self._state = state
        self._ctx = ctx
        self._needed = needed
        self._started = started
        self._written: FileEntry | None = None
        self._problem: Exception | None = None

    @property
    def _doing(self) -> str:
        return f"saving {self.temporary.parent / paths.folder_name(self.iteration)}"

    def take_copies(self, memory: HostCopies) -> None:
        """Copy the values to be written into the host's memory, so that training may change the tensors."""
        assert self._stored is not None, "written already"
        self._stored = memory.of(self._stored)

    def write(self) -> None:
        """Write this rank's file. Sends nothing to other ranks; what goes wrong is told by `finish`."""
        assert self._stored is not None, "written already"
        try:
            if self._stored:
                file = self.temporary / paths.shard_name(self._ctx.world.rank)
                self._written = write_shard(file, self._stored)
        except Exception as error:  # kept: this may run in a thread of its own, `finish` raises it on all ranks
            self._problem = error
        self._stored = None

    def finish(self) -> SaveReport:
        """Write the manifest and give the folder its name, or on any rank's failure remove it. Call on all ranks."""
        assert self._stored is None, "not written yet"
        world, root = self._ctx.world, self.temporary.parent
        try:
            written = on_every_rank(world, self._doing, lambda: _explained(self._tell_written, root, self._needed))
            files = {name: FileEntry(*entry) for text in written for name, entry in json.loads(text).items()}
            manifest = replace(self._manifest, files=files)
            total = on_first_rank(
                world,
                self._doing,
                lambda: _explained(
                    lambda: _complete(self.temporary, manifest, self._state),
                    root,
                    self._needed,
                ),
            )
            on_first_rank(world, self._doing, lambda: self._publish(root))
        except CheckpointError:  # the same on all ranks, so all come here
            on_first_rank(world, f"removing {self.temporary}", lambda: _discard(self.temporary))
            raise
        seconds = time.monotonic() - self._started
        return SaveReport(root / paths.folder_name(self.iteration), int(total), seconds, self.notes)

    def _tell_written(self) -> str:
        if self._problem is not None:
            raise self._problem
        name = paths.shard_name(self._ctx.world.rank)
        entry = self._written
        return json.dumps({} if entry is None else {name: (entry.bytes, entry.sha256)})

    def _publish(self, root: Path) -> str:
        paths.publish(self.temporary, root, self.iteration, self._manifest.save_id)
        return ""


def save_checkpoint(
    root: Path,
    iteration: int,
    tensors: Mapping[str, tuple[Tensor, ShardSpec]],
    rank_tensors: Mapping[str, Tensor],
    state: Mapping[str, Json],
    ctx: ParallelContext,
) -> SaveReport:
    """Save `root/iter_0000100` and point the tracker file to it. Call on all ranks; see `begin_save`."""
    underway = begin_save(root, iteration, tensors, rank_tensors, state, ctx)
    underway.write()
    return underway.finish()


def begin_save(
    root: Path,
    iteration: int,
    tensors: Mapping[str, tuple[Tensor, ShardSpec]],
    rank_tensors: Mapping[str, Tensor],
    state: Mapping[str, Json],
    ctx: ParallelContext,
) -> SaveUnderway:
    """Agree on a save and open its temporary folder. Call on all ranks.

    `tensors` maps global names to this rank's box; ranks of a pipeline may give different names. `rank_tensors` belong
    to this rank alone (random states). `state` must be the same on all ranks. A folder of the same iteration is
    replaced, never mixed. Raises CheckpointStorageError (exit code 1) on all ranks if the disk refuses on one, and
    leaves nothing; so does `finish`.
    """
    started = time.monotonic()
    boxes = _boxes(tensors, rank_tensors, ctx)
    doing = f"saving {root / paths.folder_name(iteration)}"
    texts = on_every_rank(ctx.world, doing, lambda: _offer(root, iteration, boxes, tensors, state, ctx))
    offers = [json.loads(offer) for offer in texts]
    _check_agreement(offers)
    held = [[Held(name, dtype, *map(tuple, sizes)) for name, dtype, *sizes in offer["held"]] for offer in offers]
    try:
        shares = share_out(held)
    except ValueError as error:  # on all ranks alike: they share the same list
        raise CheckpointStorageError(f"{doing} failed: {error}") from None
    needed = _check_room(offers, shares, root)
    opened = json.loads(on_first_rank(ctx.world, doing, lambda: _open_temporary(root, iteration)))
    temporary = root / opened["folder"]
    try:
        on_every_rank(ctx.world, doing, lambda: _expect_shared(temporary))
    except CheckpointError:
        on_first_rank(ctx.world, f"removing {temporary}", lambda: _discard(temporary))
        raise
    stored = {p.name: Stored(values_of(p, boxes[p.name]), p.offsets) for p in shares[ctx.world.rank]}
    parts = entries(shares)
    manifest = Manifest(
        iteration=iteration,
        save_id=opened["save_id"],
        layout=layout_of(ctx),
        versions={
            "megatron_parm": megatron_parm.__version__,
            "torch": str(torch.__version__),
            "safetensors": safetensors.__version__,
        },
        tensors={name: entry for name, entry in parts.items() if not name.startswith("rank_")},
        rank_tensors={name: entry for name, entry in parts.items() if name.startswith("rank_")},
        files={},
    )
    return SaveUnderway(temporary, manifest, stored, state, ctx, tuple(opened["notes"]), needed, started)


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
    held = [Held.of(name, box) for name, box in boxes.items()]
    return json.dumps(
        {
            "iteration": iteration,
            "state": {key: fingerprint(value) for key, value in state.items()},
            "stage": ctx.pp.rank,
            "tensors": fingerprint(
                {name: [*spec.global_shape, str(local.dtype)] for name, (local, spec) in tensors.items()}
            ),
            "held": [(one.name, one.dtype, one.global_shape, one.offsets, one.shape) for one in held],
            "free": _free_bytes(root),
        }
    )


def _free_bytes(folder: Path) -> int:
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    status = os.statvfs(existing)
    return status.f_bavail * status.f_frsize


def _check_room(offers: list[dict[str, Any]], shares: Sequence[Sequence[Held]], root: Path) -> int:
    """The bytes needed. Every rank has the same offers, so all raise or none."""
    needed = sum(piece.bytes for share in shares for piece in share) + OVERHEAD_BYTES
    for rank, offer in enumerate(offers):
        free = offer["free"]
        if needed > free * FREE_SHARE:
            raise CheckpointStorageError(
                f"No space left for a checkpoint in {root}: it needs {needed} bytes, rank {rank} sees {free} free, of "
                f"which {1 - FREE_SHARE:.0%} stay unused. Nothing was written; make room or choose another --save"
            )
    return needed


def _check_agreement(offers: list[dict[str, Any]]) -> None:
    first = offers[0]
    stages: dict[int, tuple[int, str]] = {}
    for rank, offer in enumerate(offers):
        if offer["iteration"] != first["iteration"]:
            told = f"iteration {offer['iteration']}, rank 0 iteration {first['iteration']}"
            raise CheckpointStorageError(f"rank {rank} wants to save {told}")
        mine, other = first["state"], offer["state"]
        differing = sorted(key for key in mine.keys() | other.keys() if mine.get(key) != other.get(key))
        if differing:
            raise CheckpointStorageError(f"rank {rank} wants to save another state than rank 0: {', '.join(differing)}")
        peer, tensors = stages.setdefault(offer["stage"], (rank, offer["tensors"]))
        if tensors != offer["tensors"]:
            raise CheckpointStorageError(
                f"ranks {peer} and {rank} of one pipeline stage want to save tensors of other names, shapes or dtypes"
            )


def _open_temporary(root: Path, iteration: int) -> str:
    root.mkdir(parents=True, exist_ok=True)
    notes = paths.repair(root) + paths.remove_leftovers(root)
    save_id = uuid.uuid4().hex[:16]
    temporary = root / f"{paths.folder_name(iteration)}.tmp-{save_id}"
    temporary.mkdir()
    return json.dumps({"folder": temporary.name, "save_id": save_id, "notes": notes})


def _expect_shared(temporary: Path) -> str:
    """The first rank has made the folder; where it is not seen, the disk is not shared."""
    if not temporary.is_dir():
        raise FileNotFoundError(
            errno.ENOENT, "not seen here though rank 0 made it; all ranks must share the folder", str(temporary)
        )
    return ""


def _complete(temporary: Path, manifest: Manifest, state: Mapping[str, Json]) -> str:
    """Write the state and the manifest. Returns the bytes of all files."""
    files = dict(manifest.files)
    _write_state(temporary, state, files)
    for name, entry in files.items():
        found = (temporary / name).stat().st_size
        if found != entry.bytes:
            raise OSError(errno.EIO, f"{entry.bytes} bytes were written, {found} are there", str(temporary / name))
    manifest = replace(manifest, files=files)
    parse_manifest(manifest_text(manifest).encode(), str(temporary))  # what could not be read is not published
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
    except OSError as error:
        if not _is_full(error):
            raise
        raise CheckpointStorageError(_no_space(error, folder, needed)) from None


def _is_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in OUT_OF_ROOM


def _no_space(error: BaseException, folder: Path, needed: int) -> str:
    return (
        f"No space left: {error}; the checkpoint needs {needed} bytes, {_free_bytes(folder)} are free in "
        f"{folder} (a quota or a limit on file sizes may be lower). The older checkpoints are untouched; make "
        "room and start again"
    )
