#!/usr/bin/env python3
"""Say where the time of a trace went: what hid the communication, what each collective took, how long ranks stood idle.

    python tools/analyse_trace.py trace.json
    python tools/analyse_trace.py --merge trace.json trace.json.rank00000 trace.json.rank00004

The trace is a file of `--trace`, of a training run or of tools/bench_moe_layer.py. --merge first writes one file of the
parts that ranks left on their machines. All shares are of one rank's collectives in flight, each for as long as it was:
a moment counts as hidden by computation while the program works, else as exposed once, and as hidden by other
communication for every further collective in flight at that moment. The three shares add up to 1.
"""

import argparse
import json
import sys
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_parm.errors import DataError, MegatronParmError
from megatron_parm.observe.trace_files import merge, read_trace

Interval = tuple[float, float]  # microseconds


@dataclass(frozen=True)
class Total:
    """What a collective on an axis, or a stage, came to on one rank."""

    name: str
    count: int
    milliseconds: float
    megabytes: float


@dataclass(frozen=True)
class RankFigures:
    """One rank: milliseconds of its trace, shares of it, shares of its communication, totals."""

    rank: int
    window_ms: float
    idle_share: float
    communication_ms: float
    hidden_by_computation: float
    hidden_by_communication: float
    exposed: float
    collectives: list[Total]
    stages: list[Total]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The intervals joined where they touch, in order."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def without(intervals: Sequence[Interval], holes: Sequence[Interval]) -> list[Interval]:
    """What is left of a union of intervals outside of another one."""
    left: list[Interval] = []
    for start, end in intervals:
        at = start
        for place in range(max(bisect_right(holes, (start, 0.0)) - 1, 0), len(holes)):
            hole_start, hole_end = holes[place]
            if hole_start >= end:
                break
            if hole_end <= at:
                continue
            if hole_start > at:
                left.append((at, hole_start))
            at = max(at, hole_end)
        if at < end:
            left.append((at, end))
    return left


def length(intervals: Iterable[Interval]) -> float:
    """Their sum."""
    return sum(end - start for start, end in intervals)


def _interval(event: dict[str, Any]) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def _totals(events: Sequence[dict[str, Any]]) -> list[Total]:
    found = []
    for name in sorted({event["name"] for event in events}):
        own = [event for event in events if event["name"] == name]
        moved = sum(event["args"].get("bytes", 0) for event in own)
        found.append(Total(name, len(own), sum(event["dur"] for event in own) / 1e3, moved / 1e6))
    return found


def figures_of(rank: int, events: Sequence[dict[str, Any]]) -> RankFigures:
    """The figures of one rank's complete events."""
    flights = [event for event in events if event["cat"] == "collective"]
    waits = union(_interval(event) for event in events if event["cat"] == "wait")
    stages = [event for event in events if event["cat"] == "compute"]
    working = without(union(_interval(event) for event in stages), waits)
    window = max(_interval(event)[1] for event in events) - min(event["ts"] for event in events)
    total = length(map(_interval, flights))
    seen_apart = sum(length(without([_interval(event)], working)) for event in flights)
    exposed = length(without(union(map(_interval, flights)), working))

    def share(part: float) -> float:
        return part / total if total else 0.0

    return RankFigures(
        rank=rank,
        window_ms=window / 1e3,
        idle_share=1 - length(working) / window if window else 0.0,
        communication_ms=total / 1e3,
        hidden_by_computation=share(total - seen_apart),
        hidden_by_communication=share(seen_apart - exposed),
        exposed=share(exposed),
        collectives=_totals(flights),
        stages=_totals(stages),
    )


def analyse(trace: dict[str, Any]) -> list[RankFigures]:
    """The figures of every rank of a trace. Raises DataError if it has no complete event, or one of another program."""
    by_rank: dict[int, list[dict[str, Any]]] = {}
    try:
        for event in trace["traceEvents"]:
            if event["ph"] == "X":
                _ = event["name"], event["cat"], float(event["ts"]), float(event["dur"]), event["args"]
                by_rank.setdefault(int(event["pid"]), []).append(event)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"the trace is not one of --trace: an event has no usable {error}") from None
    if not by_rank:
        raise DataError("the trace holds no span; record steps with --trace, --profile-step-start, --profile-step-end")
    return [figures_of(rank, events) for rank, events in sorted(by_rank.items())]


def as_text(figures: Sequence[RankFigures]) -> list[str]:
    """The lines of the report."""
    lines = [
        f"{'rank':>4} {'window ms':>10} {'idle':>6} {'comm ms':>10} {'hidden by':>11} {'hidden by':>11} {'exposed':>8}",
        f"{'':4} {'':10} {'':6} {'':10} {'computation':>11} {'other comm':>11}",
    ]
    lines += [
        f"{one.rank:4} {one.window_ms:10.2f} {one.idle_share:6.1%} {one.communication_ms:10.2f} "
        f"{one.hidden_by_computation:11.1%} {one.hidden_by_communication:11.1%} {one.exposed:8.1%}"
        for one in figures
    ]
    for title, field in (("collective", "collectives"), ("stage", "stages")):
        lines += ["", f"{title + ' (mean of the ranks)':34} {'count':>6} {'ms':>10} {'MB':>10} {'MB/s':>9}"]
        rows = [row for one in figures for row in getattr(one, field)]
        for name in sorted({row.name for row in rows}):
            own = [row for row in rows if row.name == name]
            count, time, moved = (
                sum(getattr(row, part) for row in own) / len(own) for part in ("count", "milliseconds", "megabytes")
            )
            sent = f" {moved:10.3f} {moved / time * 1e3:9.1f}" if moved and time else ""
            lines.append(f"{name:34} {count:6.0f} {time:10.2f}{sent}")
    return lines


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="a file of --trace; with --merge the file to write")
    parser.add_argument("parts", type=Path, nargs="*", help="with --merge: the parts of the ranks")
    parser.add_argument("--merge", action="store_true", help="first write the trace from its parts, which it deletes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; returns the exit code."""
    flags = parse(argv)
    try:
        if flags.merge != bool(flags.parts):
            raise DataError("--merge and the parts to merge go together: --merge FILE PART PART ...")
        if flags.merge:
            merge(flags.parts, flags.trace, {"about": "merged by tools/analyse_trace.py"})
        figures = analyse(read_trace(flags.trace))
    except MegatronParmError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print("\n".join(as_text(figures)))
    if flags.json is not None:
        flags.json.write_text(json.dumps([asdict(one) for one in figures], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
