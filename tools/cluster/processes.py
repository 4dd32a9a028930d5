"""Starts the ranks of an emulated cluster, keeps what they print, and ends all of them after the first failure.

One loop waits for everything at once: the end of a rank, output of rank 0, a signal, the next moment of the clock.
Between these it sleeps, for the ranks need the processors.
"""

import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tools.cluster.topology import Cluster, rank_command

LAST_LINES = 20
TIMED_OUT = 124  # as timeout(1) says it
STOPPING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Ending:
    """How a run ended: the exit code to hand on, and the reason where it is not 0."""

    exit_code: int
    reason: str = ""


@dataclass
class Signals:
    """The stopping signals received so far; `fd` becomes readable with each."""

    fd: int
    received: list[signal.Signals] = field(default_factory=list)

    def drain(self) -> None:
        """Make `fd` unreadable until the next signal."""
        with suppress(BlockingIOError):
            os.read(self.fd, 4096)


@contextmanager
def watch_signals() -> Iterator[Signals]:
    """Note stopping signals instead of dying of them, so that nothing interrupts the removal of the network."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    signals = Signals(reading)
    before = {
        number: signal.signal(number, lambda got, _: signals.received.append(signal.Signals(got)))
        for number in STOPPING_SIGNALS
    }
    wakeup_before = signal.set_wakeup_fd(writing)
    try:
        yield signals
    finally:
        signal.set_wakeup_fd(wakeup_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reading)
        os.close(writing)


def log_path(folder: Path, rank: int) -> Path:
    """The file of all that a rank printed."""
    return folder / f"rank_{rank}.log"


def last_lines(path: Path) -> str:
    """The end of a log."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 100_000))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-LAST_LINES:])


def exit_code_of(returncode: int) -> int:
    """A shell's number: 128 + signal for a process that a signal ended."""
    return 128 - returncode if returncode < 0 else returncode


class Ranks:
    """The processes of a run. `wait` serves output and signals; `close` leaves nothing running."""

    def __init__(self, cluster: Cluster, folder: Path, signals: Signals) -> None:
        self.cluster, self.folder, self.signals = cluster, folder, signals
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        self.failed: dict[int, int] = {}  # rank -> exit code, in the order in which they ended
        self._selector = selectors.DefaultSelector()
        self._pipes: dict[int, Callable[[], None]] = {}

    def start(self, command: list[str]) -> None:
        """Start every rank, as long as no signal stops it; each dies with the tool, should that be killed."""
        self._selector.register(self.signals.fd, selectors.EVENT_READ, self.signals.drain)
        setpriv = shutil.which("setpriv")
        bound = [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []
        for rank in range(self.cluster.world):
            if self.signals.received:
                return
            with log_path(self.folder, rank).open("wb") as log:
                process = subprocess.Popen(
                    bound + rank_command(self.cluster, rank, command),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE if rank == 0 else log,
                    stderr=subprocess.PIPE if rank == 0 else log,
                    start_new_session=True,  # Ctrl-C reaches the tool alone, and the tool tells the ranks
                )
            self.running[rank] = process
            self._notice_end(rank, process)
            if process.stdout and process.stderr:
                self._copy(os.dup(process.stdout.fileno()), log_path(self.folder, rank), sys.stdout.fileno())
                self._copy(os.dup(process.stderr.fileno()), log_path(self.folder, rank), sys.stderr.fileno())
                process.stdout.close()
                process.stderr.close()

    def _notice_end(self, rank: int, process: "subprocess.Popen[bytes]") -> None:
        handle = os.pidfd_open(process.pid)

        def ended() -> None:
            self._selector.unregister(handle)
            os.close(handle)
            del self.running[rank]
            if process.wait() != 0:
                self.failed[rank] = exit_code_of(process.returncode)

        self._selector.register(handle, selectors.EVENT_READ, ended)

    def _copy(self, pipe: int, path: Path, screen: int) -> None:
        """Copy what comes out of a pipe to a log and to the screen, as long as there is one."""
        os.set_blocking(pipe, False)
        log = os.open(path, os.O_WRONLY | os.O_APPEND)
        targets = [log, screen]

        def copy() -> None:
            with suppress(BlockingIOError):
                while data := os.read(pipe, 1 << 16):
                    for target in list(targets):
                        try:
                            _write_all(target, data)
                        except BrokenPipeError:
                            targets.remove(target)  # as of `| head`; the log goes on
                self._selector.unregister(pipe)
                del self._pipes[pipe]
                os.close(pipe)
                os.close(log)

        self._pipes[pipe] = copy
        self._selector.register(pipe, selectors.EVENT_READ, copy)

    def wait(self, until: float) -> None:
        """Return after an event, or when the monotonic clock shows `until`."""
        patience = None if until == float("inf") else max(0.0, until - time.monotonic())
        for key, _ in self._selector.select(patience):
            key.data()

    def wait_for_all(self, seconds: float) -> None:
        """Wait until every rank has ended, for some time at most; a stopping signal cuts it short."""
        until, so_far = time.monotonic() + seconds, len(self.signals.received)
        while self.running and time.monotonic() < until and len(self.signals.received) == so_far:
            self.wait(until)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to every rank that runs."""
        for process in self.running.values():
            process.send_signal(number)

    def close(self) -> None:
        """Kill the ranks that still run and copy the rest of the output."""
        self.send(signal.SIGKILL)
        while self.running:
            self.wait(float("inf"))
        for copy in list(self._pipes.values()):
            copy()
        self._selector.close()


def _write_all(target: int, data: bytes) -> None:
    while data:
        data = data[os.write(target, data) :]


def run_ranks(
    cluster: Cluster, command: list[str], folder: Path, signals: Signals, timeout: float, grace: float
) -> Ending:
    """Run `command` as every rank until all have ended.

    After the first failure the others have `grace` seconds to end by themselves. Then, and at once after a stopping
    signal or at the time limit, they get SIGTERM, and after `grace` more seconds SIGKILL. A signal cuts a wait short.
    """
    ranks = Ranks(cluster, folder, signals)
    until = time.monotonic() + timeout
    try:
        ranks.start(command)
        while ranks.running and not ranks.failed and not signals.received and time.monotonic() < until:
            ranks.wait(until)
        stopped_by = signals.received[0] if signals.received else None
        late = [] if ranks.failed else sorted(ranks.running)
        if ranks.failed and not stopped_by:
            ranks.wait_for_all(grace)
        if ranks.running:
            ended_alone = dict(ranks.failed)
            ranks.send(signal.SIGTERM)
            ranks.wait_for_all(grace)
        else:
            ended_alone = ranks.failed
    finally:
        ranks.close()
    if stopped_by:
        return Ending(128 + stopped_by, f"stopped by {stopped_by.name}")
    if ended_alone:
        return _failure(cluster, folder, ended_alone)
    if late:
        return Ending(TIMED_OUT, f"no end after {timeout:g} s; still running: rank {', '.join(map(str, late))}")
    return Ending(0)


def _failure(cluster: Cluster, folder: Path, failed: dict[int, int]) -> Ending:
    rank, code = next(iter(failed.items()))
    lines = [f"rank {rank} (node {cluster.node_of(rank)}) failed first, exit code {code}"]
    lines[0] += f" (killed by {signal.Signals(code - 128).name})" if code > 128 and _is_signal(code - 128) else ""
    if len(failed) > 1:
        lines.append("then " + ", ".join(f"rank {other}: {failed[other]}" for other in list(failed)[1:]))
    path = log_path(folder, rank)
    lines += [f"the last lines of {path}:", last_lines(path)]
    return Ending(code, "\n".join(lines))


def _is_signal(number: int) -> bool:
    return number in {int(known) for known in signal.Signals}
