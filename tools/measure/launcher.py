"""How a program is started on every rank: on an emulated cluster of this machine, or by torchrun on real nodes."""

import argparse
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_parm.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
EMULATED = re.compile(r"emulated-(?:(\d+)x)?(\d+)")
LAST_CHARACTERS = 2000
# the last line of a traceback, or a message of ours: the first is the cause, later ones are echoes on other ranks
CAUSE = re.compile(r"\s*(\[rank\d+\]:\s*)?(error: |[\w.]*(Error|Exception)\b: )")


@dataclass(frozen=True)
class Launcher:
    """A cluster: `nodes` of `ranks_per_node` ranks. `command` starts one program on all of its ranks.

    On real nodes the same launches run on each node in the same order; `is_first` on the one that writes.
    """

    nodes: int
    ranks_per_node: int
    prefix: tuple[str, ...]
    links: str
    is_first: bool = True
    is_emulated: bool = True

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.nodes * self.ranks_per_node

    @property
    def name(self) -> str:
        """As it is shown."""
        kind = "emulated " if self.is_emulated else ""
        return f"{kind}{self.nodes} x {self.ranks_per_node} ranks, {self.links}"

    def command(self, python: str, script: str, arguments: Sequence[str]) -> list[str]:
        """The command line that runs `script` under the interpreter `python` on every rank."""
        return [*self.prefix, python, script, *arguments]


def add_cluster_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that `launcher_of` reads."""
    group = parser.add_argument_group("cluster")
    group.add_argument(
        "--cluster",
        default="emulated-2x4",
        help="emulated-8 (one node), emulated-2x4, emulated-8x4 or any emulated-NODESxRANKS, or torchrun (default: "
        "emulated-2x4)",
    )
    group.add_argument("--intra", default="1gbit", help="emulated: rate of a rank's link (default 1gbit)")
    group.add_argument("--inter", default="300mbit", help="emulated: rate of a node's uplink (default 300mbit)")
    group.add_argument("--nodes", type=int, default=1, help="torchrun: nodes (default 1)")
    group.add_argument("--ranks-per-node", type=int, default=8, help="torchrun: ranks on each (default 8)")
    group.add_argument("--node-rank", type=int, default=0, help="torchrun: place of this node (default 0)")
    group.add_argument("--master-addr", help="torchrun: the first node; needed where there are several")
    group.add_argument("--master-port", type=int, default=29500, help="torchrun: a free port there (default 29500)")


def launcher_of(flags: argparse.Namespace) -> Launcher:
    """The cluster that the flags name. Raises ConfigError."""
    if flags.cluster == "torchrun":
        return _torchrun(flags)
    found = EMULATED.fullmatch(flags.cluster)
    if found is None:
        raise ConfigError(
            f"--cluster {flags.cluster}: not known; use emulated-8, emulated-2x4, emulated-8x4 or torchrun"
        )
    nodes, ranks = int(found[1] or 1), int(found[2])
    prefix = [sys.executable, str(ROOT / "tools/emulated_cluster.py"), "--nodes", str(nodes)]
    prefix += ["--ranks-per-node", str(ranks), "--intra", flags.intra, "--inter", flags.inter, "--no-python", "--"]
    links = f"{flags.intra} a rank" + (f", {flags.inter} a node" if nodes > 1 else "")
    return Launcher(nodes, ranks, tuple(prefix), links)


def _torchrun(flags: argparse.Namespace) -> Launcher:
    for name in ("nodes", "ranks_per_node"):
        if getattr(flags, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(flags, name)} must be at least 1")
    prefix = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(flags.ranks_per_node)]
    if flags.nodes == 1:
        prefix += ["--standalone"]
    elif flags.master_addr is None:
        raise ConfigError(f"--nodes {flags.nodes} needs --master-addr, the name of the first node")
    else:
        prefix += ["--nnodes", str(flags.nodes), "--node-rank", str(flags.node_rank)]
        prefix += ["--master-addr", flags.master_addr, "--master-port", str(flags.master_port)]
    return Launcher(
        flags.nodes,
        flags.ranks_per_node,
        (*prefix, "--no-python"),
        "its own links",
        is_first=flags.node_rank == 0,
        is_emulated=False,
    )


def run_quietly(command: Sequence[str], seconds: float, shown: re.Pattern[str] | None = None) -> str | None:
    """Run a command; None if it ended well, else the last of what it said. Lines that match `shown` are printed."""
    said: list[str] = []
    late = threading.Event()
    # its own session would outlive Ctrl-C: the launchers end their ranks themselves
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:

        def stop() -> None:
            late.set()
            process.terminate()  # the launcher ends its ranks and removes its network

        watch = threading.Timer(seconds, stop)
        watch.start()
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            if shown is not None and shown.match(line):
                print(line, end="", flush=True)
        process.wait()
        watch.cancel()
    text = "".join(said)
    if late.is_set():
        return f"no end after {seconds:.0f} s\n{text[-LAST_CHARACTERS:]}"
    if process.returncode == 0:
        return None
    causes = [line.rstrip() for line in said if CAUSE.match(line) and "ChildFailedError" not in line]
    return "\n".join([f"exit code {process.returncode}", text[-LAST_CHARACTERS:], *causes[:1]])
