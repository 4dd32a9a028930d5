#!/usr/bin/env python3
"""Run a script on an emulated cluster of slow links: every rank in a network namespace of its own, on this machine.

    python tools/emulated_cluster.py --nodes 2 --ranks-per-node 4 --intra 1gbit --inter 300mbit -- SCRIPT ARGS

Each rank has a link of --intra to its node's switch, each node one of --inter to the switch between the nodes, both
ways and full duplex; there is no added latency. SCRIPT runs under this Python as under torchrun: RANK, WORLD_SIZE,
LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK (the node), MASTER_ADDR and MASTER_PORT are set, and OMP_NUM_THREADS=1 unless
it is set already. Rank 0 writes to the screen and every rank to DIR/rank_R.log. The exit code is that of the rank that
failed first, 124 after --timeout, 130 after Ctrl-C, 2 if the cluster cannot be emulated here. At the end a table shows
the bytes on every link. Needs root and iproute2; no packet leaves the machine, and nothing of it stays.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.cluster.counters import as_json, as_table, read_traffic
from tools.cluster.network import NetworkError, build, own_name, remove, remove_leftovers, what_is_missing
from tools.cluster.processes import Ending, Signals, run_ranks, watch_signals
from tools.cluster.topology import MOST_NODES, MOST_RANKS_PER_NODE, Cluster, Rate, parse_rate


def read_options(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; exits with code 2 and a message for a wrong one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage="%(prog)s [OPTIONS] -- SCRIPT"
    )
    parser.add_argument("--nodes", type=_number(MOST_NODES), default=2, help="nodes (default 2)")
    parser.add_argument("--ranks-per-node", type=_number(MOST_RANKS_PER_NODE), default=4, help="ranks (default 4)")
    parser.add_argument("--intra", type=_rate, default="1gbit", help="rate of a rank's link (default 1gbit)")
    parser.add_argument("--inter", type=_rate, default="300mbit", help="rate of a node's uplink (default 300mbit)")
    parser.add_argument("--log-dir", type=Path, help="keep the logs there; else they are kept only after a failure")
    parser.add_argument("--timeout", type=_seconds, default="inf", help="end the run after these seconds, code 124")
    parser.add_argument("--grace", type=_seconds, default="5", help="seconds the others have to end (default 5)")
    parser.add_argument("--counters", type=Path, help="write the bytes on every link to this JSON file")
    parser.add_argument("--no-python", action="store_true", help="SCRIPT is a program, not a Python script")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- SCRIPT ARGS")
    options = parser.parse_args(argv)
    options.command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not options.command:
        parser.error("no script given: end the command with -- SCRIPT ARGS")
    return options


def _number(most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} must be a number from 1 to {most}")
        return int(text)

    return read


def _rate(text: str) -> Rate:
    try:
        return parse_rate(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds, at least 0")
    return value


def say(text: str) -> None:
    """A line of the tool itself; standard output belongs to rank 0."""
    print(f"emulated cluster: {text}", file=sys.stderr, flush=True)


def run(cluster: Cluster, options: argparse.Namespace, folder: Path, signals: Signals) -> Ending:
    """Build the network, run the script, count, and remove the network whatever happens."""
    command = options.command if options.no_python else [sys.executable, *options.command]
    try:
        build(cluster)
        started = time.monotonic()
        ending = run_ranks(cluster, command, folder, signals, options.timeout, options.grace)
        seconds = time.monotonic() - started
        traffic = read_traffic(cluster)
    except NetworkError as error:
        # Ctrl-C also reaches the `ip` that is at work.
        return (
            Ending(128 + signals.received[0], "stopped while building") if signals.received else Ending(2, str(error))
        )
    finally:
        remove(cluster.namespaces())
    print(as_table(cluster, traffic), file=sys.stderr)
    if options.counters:
        facts = {"seconds": round(seconds, 3), "exit_code": ending.exit_code}
        options.counters.write_text(as_json(cluster, traffic, facts) + "\n")
    return ending


def main(argv: Sequence[str]) -> int:
    """Run the tool; returns the exit code."""
    options = read_options(argv)
    missing = what_is_missing()
    if missing:
        say(missing)
        return 2
    try:
        for wanted in (options.log_dir, options.counters and options.counters.absolute().parent):
            if wanted:
                wanted.mkdir(parents=True, exist_ok=True)
        folder = options.log_dir or Path(tempfile.mkdtemp(prefix="emulated_cluster_"))
    except OSError as error:
        say(f"no folder for the logs or counters: {error}")
        return 2
    with watch_signals() as signals:
        left = remove_leftovers()
        if left:
            say(f"removed {len(left)} network namespaces of a run that was killed")
        cluster = Cluster(own_name(), options.nodes, options.ranks_per_node, options.intra, options.inter)
        say(
            f"{cluster.nodes} x {cluster.ranks_per_node} ranks, {options.intra.text} a rank, "
            f"{options.inter.text} a node; logs in {folder}"
        )
        ending = run(cluster, options, folder, signals)
    if ending.exit_code != 0:
        say(ending.reason)
    elif not options.log_dir:
        shutil.rmtree(folder)
    return ending.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
