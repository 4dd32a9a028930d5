"""What a rank did when, as named spans on lanes; nothing is recorded unless a run asks for it. Floor 2.

A `Trace` records nothing and costs one look at `is_recording`; a `Recording` keeps spans while it is told to. It
travels on every `Axis`, so whoever sends or computes can note its time without knowing who asked. The lane `COMPUTE`
holds what the program did; every axis has a lane of its own for what is in flight. The files are written by
`trace_files.py`.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

COMPUTE = "compute"
Detail = str | int | float


@dataclass(frozen=True)
class Span:
    """One thing on a lane, in nanoseconds of this rank's clock. kind: `compute`, `wait` or `collective`."""

    lane: str
    name: str
    kind: str
    start_ns: int
    end_ns: int
    about: dict[str, Detail] = field(default_factory=dict)


class Trace:
    """The trace that records nothing."""

    @property
    def is_recording(self) -> bool:
        """Whether what is given to the trace is kept."""
        return False

    def now_ns(self) -> int:
        """This rank's clock."""
        return time.perf_counter_ns()

    def add(self, lane: str, name: str, kind: str, start_ns: int, end_ns: int, **about: Detail) -> None:
        """Note a span that has ended."""

    def span(self, name: str, kind: str = COMPUTE, **about: Detail) -> AbstractContextManager[None]:
        """The block as a span on the lane `COMPUTE`."""
        return nullcontext()


class Recording(Trace):
    """Keeps spans between `start` and `stop`."""

    def __init__(self, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock_ns = clock_ns
        self._is_on = False
        self._spans: list[Span] = []

    @property
    def is_recording(self) -> bool:
        """True between `start` and `stop`."""
        return self._is_on

    @property
    def spans(self) -> list[Span]:
        """What was recorded, in the order in which it ended."""
        return list(self._spans)

    def start(self) -> None:
        """Keep what comes."""
        self._is_on = True

    def stop(self) -> None:
        """Keep what there is, and nothing more."""
        self._is_on = False

    def now_ns(self) -> int:
        """The clock that was given."""
        return self._clock_ns()

    def add(self, lane: str, name: str, kind: str, start_ns: int, end_ns: int, **about: Detail) -> None:
        """Note a span that has ended."""
        if self._is_on:
            self._spans.append(Span(lane, name, kind, start_ns, end_ns, about))

    def span(self, name: str, kind: str = COMPUTE, **about: Detail) -> AbstractContextManager[None]:
        """The block as a span on the lane `COMPUTE`, also when it raises."""
        return self._timed(name, kind, about) if self._is_on else nullcontext()

    @contextmanager
    def _timed(self, name: str, kind: str, about: dict[str, Detail]) -> Iterator[None]:
        started = self.now_ns()
        try:
            yield
        finally:
            self.add(COMPUTE, name, kind, started, self.now_ns(), **about)


NO_TRACE = Trace()
