"""Wall-clock spans by name, and the clock of training steps. Floor 2.

A device computes behind the program's back, so both wait for it through `synchronise` before they read the clock:
`device_synchroniser(device)` in a run, nothing in a unit test. Neither reads or changes anything else.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch


def do_nothing() -> None:
    """The synchronisation of a program whose work is done when the call returns."""


def device_synchroniser(device: torch.device) -> Callable[[], None]:
    """A callable that waits for all work queued on `device`; on a CPU it returns at once."""
    if device.type == "cpu":
        return do_nothing
    module = torch.get_device_module(device)
    return lambda: module.synchronize(device)


class Timers:
    """Adds up the time of named spans: `with timers.span("optimizer"): ...`.

    level: spans of a finer level cost nothing and count nothing (--timing-log-level; 0: no span at all, 1: the parts of
    a step, 2: the parts of those). align: called before each span of level 1, so that no rank's waiting for another
    falls into it.
    """

    def __init__(
        self,
        level: int = 0,
        synchronise: Callable[[], None] = do_nothing,
        align: Callable[[], None] = do_nothing,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.level = level
        self._synchronise = synchronise
        self._align = align
        self._clock = clock
        self._totals_ms: dict[str, float] = {}

    @contextmanager
    def span(self, name: str, level: int = 1) -> Iterator[None]:
        """Count the time of the block under `name`, also when the block raises."""
        if level > self.level:
            yield
            return
        if level == 1:
            self._align()
        self._synchronise()
        started = self._clock()
        try:
            yield
        finally:
            self._synchronise()
            elapsed_ms = (self._clock() - started) * 1000.0
            self._totals_ms[name] = self._totals_ms.get(name, 0.0) + elapsed_ms

    def drain(self) -> dict[str, float]:
        """Milliseconds of each name since the last drain, in the order of first visits; counting starts at zero."""
        totals, self._totals_ms = self._totals_ms, {}
        return totals


def table_of(ranks: Sequence[Mapping[str, float]], num_iterations: int) -> dict[str, tuple[float, ...]]:
    """From what each rank drained after `num_iterations`: milliseconds an iteration of every name, by rank."""
    names = dict.fromkeys(name for spans in ranks for name in spans)
    return {name: tuple(spans.get(name, 0.0) / num_iterations for spans in ranks) for name in names}


class StepClock:
    """Measures training steps and leaves out what is not training: evaluation, saving, drawing.

    `with clock.paused(): evaluate()` takes the block out of the step it falls in, so that the iteration after an
    evaluation is not slower on paper. Pauses may nest.
    """

    def __init__(
        self, synchronise: Callable[[], None] = do_nothing, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._synchronise = synchronise
        self._clock = clock
        self._depth = 0
        self._counted = 0.0
        self._running_since = self._now()

    def _now(self) -> float:
        self._synchronise()
        return self._clock()

    def restart(self) -> None:
        """Forget the time so far: the step begins now."""
        self._counted = 0.0
        self._running_since = self._now()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the block out of the step's time, also when it raises."""
        if self._depth == 0:
            self._counted += self._now() - self._running_since
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._running_since = self._now()

    def lap_ms(self) -> float:
        """Milliseconds of training since the last lap or restart; the next lap begins now."""
        if self._depth == 0:
            now = self._now()
            self._counted += now - self._running_since
            self._running_since = now
        elapsed_ms = self._counted * 1000.0
        self._counted = 0.0
        return elapsed_ms
