"""A model outside a run: whole tensors under our names, read one at a time, with the settings they belong to. Floor 6.

What every format is converted through. `read_saved` and `write_saved` are our own format's ends.
"""

import hashlib
import json
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

import megatron_parm
from megatron_parm.checkpoint import paths
from megatron_parm.checkpoint.find import find_checkpoint
from megatron_parm.checkpoint.load import read_state
from megatron_parm.checkpoint.manifest import FileEntry, Json, Manifest, Part, TensorEntry, manifest_text
from megatron_parm.checkpoint.save import layout_of
from megatron_parm.checkpoint.tensor_files import SafetensorsFile, TensorInfo, TensorSource, in_files, write_safetensors
from megatron_parm.checkpoint.verify import VerifiedCheckpoint
from megatron_parm.config.run import RunConfig
from megatron_parm.errors import CheckpointError, ConfigError
from megatron_parm.parallel.context import ParallelContext

MODEL = "model."
TOKENIZER_FOLDER = "tokenizer"
WORD_ROWS = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")


@dataclass(frozen=True)
class WholeModel:
    """A model in our names. `vocab_size`: the words; rows of padding may follow them.

    `origin` is what the other format said and ours has no place for (a config.json); `tokenizer_files` travel along.
    `notes` are lines to tell.
    """

    config: RunConfig
    vocab_size: int
    tensors: TensorSource
    tokenizer_files: Sequence[Path] = ()
    origin: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class WithRows:
    """Tensors whose word rows are cut to, or filled up with zeros to, a number of rows."""

    def __init__(self, tensors: TensorSource, rows: int) -> None:
        self._tensors, self._rows = tensors, rows
        self._entries = {name: self._fitted(name, info) for name, info in tensors.entries.items()}

    def _fitted(self, name: str, info: TensorInfo) -> TensorInfo:
        return TensorInfo((self._rows, *info.shape[1:]), info.dtype) if name in WORD_ROWS else info

    @property
    def entries(self) -> Mapping[str, TensorInfo]:
        """The tensors, the word rows with their new number."""
        return self._entries

    def read(self, name: str) -> Tensor:
        """One of them."""
        values = self._tensors.read(name)
        if name not in WORD_ROWS or len(values) == self._rows:
            return values
        fitted = values.new_zeros(self._entries[name].shape)
        kept = min(self._rows, len(values))
        fitted[:kept] = values[:kept]
        return fitted


class SavedTensors:
    """The weights in a verified checkpoint of ours, whole."""

    def __init__(self, checkpoint: VerifiedCheckpoint) -> None:
        self._saved = {
            name.removeprefix(MODEL): entry
            for name, entry in checkpoint.manifest.tensors.items()
            if name.startswith(MODEL)
        }
        self._path = checkpoint.path
        self._files: dict[str, SafetensorsFile] = {}

    @property
    def entries(self) -> Mapping[str, TensorInfo]:
        """The weights by our names."""
        return {name: TensorInfo(entry.shape, getattr(torch, entry.dtype)) for name, entry in self._saved.items()}

    def read(self, name: str) -> Tensor:
        """One tensor, put together of its parts."""
        entry = self._saved[name]
        whole = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        for part in entry.parts:
            file = self._files.setdefault(part.file, SafetensorsFile(self._path / part.file))
            values = file.read(MODEL + name) if MODEL + name in file.entries else None
            if values is None or TensorInfo.of(values) != TensorInfo(part.shape, whole.dtype):
                raise CheckpointError(f"{file.path} does not hold the part of {name} that the manifest names")
            box = zip(part.offsets, part.shape, strict=True)
            whole[tuple(slice(start, start + size) for start, size in box)] = values
        return whole


def read_saved(root: Path, ckpt_step: int | None = None) -> tuple[VerifiedCheckpoint, dict[str, Any]]:
    """The checkpoint of ours that `root` means, every hash checked, with its JSON state."""
    ctx = ParallelContext.single()
    checkpoint = find_checkpoint(root, ctx, ckpt_step=ckpt_step)
    return checkpoint, read_state(checkpoint, ctx)


def carried_files(root: Path, names: Sequence[str]) -> list[Path]:
    """The tokenizer files beside a checkpoint of ours."""
    folder = root / TOKENIZER_FOLDER
    return [folder / name for name in names if (folder / name).is_file() and not (folder / name).is_symlink()]


def write_saved(root: Path, model: WholeModel, state: Mapping[str, Json], *, largest_file: int) -> Path:
    """Save `model` as iteration 0 of `root`, tensor by tensor. Raises ConfigError if `root` has a checkpoint."""
    if paths.holds_checkpoint(root):
        raise ConfigError(f"--save {root} has a checkpoint already; name a new folder")
    root.mkdir(parents=True, exist_ok=True)
    save_id = uuid.uuid4().hex[:16]
    temporary = root / f"{paths.folder_name(0)}.tmp-{save_id}"
    temporary.mkdir()
    try:
        files: dict[str, FileEntry] = {}
        tensors: dict[str, TensorEntry] = {}
        chunks = in_files({MODEL + name: info for name, info in model.tensors.entries.items()}, largest_file)
        for number, entries in enumerate(chunks, 1):
            name = f"model-{number:05d}-of-{len(chunks):05d}.safetensors"
            files[name] = write_safetensors(
                temporary / name, entries, lambda name: model.tensors.read(name.removeprefix(MODEL)), {}
            )
            for tensor, info in entries.items():
                part = Part(name, (0,) * len(info.shape), info.shape)
                tensors[tensor] = TensorEntry(info.shape, str(info.dtype).removeprefix("torch."), (part,))
        text = (json.dumps(dict(state), indent=1) + "\n").encode()
        paths.write_durably(temporary / paths.STATE, text)
        files[paths.STATE] = FileEntry(len(text), hashlib.sha256(text).hexdigest())
        versions = {
            "megatron_parm": megatron_parm.__version__,
            "torch": str(torch.__version__),
            "safetensors": safetensors.__version__,
        }
        manifest = Manifest(0, save_id, layout_of(ParallelContext.single()), versions, tensors, {}, files)
        paths.write_durably(temporary / paths.MANIFEST, manifest_text(manifest).encode())
        paths.sync_folder(temporary)
        if model.tokenizer_files:
            (root / TOKENIZER_FOLDER).mkdir(exist_ok=True)
        for file in model.tokenizer_files:
            shutil.copyfile(file, root / TOKENIZER_FOLDER / file.name)
        paths.publish(temporary, root, 0, save_id)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return root / paths.folder_name(0)
