"""The names inside a checkpoint folder, and what an interrupted save can leave there. Floor 6.

    root/latest_checkpointed_iteration.txt        the newest finished save: "100" or "release" (Megatron's tracker)
    root/latest_checkpointed_iteration.txt.next   the save that is about to be renamed and tracked: "100 <id>"
    root/latest_checkpointed_iteration.txt.tmp    the tracker file before its rename
    root/iter_0000100/                            one checkpoint: safetensors, state.json, manifest.json
    root/iter_0000100.tmp-<id>/               a save in progress, or one that was killed
    root/.replaced-iter_0000100-<id>/         the old folder while the same iteration is being saved again
    root/.trash-iter_0000100-<id>/            being deleted

Nothing here talks to other ranks: rank 0 calls these inside `on_first_rank`.
"""

import os
import re
import shutil
from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"
TRACKER_DRAFT = TRACKER + ".tmp"
PENDING_TRACKER = TRACKER + ".next"
MANIFEST = "manifest.json"
STATE = "state.json"
RELEASE = "release"

_ITERATION = re.compile(r"iter_(\d{7,})")
_TEMPORARY = re.compile(r"iter_\d{7,}\.tmp-[0-9a-f]+")
_REPLACED = re.compile(r"\.replaced-(iter_\d{7,})-[0-9a-f]+")
_TRASH = re.compile(r"\.trash-.+")
_PENDING = re.compile(r"(\d{1,18}) ([0-9a-f]{16})")
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}")


def folder_name(iteration: int) -> str:
    """`iter_0000100` for 100."""
    return f"iter_{iteration:07d}"


def shard_name(rank: int) -> str:
    """The file that the rank at place `rank` of the world writes, as DCP names it."""
    return f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


def iteration_of(name: str) -> int | None:
    """The iteration of a folder name, or None if it is not one of ours."""
    found = _ITERATION.fullmatch(name)
    return int(found[1]) if found and folder_name(int(found[1])) == name else None


def is_plain(name: str) -> bool:
    """Whether a file name stays inside its folder: letters, digits, `._-`, no leading dot, no separator."""
    return _PLAIN.fullmatch(name) is not None


def finished_iterations(root: Path) -> list[int]:
    """The iterations that have a folder under its final name, newest first."""
    found = [iteration_of(entry.name) for entry in root.iterdir() if entry.is_dir()] if root.is_dir() else []
    return sorted((iteration for iteration in found if iteration is not None), reverse=True)


def holds_checkpoint(root: Path) -> bool:
    """Whether a save ever finished in `root`, however damaged its traces are now."""
    if not root.is_dir():
        return False
    names = [entry.name for entry in root.iterdir()]
    return any(
        name in (TRACKER, RELEASE) or iteration_of(name) is not None or _REPLACED.fullmatch(name) for name in names
    )


def read_tracker(root: Path) -> str:
    """The content of the tracker file without surrounding white space, at most 100 characters."""
    with (root / TRACKER).open("rb") as file:
        return file.read(100).decode("utf-8", errors="replace").strip()


def write_durably(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in `folder` are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(temporary: Path, root: Path, iteration: int, save_id: str) -> None:
    """Give a complete temporary folder its final name and point the tracker file to it.

    An older folder of the same iteration is put aside first, so at no moment do two saves mix. `repair` finishes the
    work if the process dies in between. `save_id` is also in the manifest.
    """
    final = root / folder_name(iteration)
    aside = root / f".replaced-{final.name}-{save_id}"
    write_durably(root / PENDING_TRACKER, f"{iteration} {save_id}".encode())
    replaces = final.exists()
    if replaces:
        final.rename(aside)
    try:
        temporary.rename(final)
    except OSError:
        if replaces:
            aside.rename(final)
        raise
    sync_folder(root)
    write_tracker(root, iteration)
    if replaces:
        delete(aside)


def write_tracker(root: Path, iteration: int) -> None:
    """Point the tracker file to `iteration`, in one rename."""
    write_durably(root / TRACKER_DRAFT, str(iteration).encode())
    (root / TRACKER_DRAFT).replace(root / TRACKER)
    sync_folder(root)
    (root / PENDING_TRACKER).unlink(missing_ok=True)


def delete(folder: Path) -> None:
    """Delete a folder so that a half-deleted one is never taken for a checkpoint: rename it to `.trash-*` first."""
    trash = folder
    if not _TRASH.fullmatch(folder.name):
        trash = folder.with_name(f".trash-{folder.name.removeprefix('.replaced-')}")
        folder.rename(trash)
    if trash.is_symlink():
        trash.unlink()
    else:
        shutil.rmtree(trash)


def repair(root: Path) -> list[str]:
    """Finish the last two renames of a save that was killed between them; says what it did, one line each.

    Needs to write only if there is something to repair.
    """
    notes: list[str] = []
    names = sorted(entry.name for entry in root.iterdir()) if root.is_dir() else []
    for name in names:
        found = _REPLACED.fullmatch(name)
        if found and not (root / found[1]).exists():
            (root / name).rename(root / found[1])
            notes.append(f"put back {root / found[1]}: a save of the same iteration had been interrupted")
    finished = _iteration_renamed_but_not_tracked(root)
    if finished is not None:
        write_tracker(root, finished)
        notes.append(f"{root / TRACKER} now names iteration {finished}: its save had been interrupted just before that")
    return notes


def _iteration_renamed_but_not_tracked(root: Path) -> int | None:
    pending = root / PENDING_TRACKER
    if not pending.is_file():
        return None
    found = _PENDING.fullmatch(pending.read_bytes()[:100].decode("utf-8", errors="replace"))
    manifest = root / folder_name(int(found[1])) / MANIFEST if found else None
    if not found or manifest is None or not manifest.is_file():
        return None
    return int(found[1]) if f'"{found[2]}"'.encode() in manifest.read_bytes() else None


def remove_leftovers(root: Path) -> list[str]:
    """Remove what killed saves and deletions left; says what it removed, one line each. Call after `repair`."""
    notes = []
    for entry in sorted(root.iterdir()):
        if _TEMPORARY.fullmatch(entry.name) or _REPLACED.fullmatch(entry.name) or _TRASH.fullmatch(entry.name):
            delete(entry)
            notes.append(f"removed {entry}, left by a save or a deletion that was interrupted")
    for name in (PENDING_TRACKER, TRACKER_DRAFT):
        (root / name).unlink(missing_ok=True)
    return notes
