"""Keeps built index arrays on disk, safe for many processes and jobs at once. Floor 4.

An entry is a folder named after a hash of everything the arrays depend on. Its builder fills a temporary folder and
renames it into place, so an entry is whole or absent, whoever is killed when. The first process to hold the entry's
lock builds; the others wait for the entry to appear. No process needs another one: where the folder cannot be used,
locked or seen by all, each builds its own arrays, which are the same.
"""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_parm.data.index_format import bin_path, idx_path

Arrays = dict[str, NDArray[np.integer]]

_FORMAT = 1
_POLL_SECONDS = 0.05
_HASHED_BYTES = 1 << 16
_DESCRIPTION = "description.json"


@dataclass(frozen=True)
class IndexCache:
    """The cache in `folder`; None keeps nothing. A process waits at most `patience_s` for another one to build."""

    folder: Path | None
    patience_s: float = 600.0

    def get_or_build(self, kind: str, facts: Mapping[str, object], build: Callable[[], Arrays]) -> Arrays:
        """The arrays of `kind` for `facts`, read from the cache or built, as read-only memory maps where possible.

        `facts` must hold everything that `build` depends on, as JSON values.
        """
        if self.folder is None:
            return build()
        facts = {"format": _FORMAT, "kind": kind, **facts}
        text = json.dumps(facts, sort_keys=True)
        entry = self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}-{kind}"
        found = _read_entry(entry, text)
        if found is not None:
            return found
        with _lock_or_entry(entry, text, self.patience_s):
            found = _read_entry(entry, text)
            if found is not None:
                return found
            arrays = build()
            try:
                _write_entry(entry, text, arrays)
            except OSError as error:
                warnings.warn(f"index cache {self.folder} cannot be written ({error}); not kept", stacklevel=2)
                return arrays
        return _read_entry(entry, text) or arrays


def default_cache_folder(prefix: str | Path) -> Path:
    """Where the indices of `prefix` are kept without --data-cache-path: beside the data, as Megatron-Core does."""
    return Path(prefix).parent / "cache" / "GPTDataset_indices"


def file_facts(prefix: str | Path) -> dict[str, object]:
    """What tells the two files of `prefix` from any others under the same name: sizes, times, a hash of the index."""
    facts: dict[str, object] = {"prefix": str(Path(prefix).absolute())}
    for path in (bin_path(prefix), idx_path(prefix)):
        status = path.stat()
        facts[f"{path.suffix} bytes"] = status.st_size
        facts[f"{path.suffix} mtime ns"] = status.st_mtime_ns
    with idx_path(prefix).open("rb") as idx:
        head = idx.read(_HASHED_BYTES)
        idx.seek(max(0, idx_path(prefix).stat().st_size - _HASHED_BYTES))
        facts["idx sha256"] = hashlib.sha256(head + idx.read()).hexdigest()
    return facts


def _read_entry(entry: Path, facts_text: str) -> Arrays | None:
    """The arrays of a whole entry that was built for these facts; None for anything else."""
    try:
        description = json.loads((entry / _DESCRIPTION).read_text())
        if description["facts"] != json.loads(facts_text):
            return None
        arrays: Arrays = {}
        for name, (dtype, shape) in description["arrays"].items():
            path = entry / f"{name}.npy"
            array = np.load(path, mmap_mode="r" if np.prod(shape) else None, allow_pickle=False)
            if array.dtype.str != dtype or list(array.shape) != shape:
                return None
            arrays[name] = array
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return arrays


def _write_entry(entry: Path, facts_text: str, arrays: Arrays) -> None:
    temporary = Path(tempfile.mkdtemp(prefix=f".{entry.name}.", dir=entry.parent))
    try:
        for name, array in arrays.items():
            with (temporary / f"{name}.npy").open("wb") as file:
                np.save(file, array, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
        shapes = {name: [array.dtype.str, list(array.shape)] for name, array in arrays.items()}
        description = {"facts": json.loads(facts_text), "arrays": shapes}
        (temporary / _DESCRIPTION).write_text(json.dumps(description, indent=1))
        temporary.chmod(0o755)
        _publish(temporary, entry, facts_text)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _publish(temporary: Path, entry: Path, facts_text: str) -> None:
    """Give a filled folder its name, unless a process that no lock held off was faster with the same arrays."""
    try:
        temporary.rename(entry)
        return
    except OSError:
        if not entry.exists():
            raise
    if _read_entry(entry, facts_text) is not None:
        shutil.rmtree(temporary, ignore_errors=True)
        return
    entry.rename(temporary / "damaged")
    temporary.rename(entry)
    shutil.rmtree(entry / "damaged", ignore_errors=True)


@contextmanager
def _lock_or_entry(entry: Path, facts_text: str, patience_s: float) -> Iterator[None]:
    """Wait until this process may build, or the entry is there, or patience is over. The lock dies with its holder."""
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(entry.parent / f".{entry.name}.lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        yield
        return
    try:
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline and _read_entry(entry, facts_text) is None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for abandoned in entry.parent.glob(f".{entry.name}.*/"):  # its builder was killed: it had this lock
                    shutil.rmtree(abandoned, ignore_errors=True)
                break
            except BlockingIOError:
                time.sleep(_POLL_SECONDS)
            except OSError:  # a file system without locks
                break
        yield
    finally:
        os.close(lock)
