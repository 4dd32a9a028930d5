"""Builds and removes the namespaces of an emulated cluster, and finds those that a killed run left behind.

Every name carries its owner, the process id and start time of the tool, so emulations run side by side, and what is
left of a dead owner can be told from what a living one uses.
"""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from tools.cluster import topology
from tools.cluster.topology import PREFIX, Cluster

NAMESPACES = Path("/run/netns")
PROCESSES = Path("/proc")


class NetworkError(RuntimeError):
    """The kernel or iproute2 refused a step; the message holds their words."""


def what_is_missing() -> str | None:
    """Why no cluster can be emulated here, in one line; None if it can be tried."""
    lacking = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if os.geteuid() != 0:
        return "it makes network namespaces, so it needs root: run it with sudo or in a privileged container"
    if lacking:
        return f"it needs iproute2, and {' and '.join(lacking)} cannot be found: apt-get install iproute2"
    trial = f"{PREFIX}-{own_name()}-trial"
    try:
        run_iproute(["ip", "netns", "add", trial])
        run_iproute(["ip", "netns", "del", trial])
    except NetworkError as error:
        return f"root may not make network namespaces here (in a container: start it with --privileged): {error}"
    return None


def start_time(pid: int) -> str | None:
    """When a process started, in the kernel's ticks; None if there is no such process. With the pid it is unique."""
    try:
        # The name, in parentheses, may hold anything; the fields after it begin with the third.
        fields = (PROCESSES / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def own_name() -> str:
    """The owner of what this process makes."""
    return f"{os.getpid()}-{start_time(os.getpid())}"


def build(cluster: Cluster) -> None:
    """Make every namespace, link and limit. Raises NetworkError; what was made until then is left to `remove`."""
    _batch("ip", topology.namespace_lines(cluster))
    run_iproute(["ip", "netns", "exec", cluster.switch, "sh", "-c", topology.SETTLE_SWITCH])
    _batch("ip", topology.switch_lines(cluster), cluster.switch)
    _batch("tc", topology.switch_buckets(cluster), cluster.switch)

    def furnish(rank: int) -> None:
        _batch("ip", topology.rank_lines(cluster, rank), cluster.namespace(rank))
        _batch("tc", topology.rank_buckets(cluster), cluster.namespace(rank))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(furnish, range(cluster.world)))


def remove(namespaces: Iterable[str]) -> None:
    """Kill what still runs in these namespaces and remove them, those that exist."""
    present = [name for name in namespaces if (NAMESPACES / name).exists()]
    for pid in processes_inside(present):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if present:
        _batch("ip", [f"netns del {name}" for name in present])


def processes_inside(namespaces: Sequence[str]) -> list[int]:
    """The processes in any of these namespaces."""
    places = {(found.st_dev, found.st_ino) for found in (os.stat(NAMESPACES / name) for name in namespaces)}
    inside = []
    for process in PROCESSES.glob("[0-9]*"):
        with suppress(OSError):
            found = os.stat(process / "ns" / "net")
            if (found.st_dev, found.st_ino) in places:
                inside.append(int(process.name))
    return inside


def remove_leftovers() -> list[str]:
    """Remove the namespaces of owners that live no more, with the processes in them; returns their names."""
    names = sorted(path.name for path in NAMESPACES.glob(f"{PREFIX}-*")) if NAMESPACES.exists() else []
    left = [name for name in names if _is_orphan(name)]
    remove(left)
    return left


def _is_orphan(name: str) -> bool:
    found = re.fullmatch(rf"{PREFIX}-(\d+)-(\d+)-\w+", name)
    return found is not None and start_time(int(found[1])) != found[2]


def _batch(program: str, lines: Iterable[str], namespace: str | None = None) -> None:
    """Feed lines to `ip -batch` or `tc -batch`."""
    place = ["-n", namespace] if namespace else []
    run_iproute([program, *place, "-batch", "-"], "".join(f"{line}\n" for line in lines))


def run_iproute(command: list[str], text: str = "") -> str:
    """Run a command of iproute2 with `text` as its input; returns what it printed. Raises NetworkError.

    It has a session of its own, for Ctrl-C in a terminal must not break the removal of the network.
    """
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, start_new_session=True)
    if done.returncode != 0:
        words = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        found = re.search(r"Command failed -:(\d+)", words)
        step = text.splitlines()[int(found[1]) - 1] if found else ""
        raise NetworkError(f"`{' '.join([*command[:3], step]).strip()}` failed: {words}")
    return done.stdout
