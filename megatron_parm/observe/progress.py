"""A progress bar, on a terminal only. Floor 2."""

import sys
from typing import NoReturn, TextIO

from tqdm import tqdm


def is_terminal(stream: TextIO) -> bool:
    """Whether a person watches `stream`: a bar in a log file would be noise."""
    return not stream.closed and stream.isatty()


def write_above_bars(text: str, stream: TextIO) -> None:
    """Write a line without tearing a bar on the same terminal; `Log(write=write_above_bars)`."""
    tqdm.write(text, file=stream)
    stream.flush()


class Progress:
    """A bar from `done` to `total`; silent unless `is_shown` and `stream` is a terminal.

    Give `is_shown` as "this is the speaking rank". The stream defaults to standard error.
    """

    def __init__(
        self, total: int, done: int = 0, unit: str = "it", is_shown: bool = True, stream: TextIO | None = None
    ) -> None:
        stream = stream or sys.stderr
        self.is_shown = is_shown and is_terminal(stream)
        self._bar: tqdm[NoReturn] = tqdm(
            total=total,
            initial=done,
            unit=unit,
            disable=not self.is_shown,
            file=stream,
            dynamic_ncols=True,
            leave=False,
        )

    def advance(self, count: int = 1, **figures: float) -> None:
        """Move on by `count` and show the figures at the end of the bar."""
        if figures:
            self._bar.set_postfix({name: f"{value:.4g}" for name, value in figures.items()}, refresh=False)
        self._bar.update(count)

    def close(self) -> None:
        """Take the bar away."""
        self._bar.close()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
