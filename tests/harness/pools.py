"""Worker pools of 2, 4 and 8 processes that live as long as the test session.

`pools.run(layout, function, *args)` calls `function(ctx, *args)` on every rank and returns the list of results. The
parent waits on pipes and on the processes themselves with a limit on the wall clock. After an exception, a death or a
hang it kills its own workers and starts new ones at the next call.
"""

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from megatron_parm.parallel.context import ParallelContext
from tests.harness import worker
from tests.harness.layouts import POOL_SIZES, Layout
from tests.harness.wire import pack, unpack

GROUP_TIMEOUT_S = 60.0  # a collective that some rank never joins
CALL_LIMIT_S = 120.0  # one call, from sending it to the last answer
GRACE_S = 1.0  # after the first failure the other ranks may still answer with theirs
LOG_TAIL_BYTES = 2000
# Imported once, before any process is forked: torch, what use_deterministic_algorithms imports when it is called, what
# test modules import, and whole runs (torch's pipelining alone takes two seconds).
PRELOAD = [
    "torch",
    "torch.distributed",
    worker.__name__,
    "torch._inductor.config",
    "pytest",
    "hypothesis",
    "megatron_parm.training.entrance",
    "tests.training.runs",
]


class WorkerError(AssertionError):
    """A call failed in some workers. `failures` maps each failed rank to its traceback or to what happened to it."""

    def __init__(self, call: str, failures: Mapping[int, str]) -> None:
        self.failures = dict(failures)
        told = "\n".join(f"--- rank {rank}: {text}" for rank, text in sorted(self.failures.items()))
        super().__init__(f"{call} failed on ranks {sorted(self.failures)}\n{told}")


class Pool:
    """`world` workers in one gloo group, started at the first call."""

    def __init__(
        self, world: int, group_timeout_s: float = GROUP_TIMEOUT_S, call_limit_s: float = CALL_LIMIT_S
    ) -> None:
        self.world = world
        self.group_timeout_s = group_timeout_s
        self.call_limit_s = call_limit_s
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._processes: list[ForkServerProcess] = []
        self._connections: list[Connection[Any, Any]] = []

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """`function(ctx, *args, **kwargs)` on every rank with no axis but dp and edp; the results in rank order."""
        return self.run_layout(Layout(self.world), function, *args, **kwargs)

    def run_layout(self, layout: Layout, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """The same with the context of `layout`. Raises WorkerError if a rank raises, dies or answers too late."""
        if layout.world != self.world:
            raise ValueError(f"layout {layout} does not have the {self.world} ranks of this pool")
        message = pack((layout, function, args, kwargs))
        if not self._processes:
            self._start()
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        try:
            for connection in self._connections:
                with suppress(BrokenPipeError, ConnectionResetError):  # died after its last call; seen below
                    connection.send_bytes(message)
            self._collect(answers, failures)
        except BaseException:  # KeyboardInterrupt, pytest-timeout: the workers are out of step now
            self.kill()
            raise
        if failures:
            self.kill()
            raise WorkerError(f"{getattr(function, '__qualname__', function)} on {layout}", failures)
        return [answers[rank] for rank in range(self.world)]

    def _start(self) -> None:
        start = multiprocessing.get_context("forkserver")
        start.set_forkserver_preload(PRELOAD)
        self._folder = tempfile.TemporaryDirectory(prefix="pool")
        folder = Path(self._folder.name)
        for rank in range(self.world):
            ours, theirs = start.Pipe()
            process = start.Process(
                target=worker.work,
                args=(rank, self.world, str(folder / "store"), str(self._log(rank)), self.group_timeout_s, theirs),
                daemon=True,
            )
            process.start()
            theirs.close()  # so that a worker's end, and ours, show as closed pipes
            self._processes.append(process)
            self._connections.append(ours)

    def _collect(self, answers: dict[int, Any], failures: dict[int, str]) -> None:
        deadline = time.monotonic() + self.call_limit_s
        reason = f"no answer within {self.call_limit_s:g} s"
        waiting = set(range(self.world))
        failing = False
        while waiting:
            by_source: dict[Any, int] = {self._connections[rank]: rank for rank in waiting}
            by_source |= {self._processes[rank].sentinel: rank for rank in waiting}
            ready = wait(list(by_source), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                failures.update({rank: reason + self._log_tail(rank) for rank in waiting})
                return
            for rank in sorted({by_source[source] for source in ready}):
                waiting.discard(rank)
                self._take(rank, answers, failures)
            if failures and not failing:
                failing = True
                deadline = min(deadline, time.monotonic() + GRACE_S)
                reason = f"still running {GRACE_S:g} s after another rank had failed"

    def _take(self, rank: int, answers: dict[int, Any], failures: dict[int, str]) -> None:
        try:
            kind, value = unpack(self._connections[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(GRACE_S)
            failures[rank] = f"the worker died, exit code {self._processes[rank].exitcode}" + self._log_tail(rank)
            return
        if kind == "ok":
            answers[rank] = value
        else:
            failures[rank] = value

    def _log(self, rank: int) -> Path:
        assert self._folder is not None
        return Path(self._folder.name) / f"rank{rank}.log"

    def _log_tail(self, rank: int) -> str:
        path = self._log(rank)
        text = path.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace") if path.exists() else ""
        return f"; it printed last:\n{text}" if text else ""

    def kill(self) -> None:
        """End the workers of this pool; the next call starts new ones."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes.clear()
        self._connections.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


class Pools:
    """The pools of a session by size: `pools[4].run(function, ...)`, `pools.run(layout, function, ...)`."""

    def __init__(self) -> None:
        self._pools = {world: Pool(world) for world in POOL_SIZES}

    def __getitem__(self, world: int) -> Pool:
        return self._pools[world]

    def run(self, layout: Layout, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """`function(ctx, *args, **kwargs)` on every rank of `layout`; the results in rank order.

        `function` stands at the top level of its module. World 1 runs in this process (an exception arrives as it is).
        """
        if layout.world > 1:
            return self._pools[layout.world].run_layout(layout, function, *args, **kwargs)
        args, kwargs = unpack(pack((args, kwargs)))  # as on several ranks: values, never our own objects
        with worker.clean_state():
            return [unpack(pack(function(ParallelContext.single(), *args, **kwargs)))]

    def close(self) -> None:
        """End all workers."""
        for pool in self._pools.values():
            pool.kill()
