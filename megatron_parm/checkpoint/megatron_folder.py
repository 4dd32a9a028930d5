"""The folders of Megatron's checkpoints: which iteration, which rank's file. Floor 6. Source: formats C.7.

<root>/latest_checkpointed_iteration.txt               decimal iteration, or the word release
<root>/iter_0000100/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt     ranks of tp, pp, ep
<root>/iter_0000100/.metadata, __0_0.distcp, common.pt            torch_dist (see `megatron_dist.py`)
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_parm.checkpoint import paths
from megatron_parm.checkpoint.huggingface_folder import regular_file
from megatron_parm.checkpoint.megatron_config import SavedArguments
from megatron_parm.checkpoint.pickle_values import Maker, instances_of
from megatron_parm.checkpoint.torch_files import TorchFile
from megatron_parm.errors import CheckpointError, UntrustedCheckpointError

MODEL_FILES = ("model_optim_rng.pt", "model_rng.pt")
METADATA = ".metadata"
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
# what the arguments of some versions hold beside plain values; kept as their values
_ENUMS = instances_of(
    "megatron.model.enums.ModelType",
    "megatron.legacy.model.enums.ModelType",
    "megatron.core.enums.ModelType",
    "megatron.core.transformer.enums.ModelType",
    "megatron.core.transformer.enums.AttnBackend",
    "megatron.core.transformer.enums.CudaGraphScope",
    "megatron.core.enums.Fp8Recipe",
    "megatron.core.enums.Fp4Recipe",
    "megatron.core.rerun_state_machine.RerunMode",
    "megatron.core.rerun_state_machine.RerunState",
    "megatron.core.rerun_state_machine.RerunDiagnostic",
    "signal.Signals",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
    "datetime.timedelta",
)
MEGATRON_MAKERS: dict[str, Maker] = {**_ENUMS}


@dataclass(frozen=True)
class RankFile:
    """One file with the numbers of its ranks."""

    tp: int
    pp: int
    ep: int
    path: Path
    state: Mapping[str, Any]


def is_megatron_folder(folder: Path) -> bool:
    """Whether a folder of one iteration was written by Megatron."""
    return (folder / METADATA).exists() or any(_RANK.fullmatch(entry.name) for entry in _entries(folder))


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def iteration_folder(root: Path, ckpt_step: int | None) -> Path:
    """The folder of one iteration that `root` means, or `root` itself. Raises CheckpointError."""
    if not root.is_dir():
        raise CheckpointError(f"{root} does not exist or is not a folder")
    if is_megatron_folder(root):
        return root
    if ckpt_step is not None:
        name = paths.folder_name(ckpt_step)
    elif (root / paths.TRACKER).is_file():
        name = paths.read_tracker(root)
        if name != paths.RELEASE and not (name.isascii() and name.isdigit() and len(name) <= 18):
            raise CheckpointError(
                f"{root / paths.TRACKER} contains {name!r}; it must contain an iteration, like 100, or release"
            )
        name = name if name == paths.RELEASE else paths.folder_name(int(name))
    else:
        raise CheckpointError(f"{root} has neither {paths.TRACKER} nor folders mp_rank_*: it is none of Megatron's")
    folder = root / name
    if folder.is_symlink() or not is_megatron_folder(folder):
        raise CheckpointError(f"{folder} does not exist, or has neither folders mp_rank_* nor {METADATA}")
    return folder


def require_trust(root: Path, *, is_trusted: bool) -> None:
    """Raise UntrustedCheckpointError without `--trust-checkpoint`."""
    if not is_trusted:
        raise UntrustedCheckpointError(
            f"{root} is a checkpoint of Megatron: its files are pickles, a format that can carry programs. This tool "
            "reads them as data and runs nothing of them, yet it takes no such file unasked: if you know where the "
            "folder comes from, add --trust-checkpoint. Nothing was read"
        )


def rank_files(folder: Path) -> list[RankFile]:
    """Every rank's file, in the order of ranks; the numbers' meaning is in the arguments of the first."""
    found: list[tuple[tuple[int, ...], Path]] = []
    for entry in _entries(folder):
        match = _RANK.fullmatch(entry.name)
        if not match:
            continue
        if entry.is_symlink() or not entry.is_dir():
            raise UntrustedCheckpointError(f"{entry} is a link or no folder; nothing outside the folder is read")
        present = [name for name in MODEL_FILES if (entry / name).exists() or (entry / name).is_symlink()]
        if present:  # a folder of the optimizer alone has none
            numbers = tuple(int(number) for number in match.groups() if number is not None)
            found.append((numbers, regular_file(entry / present[0])))
    if not found:
        raise CheckpointError(f"{folder} has no file {MODEL_FILES[0]} in folders mp_rank_*")
    found.sort()
    files: list[RankFile] = []
    sizes: tuple[int, int, int] | None = None
    for numbers, path in found:
        state = TorchFile(path).value(MEGATRON_MAKERS)
        if not isinstance(state, dict):
            raise CheckpointError(f"{path} is no checkpoint of Megatron: it holds no table")
        sizes = sizes or _sizes(state, path)
        tp, pp, ep = _meaning(numbers, sizes, path)
        files.append(RankFile(tp, pp, ep, path, state))
    assert sizes is not None
    _check_grid(files, sizes, folder)
    return sorted(files, key=lambda file: (file.pp, file.tp, file.ep))


def _sizes(state: Mapping[str, Any], path: Path) -> tuple[int, int, int]:
    arguments = SavedArguments.of(state.get("args"), str(path))
    tp = arguments.count("tensor_model_parallel_size", "model_parallel_size", default=1)
    pp = arguments.count("pipeline_model_parallel_size", default=1)
    return tp, pp, arguments.count("expert_model_parallel_size", default=1)


def _meaning(numbers: tuple[int, ...], sizes: tuple[int, int, int], path: Path) -> tuple[int, int, int]:
    """Ranks of tp, pp and ep: the second number is the stage where there are stages, else the part of the experts."""
    _, pp, ep = sizes
    expected = 1 + (pp > 1) + (ep > 1)
    if len(numbers) != expected:
        raise CheckpointError(
            f"{path.parent} has {len(numbers)} numbers; with {pp} stages and {ep} parts of experts it would have "
            f"{expected}"
        )
    if expected == 3:
        return numbers[0], numbers[1], numbers[2]
    second = numbers[1] if expected == 2 else 0
    return numbers[0], second if pp > 1 else 0, second if ep > 1 else 0


def _check_grid(files: Sequence[RankFile], sizes: tuple[int, int, int], folder: Path) -> None:
    tp, pp, ep = sizes
    seen = {(file.tp, file.pp) for file in files}
    wanted = {(one, stage) for one in range(tp) for stage in range(pp)}
    if seen != wanted or {file.ep for file in files} != set(range(ep)):
        missing = ", ".join(f"tp {one} pp {stage}" for one, stage in sorted(wanted - seen)[:8])
        raise CheckpointError(
            f"{folder} should hold {tp} x {pp} ranks (tp x pp) and {ep} parts of experts"
            + (f"; missing: {missing}" if missing else "; it holds others")
        )
