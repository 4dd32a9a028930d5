"""Files that grow under another name, and take their own only when they are whole. Floor 4.

The name tells that a file is not finished, a lock whether its writer still lives: it ends with the process, however the
process ends, so what a killed writer left can be told from what another one writes at this moment.
"""

import contextlib
import fcntl
import glob
import os
from pathlib import Path

_MARK = ".unfinished-"


class UnfinishedFile:
    """A new file beside `path`, open and locked until it is published or discarded. Raises OSError.

    The lock is the process's own: processes forked meanwhile do not hold it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._grows_at = Path(f"{path}{_MARK}{os.getpid()}")
        while True:
            self.file = self._grows_at.open("wb")
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._has_its_name():
                return
            self.file.close()  # another writer took it for abandoned before it was locked

    def flush_to_disk(self) -> None:
        """Let the disk have all of it."""
        self.file.flush()
        os.fsync(self.file.fileno())

    def publish(self) -> None:
        """Give the file its name and close it. What was written last must be on the disk."""
        self._grows_at.replace(self._path)
        self.file.close()

    def discard(self) -> None:
        """Remove the file, where it still grows, and close it."""
        self._grows_at.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.file.close()

    def _has_its_name(self) -> bool:
        try:
            return os.path.samestat(self._grows_at.stat(), os.fstat(self.file.fileno()))
        except FileNotFoundError:
            return False


def remove_abandoned(path: Path) -> int:
    """Remove what writers of `path` that are dead left behind; the number of files.

    A file whose lock another process holds, or whose file system has no locks, stays.
    """
    removed = 0
    for found in path.parent.glob(f"{glob.escape(path.name)}{_MARK}*"):
        if found.name.endswith(f"{_MARK}{os.getpid()}"):  # a process does not see its own lock
            continue
        with contextlib.suppress(OSError), found.open("r+b") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found.unlink()
            removed += 1
    return removed
