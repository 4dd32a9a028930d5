"""Messages to people: said by one chosen rank, warnings said once. Floor 2.

A `Log` is a value handed to whoever has something to say; there is no logging state in any module.
"""

import sys
from collections.abc import Callable
from typing import TextIO


def write_line(text: str, stream: TextIO) -> None:
    """Write `text` as a line of its own and flush, so that a killed run has said all it did."""
    stream.write(text + "\n")
    stream.flush()


class Log:
    """Says things for one rank of a run; on every rank but `speaking_rank` it is silent.

    `out` and `err` default to the process's streams at the time of speaking. `write` is how a line reaches a stream:
    `progress.write_above_bars` where a progress bar is drawn.
    """

    def __init__(
        self,
        rank: int,
        speaking_rank: int = 0,
        write: Callable[[str, TextIO], None] = write_line,
        out: TextIO | None = None,
        err: TextIO | None = None,
    ) -> None:
        self.rank = rank
        self.is_speaking = rank == speaking_rank
        self._write = write
        self._out = out
        self._err = err
        self._warned: set[str] = set()

    def say(self, text: str) -> None:
        """Write `text` to standard output, on the speaking rank."""
        if self.is_speaking:
            self._write(text, self._out or sys.stdout)

    def warn(self, text: str) -> None:
        """Write `warning: text` to standard error, on the speaking rank."""
        if self.is_speaking:
            self._write(f"warning: {text}", self._err or sys.stderr)

    def warn_once(self, key: str, text: str) -> None:
        """As `warn`, for the first call with this `key` only."""
        if key not in self._warned:
            self._warned.add(key)
            self.warn(text)

    def say_from_this_rank(self, text: str) -> None:
        """Write `[rank N] text` to standard error whichever rank this is: for what one rank alone can know."""
        self._write(f"[rank {self.rank}] {text}", self._err or sys.stderr)
