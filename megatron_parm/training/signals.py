"""Requests to stop: a signal, a time budget, an iteration to exit at. Floor 7.

A signal may reach one rank only, so each rank's wish is summed over the world once per step and all stop at the same
iteration.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from megatron_parm.parallel import transport
from megatron_parm.parallel.context import ParallelContext

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequests:
    """Why the run should stop after the current step, agreed by all ranks."""

    def __init__(self, ctx: ParallelContext, *, exit_interval: int | None, duration_minutes: float | None) -> None:
        self._ctx = ctx
        self._exit_interval = exit_interval
        self._duration_minutes = duration_minutes
        self._started = time.monotonic()
        self._received: int | None = None

    @contextmanager
    def watching(self, *, is_enabled: bool) -> Iterator[None]:
        """Note SIGTERM and SIGUSR1 instead of dying of them, while inside and if enabled."""
        if not is_enabled:
            yield
            return
        before = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._received = number

    @property
    def was_signalled(self) -> bool:
        """Whether this rank has received a signal."""
        return self._received is not None

    def reason_at(self, iteration: int) -> str | None:
        """Why to stop after `iteration`, or None. The same on all ranks; call on all of them after every step."""
        minutes = (time.monotonic() - self._started) / 60
        is_late = self._duration_minutes is not None and minutes > self._duration_minutes
        wishes = torch.tensor([float(self.was_signalled), float(is_late)], device=self._ctx.device)
        signalled, late = transport.sum_over(wishes, self._ctx.world).tolist()
        if signalled:
            return "exiting after a termination signal"
        if late:
            return f"exiting after {self._duration_minutes:g} minutes (--exit-duration-in-mins)"
        if self._exit_interval is not None and iteration % self._exit_interval == 0:
            return f"exiting at iteration {iteration} (--exit-interval {self._exit_interval})"
        return None
