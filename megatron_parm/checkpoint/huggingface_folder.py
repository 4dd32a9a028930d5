"""A local folder in Hugging Face's format: config.json, safetensors with or without an index, tokenizer files. Floor 6.

The folder may come from anywhere. Names in the index must be plain, links are not followed, `.bin` files are read as
tensors only (weights_only), and nothing is downloaded.
"""

import json
import os
import shutil
import stat
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_parm.checkpoint import paths
from megatron_parm.checkpoint.tensor_files import SafetensorsFile, TensorInfo, TensorSource, in_files, write_safetensors
from megatron_parm.errors import CheckpointError, ConfigError, UntrustedCheckpointError

CONFIG = "config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
OLD_SINGLE, OLD_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
LARGEST_INDEX = 200_000_000  # bytes
LARGEST_TOKENIZER_FILE = 1_000_000_000  # bytes
# files that travel with the weights, as they are
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)


def is_huggingface_folder(folder: Path) -> bool:
    """Whether `folder` has a config.json and none of our traces."""
    return (folder / CONFIG).is_file() and not paths.holds_checkpoint(folder)


def plain_file(folder: Path, name: str) -> Path:
    """The file `name` of `folder`. Raises UntrustedCheckpointError for a name or a link that could lead out of it."""
    if not paths.is_plain(name):
        raise UntrustedCheckpointError(
            f"{folder} names the file {name!r}, which could lead out of the folder; names may have letters, digits and "
            "._- only. Nothing was read from it"
        )
    return regular_file(folder / name)


def regular_file(file: Path) -> Path:
    """`file` itself. Raises UntrustedCheckpointError if it is a link, CheckpointError if it is no file."""
    if file.is_symlink():
        raise UntrustedCheckpointError(
            f"{file} is a symbolic link to {os.readlink(file)}; nothing outside the folder is read. Copy the folder "
            "with its contents (cp -rL) if you trust it"
        )
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise CheckpointError(f"{file} is not a regular file")
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
    return file


class BinFile:
    """A file of torch.save, read as tensors only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        found = _load_tensors(path)
        if not isinstance(found, dict) or not all(
            isinstance(name, str) and isinstance(value, Tensor) for name, value in found.items()
        ):
            raise CheckpointError(f"{path} is no table of tensors")
        self._tensors: dict[str, Tensor] = found

    @property
    def entries(self) -> Mapping[str, TensorInfo]:
        """The tensors of the file."""
        return {name: TensorInfo.of(tensor) for name, tensor in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        """The values of one tensor."""
        return self._tensors[name]


def _load_tensors(path: Path) -> Any:
    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            return torch.load(path, map_location="cpu", weights_only=True)  # the format of before torch 1.6
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except Exception as error:  # whatever torch meets in a file from anywhere
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        unsupported = [line for line in lines if "unsupported" in line.lower()]
        reason = (unsupported or lines)[0]
        if type(error).__name__ == "UnpicklingError" and unsupported:
            raise UntrustedCheckpointError(
                f"{path} holds more than tensors, and loading it would run code; nothing of it was run ({reason})"
            ) from None
        raise CheckpointError(f"{path} is damaged or no file of torch.save ({reason})") from None


class FolderTensors:
    """All tensors of a folder, one file or many. Raises CheckpointError and UntrustedCheckpointError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: list[str] = []
        self._places: dict[str, SafetensorsFile | BinFile] = {}
        self._entries: dict[str, TensorInfo] = {}
        kinds: tuple[tuple[str, str, type[SafetensorsFile] | type[BinFile]], ...] = (
            (INDEX, SINGLE, SafetensorsFile),
            (OLD_INDEX, OLD_SINGLE, BinFile),
        )
        for index, single, kind in kinds:
            if (folder / index).exists() or (folder / index).is_symlink():
                self._open_indexed(plain_file(folder, index), kind)
                return
            if (folder / single).exists() or (folder / single).is_symlink():
                self._add(kind(plain_file(folder, single)))
                return
        raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX} nor {OLD_SINGLE}: there are no weights")

    @property
    def entries(self) -> Mapping[str, TensorInfo]:
        """Every tensor by its name there."""
        return self._entries

    def read(self, name: str) -> Tensor:
        """The values of one tensor."""
        return self._places[name].read(name)

    def _add(self, file: SafetensorsFile | BinFile) -> None:
        self.files.append(file.path.name)
        for name, info in file.entries.items():
            if name in self._places:
                raise CheckpointError(f"{name} is in {self._places[name].path} and in {file.path}")
            self._places[name], self._entries[name] = file, info

    def _open_indexed(self, index: Path, kind: type[SafetensorsFile] | type[BinFile]) -> None:
        try:
            if index.stat().st_size > LARGEST_INDEX:
                raise CheckpointError(f"{index} has more than {LARGEST_INDEX} bytes")
            table = json.loads(index.read_bytes())["weight_map"]
            named = {name: file for name, file in table.items() if isinstance(file, str)}
            if len(named) < len(table):
                raise TypeError
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise CheckpointError(f"{index} is damaged: it has no table weight_map of names and files") from None
        for file in sorted(set(named.values())):
            self._add(kind(plain_file(self.folder, file)))
        absent = [name for name, file in named.items() if name not in self._places]
        misplaced = [name for name in named if name in self._places and self._places[name].path.name != named[name]]
        unlisted = self._places.keys() - named.keys()
        for what, found in (
            ("are in the index but in no file", absent),
            ("are in another file than the index says", misplaced),
            ("are in the files but not in the index", unlisted),
        ):
            if found:
                raise CheckpointError(f"{index}: {len(found)} tensors {what}: {', '.join(sorted(found)[:12])}")


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of the tokenizer in `folder`. Raises UntrustedCheckpointError for a link."""
    found = [plain_file(folder, name) for name in TOKENIZER_FILES if os.path.lexists(folder / name)]
    for file in found:
        if file.stat().st_size > LARGEST_TOKENIZER_FILE:
            raise CheckpointError(f"{file} has more than {LARGEST_TOKENIZER_FILE} bytes; it is no tokenizer file")
    return found


def refuse_filled(folder: Path) -> None:
    """Raise ConfigError if something is in `folder` already."""
    if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--save {folder} exists and is not empty; name a new folder")


def write_folder(
    folder: Path,
    config: Mapping[str, Any],
    tensors: TensorSource,
    carried: Mapping[str, Path | bytes],
    *,
    largest_file: int,
) -> None:
    """Write a folder, tensor by tensor; it appears under its name when it is whole. Raises ConfigError if it exists.

    carried: further files by name, to be copied or written.
    """
    refuse_filled(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f"{folder.name}.tmp-{uuid.uuid4().hex[:16]}")
    temporary.mkdir()
    try:
        _write_tensors(temporary, tensors, largest_file)
        paths.write_durably(temporary / CONFIG, (json.dumps(dict(config), indent=2) + "\n").encode())
        for name, content in carried.items():
            if isinstance(content, bytes):
                paths.write_durably(temporary / name, content)
            else:
                shutil.copyfile(content, temporary / name)
        paths.sync_folder(temporary)
        temporary.rename(folder)  # also onto an empty folder
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write_tensors(folder: Path, tensors: TensorSource, largest_file: int) -> None:
    files = in_files(tensors.entries, largest_file)
    if len(files) == 1:
        write_safetensors(folder / SINGLE, files[0], tensors.read, {"format": "pt"})
        return
    table: dict[str, str] = {}
    for number, entries in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        write_safetensors(folder / name, entries, tensors.read, {"format": "pt"})
        table |= dict.fromkeys(entries, name)
    total = sum(info.bytes for info in tensors.entries.values())
    index = {"metadata": {"total_size": total}, "weight_map": table}
    paths.write_durably(folder / INDEX, (json.dumps(index, indent=2) + "\n").encode())
