"""Checks a checkpoint against its manifest before anything is read from it. Floor 6."""

import hashlib
import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_parm.checkpoint import paths
from megatron_parm.checkpoint.manifest import FileEntry, Manifest, parse_manifest
from megatron_parm.checkpoint.megatron_folder import is_megatron_folder
from megatron_parm.errors import CheckpointError, UntrustedCheckpointError
from megatron_parm.parallel.agreement import on_every_rank, on_first_rank
from megatron_parm.parallel.context import ParallelContext

VerifyLevel = Literal["size", "full"]


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """A folder whose manifest is whole and whose files are what it says. `warnings` are lines to log."""

    path: Path
    manifest: Manifest
    warnings: tuple[str, ...]


def verify_checkpoint(path: Path, level: VerifyLevel, ctx: ParallelContext) -> VerifiedCheckpoint:
    """Check manifest, names and sizes of all files, with "full" also their SHA-256, split over the ranks.

    Call on all ranks. Raises the same CheckpointError on all, naming each bad file with what was expected and found;
    UntrustedCheckpointError for a name or a link that leads out of the folder. Files that the manifest does not list
    are never read and only warned about.
    """
    manifests: list[Manifest] = []

    def read_manifest() -> str:
        data = read_manifest_file(path)
        manifests.append(parse_manifest(data, str(path / paths.MANIFEST)))
        return hashlib.sha256(data).hexdigest()

    def check_my_files() -> str:
        names = sorted(manifest.files)[ctx.world.rank :: ctx.world.size]
        problems = (problem_of(path / name, manifest.files[name], level) for name in names)
        return json.dumps([problem for problem in problems if problem is not None])

    doing = f"reading {path}"
    hashes = on_every_rank(ctx.world, doing, read_manifest)
    manifest = manifests[0]
    if len(set(hashes)) > 1:
        raise CheckpointError(f"the ranks see different files as {path / paths.MANIFEST}; it must be on a shared disk")
    named = paths.iteration_of(path.name)
    if named is not None and named != manifest.iteration:
        raise CheckpointError(f"{path} holds iteration {manifest.iteration}: the folder was renamed; rename it back")
    problems = [problem for text in on_every_rank(ctx.world, doing, check_my_files) for problem in json.loads(text)]
    if problems:
        raise CheckpointError(f"{path} is damaged:\n" + "\n".join(f"  {problem}" for problem in sorted(problems)))
    warnings = json.loads(on_first_rank(ctx.world, doing, lambda: json.dumps(_extra_files(path, manifest))))
    return VerifiedCheckpoint(path, manifest, tuple(warnings))


def is_whole(folder: Path) -> bool:
    """Whether a folder has a valid manifest and every file it lists with its size; hashes are not compared."""
    try:
        manifest = parse_manifest(read_manifest_file(folder), str(folder / paths.MANIFEST))
        return all(problem_of(folder / name, entry, "size") is None for name, entry in manifest.files.items())
    except (CheckpointError, OSError):
        return False


def state_of(path: Path, manifest: Manifest) -> dict[str, Any]:
    """The JSON state in the checkpoint `path`. Its hash is always checked. Raises CheckpointError."""
    file = path / paths.STATE
    _refuse_links(file)
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing") from None
    found, expected = hashlib.sha256(data).hexdigest(), manifest.files[paths.STATE].sha256
    if found != expected:
        raise CheckpointError(f"{file} is damaged: it has the SHA-256 {found}, expected {expected}")
    state: dict[str, Any] = json.loads(data)
    return state


def read_manifest_file(path: Path) -> bytes:
    """The bytes of the manifest in the checkpoint `path`. Raises CheckpointError if there is none."""
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist or is not a folder")
    manifest = path / paths.MANIFEST
    _refuse_links(manifest)
    try:
        return manifest.read_bytes()
    except FileNotFoundError:
        if is_megatron_folder(path):
            raise CheckpointError(
                f"{path} is a checkpoint of Megatron. Its files are pickles, which no run reads; convert it once: "
                f"tools/convert_checkpoint.py --from megatron --trust-checkpoint --load {path} --to megatron_parm "
                "--save DIR, then --load DIR --finetune"
            ) from None
        raise CheckpointError(
            f"{path} has no {paths.MANIFEST}: its save did not finish, or it was not made by this program"
        ) from None


def _refuse_links(file: Path) -> None:
    if file.is_symlink():
        raise UntrustedCheckpointError(
            f"{file} is a symbolic link to {os.readlink(file)}; files of a checkpoint must lie in its folder. "
            "Nothing was read; copy the file there if you trust it"
        )


def problem_of(file: Path, expected: FileEntry, level: VerifyLevel) -> str | None:
    """What is wrong with a file, or None. Raises UntrustedCheckpointError for a link."""
    _refuse_links(file)
    try:
        status = file.stat()
    except FileNotFoundError:
        return f"{file.name} is missing ({expected.bytes} bytes, SHA-256 {expected.sha256})"
    if not stat.S_ISREG(status.st_mode):
        return f"{file.name} is not a regular file"
    if status.st_size != expected.bytes:
        return f"{file.name} has {status.st_size} bytes, expected {expected.bytes}"
    if level == "full":
        with file.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
        if found != expected.sha256:
            return f"{file.name} has the SHA-256 {found}, expected {expected.sha256}"
    return None


def _extra_files(path: Path, manifest: Manifest) -> list[str]:
    extra = sorted(entry.name for entry in path.iterdir() if entry.name not in (*manifest.files, paths.MANIFEST))
    return [f"{path} has files that its manifest does not list; they are ignored: {', '.join(extra)}"] if extra else []
