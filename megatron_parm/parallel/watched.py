"""Notes in the trace when a collective was on the wire, and how long the program stood still for it. Floor 3.

A collective is a span on the lane of its axis, from its start until it was done; on the compute lane stands `wait`
while the program could do nothing else. gloo tells when a collective is done; on an accelerator, whose work the program
does not see, a collective ends when the wait for it returns.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch.distributed as dist

from megatron_parm.observe.trace import COMPUTE
from megatron_parm.parallel.context import Axis


class Waitable(Protocol):
    """A collective that was started."""

    def wait(self) -> bool:
        """Return when it is done."""


class _WatchedWork:
    """`work`, noted in the trace of `axis` when it is waited for."""

    def __init__(self, work: dist.Work, operation: str, axis: Axis, size_bytes: int) -> None:
        self._work = work
        self._operation = operation
        self._axis = axis
        self._bytes = size_bytes
        self._started = axis.trace.now_ns()
        self._done: int | None = None
        if dist.get_backend(axis.group) == "gloo":
            work.get_future().add_done_callback(self._note_done)

    def _note_done(self, _future: object) -> None:
        self._done = self._axis.trace.now_ns()

    def wait(self) -> bool:
        trace, axis = self._axis.trace, self._axis
        waited_since = trace.now_ns()
        is_done = self._work.wait()
        now = trace.now_ns()
        done = now if self._done is None else min(self._done, now)
        trace.add(axis.name, self._operation, "collective", self._started, done, bytes=self._bytes, ranks=axis.size)
        trace.add(COMPUTE, f"wait {self._operation}/{axis.name}", "wait", waited_since, now)
        return bool(is_done)


def watched(work: dist.Work, operation: str, axis: Axis, size_bytes: int) -> Waitable:
    """`work`, whose wait notes it in the trace where there is one. size_bytes: of the larger buffer of this rank."""
    return _WatchedWork(work, operation, axis, size_bytes) if axis.trace.is_recording else work


def watching(operation: str, axis: Axis, size_bytes: int) -> AbstractContextManager[None]:
    """The block is a collective for which the program waits; noted in the trace where there is one."""
    return _noted(operation, axis, size_bytes) if axis.trace.is_recording else nullcontext()


@contextmanager
def _noted(operation: str, axis: Axis, size_bytes: int) -> Iterator[None]:
    trace, started = axis.trace, axis.trace.now_ns()
    yield
    done = trace.now_ns()
    trace.add(axis.name, operation, "collective", started, done, bytes=size_bytes, ranks=axis.size)
    trace.add(COMPUTE, f"wait {operation}/{axis.name}", "wait", started, done)
