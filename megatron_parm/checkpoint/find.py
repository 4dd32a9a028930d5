"""Which checkpoint of a folder a run resumes from, decided the same way on all ranks. Floor 6.

`--resume strict` takes the one that the tracker file (or `--ckpt-step`) names and stops if it is bad. `--resume auto`
falls back to the newest one that is whole, with a warning.
"""

import json
from pathlib import Path
from typing import Any, Literal

from megatron_parm.checkpoint import paths
from megatron_parm.checkpoint.manifest import parse_manifest
from megatron_parm.checkpoint.verify import (
    VerifiedCheckpoint,
    VerifyLevel,
    is_whole,
    read_manifest_file,
    state_of,
    verify_checkpoint,
)
from megatron_parm.errors import CheckpointError, CheckpointStorageError
from megatron_parm.parallel.agreement import on_first_rank
from megatron_parm.parallel.context import ParallelContext

ResumePolicy = Literal["strict", "auto"]


def has_checkpoint(root: Path, ctx: ParallelContext) -> bool:
    """Whether a save ever finished in `root`: then a run loads it or stops. Call on all ranks."""
    return on_first_rank(ctx.world, f"reading {root}", lambda: str(paths.holds_checkpoint(root))) == "True"


def find_checkpoint(
    root: Path,
    ctx: ParallelContext,
    *,
    ckpt_step: int | None = None,
    resume: ResumePolicy = "strict",
    verify: VerifyLevel = "full",
) -> VerifiedCheckpoint:
    """The verified checkpoint of `root` to resume from. Call on all ranks.

    `ckpt_step` names an iteration in place of the tracker file; there is no fall-back from it. Raises the same
    CheckpointError on all ranks if the named one is missing or damaged ("strict") or if none is whole ("auto").
    """
    found = json.loads(on_first_rank(ctx.world, f"reading {root}", lambda: _candidates(root, ckpt_step, resume)))
    warnings: list[str] = found["notes"]
    problems: list[str] = []
    for name in found["candidates"]:
        try:
            checkpoint = verify_checkpoint(root / name, verify, ctx)
        except CheckpointStorageError:  # the disk fails: an older checkpoint is no better
            raise
        except CheckpointError as error:  # the same on all ranks
            if resume == "strict" or ckpt_step is not None:
                raise type(error)(f"{error}\n{_remedy(found['others'], ckpt_step, resume)}") from None
            problems.append(str(error))
            continue
        if problems:
            warnings += [f"not used: {problem}" for problem in problems] + [f"resuming from {checkpoint.path} instead"]
        return VerifiedCheckpoint(checkpoint.path, checkpoint.manifest, (*warnings, *checkpoint.warnings))
    told = "\n".join([*warnings, *problems])
    raise CheckpointError(f"{root} has no checkpoint that can be loaded" + (f":\n{told}" if told else ""))


def peek_state(root: Path, *, ckpt_step: int | None = None, falls_back: bool = False) -> dict[str, Any] | None:
    """The JSON state of the checkpoint that would be loaded, read by this process alone; None if `root` has none.

    For what must be known before the ranks are joined. Changes nothing, and checks the manifest and the state only.
    `falls_back`: as `--resume auto`, the newest one that can be read. Raises CheckpointError.
    """
    if not paths.holds_checkpoint(root):
        return None
    names = [paths.folder_name(iteration) for iteration in paths.finished_iterations(root)]
    try:
        wanted = _tracked_folder(root, names) if ckpt_step is None else paths.folder_name(ckpt_step)
        return state_of(root / wanted, parse_manifest(read_manifest_file(root / wanted), str(root / wanted)))
    except CheckpointError:
        if not falls_back or ckpt_step is not None:
            raise
    newest = next((name for name in names if is_whole(root / name)), None)
    if newest is None:
        raise CheckpointError(f"{root} has no checkpoint that can be loaded")
    return state_of(root / newest, parse_manifest(read_manifest_file(root / newest), str(root / newest)))


def _candidates(root: Path, ckpt_step: int | None, resume: ResumePolicy) -> str:
    """The folders to try, best first. Raises CheckpointError where there is nothing to try."""
    if not root.is_dir():
        raise CheckpointError(f"{root} does not exist or is not a folder; check --load")
    notes = paths.repair(root)
    iterations = paths.finished_iterations(root)
    names = [paths.folder_name(iteration) for iteration in iterations]
    if ckpt_step is not None:
        wanted = paths.folder_name(ckpt_step)
        if wanted not in names:
            raise CheckpointError(f"{root} has no {wanted} (--ckpt-step {ckpt_step}); it has: {_list(names)}")
        return json.dumps({"candidates": [wanted], "others": _without(names, wanted), "notes": notes})
    try:
        tracked = _tracked_folder(root, names)
    except CheckpointError as error:
        if resume == "strict":
            raise CheckpointError(f"{error}\n{_remedy(names, None, resume)}") from None
        return json.dumps(
            {"candidates": names, "others": [], "notes": [*notes, f"{error}; looking for the newest one"]}
        )
    if resume == "strict":
        return json.dumps({"candidates": [tracked], "others": _without(names, tracked), "notes": notes})
    place = names.index(tracked) if tracked in names else -1
    older, newer = names[place + 1 :], names[: max(place, 0)]
    return json.dumps({"candidates": [tracked, *older, *newer], "others": [], "notes": notes})


def _tracked_folder(root: Path, names: list[str]) -> str:
    """The folder that the tracker file names. Raises CheckpointError with path and content if there is none."""
    tracker = root / paths.TRACKER
    try:
        content = paths.read_tracker(root)
    except FileNotFoundError:
        raise CheckpointError(f"{tracker} does not exist, so no save finished in {root}") from None
    if content == paths.RELEASE and (root / paths.RELEASE).is_dir():
        return paths.RELEASE
    if not (content.isascii() and content.isdigit() and len(content) <= 18):
        raise CheckpointError(f"{tracker} contains {content!r}; it must contain the iteration of a save, like 100")
    name = paths.folder_name(int(content))
    if name not in names:
        raise CheckpointError(f"{tracker} contains {content!r}, but there is no folder {root / name}")
    return name


def _without(names: list[str], name: str) -> list[str]:
    return [other for other in names if other != name]


def _list(names: list[str]) -> str:
    return (
        ", ".join(names[:8]) + (f" and {len(names) - 8} older" if len(names) > 8 else "") if names else "no checkpoint"
    )


def _remedy(others: list[str], ckpt_step: int | None, resume: ResumePolicy) -> str:
    if not others:
        return "there is no other checkpoint in this folder"
    choice = "name another one with --ckpt-step" if ckpt_step is None else "name another one"
    return f"{choice}, or use --resume auto without --ckpt-step for the newest whole one; others here: {_list(others)}"
