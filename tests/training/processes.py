"""Runs as real processes, one for each rank, each with an environment, an exit code and output of its own.

The processes are forked from the pools' server, where torch is loaded already, and are told their places as torchrun
would tell them. What they run is `pretrain`, the whole of pretrain_gpt.py, or the `main` of a tool.
"""

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch

from megatron_parm.training.entrance import pretrain
from tests.harness.pools import PRELOAD

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SETTLE_SECONDS = 60.0  # after this a test has failed


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _nothing() -> None:
    """The life of a process that only waits until the server has imported what it preloads."""


@cache
def _start_server() -> None:
    """Fork once, so that the import of torch is in no measured time."""
    start = multiprocessing.get_context("forkserver")
    start.set_forkserver_preload(PRELOAD)
    first = start.Process(target=_nothing)
    first.start()
    first.join()


def _life(
    rank: int,
    world: int,
    port: int,
    argv: list[str],
    log: str,
    fault: "Callable[[int], Any] | None",
    main: Callable[[list[str]], int],
) -> None:
    with Path(log).open("ab", buffering=0) as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    values = (rank, world, rank, world, "127.0.0.1", port)
    os.environ.update({name: str(value) for name, value in zip(LAUNCHER_VARIABLES, values, strict=True)})
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    # what a shell starts in the background ignores the keyboard's signal, and so would this process
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with nullcontext() if fault is None else fault(rank):
        code = main(argv)
    sys.exit(code)


class Ranks:
    """The processes of one run."""

    def __init__(
        self,
        argv: Sequence[Sequence[str]],
        folder: Path,
        fault: "Callable[[int], Any] | None" = None,
        port: int | None = None,
        main: Callable[[list[str]], int] = pretrain,
    ) -> None:
        _start_server()
        start = multiprocessing.get_context("forkserver")
        folder.mkdir(parents=True, exist_ok=True)
        self.port = port or free_port()
        self.started = time.monotonic()
        self._logs = [folder / f"rank{rank}.txt" for rank in range(len(argv))]
        self.processes: list[ForkServerProcess] = []
        for rank, own in enumerate(argv):
            arguments = (rank, len(argv), self.port, list(own), str(self._logs[rank]), fault, main)
            self.processes.append(start.Process(target=_life, args=arguments))
            self.processes[-1].start()

    def wait(self, seconds: float = SETTLE_SECONDS) -> list[int | None]:
        """Exit codes when all have ended, None for one that did not within `seconds`."""
        deadline = time.monotonic() + seconds
        while alive := [process.sentinel for process in self.processes if process.is_alive()]:
            if not wait(alive, timeout=max(0.0, deadline - time.monotonic())):
                break
        return [process.exitcode for process in self.processes]

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self.started

    def output(self, rank: int) -> str:
        """What a rank has printed so far."""
        return self._logs[rank].read_text() if self._logs[rank].exists() else ""

    @property
    def outputs(self) -> str:
        """What all have printed."""
        return "".join(self.output(rank) for rank in range(len(self._logs)))

    def wait_for(self, happened: Callable[[], bool], seconds: float = SETTLE_SECONDS) -> None:
        """Wait until `happened()`, while the processes run."""
        deadline = time.monotonic() + seconds
        while not happened():
            assert time.monotonic() < deadline and any(p.is_alive() for p in self.processes), self.outputs[-3000:]
            time.sleep(0.02)


@contextmanager
def ranks(
    world: int,
    argv: Sequence[str] | Sequence[Sequence[str]],
    folder: Path,
    fault: "Callable[[int], Any] | None" = None,
    port: int | None = None,
    main: Callable[[list[str]], int] = pretrain,
) -> Iterator[Ranks]:
    """Processes with these flags, or with flags of their own each; none outlives the block."""
    each = [argv] * world if argv and isinstance(argv[0], str) else argv
    running = Ranks(each, folder, fault, port, main)  # type: ignore[arg-type]  # told apart above
    try:
        yield running
    finally:
        for process in running.processes:
            process.kill()
            process.join()
