"""Traces as files that Perfetto and chrome://tracing open: Chrome's trace event format, JSON. Floor 2.

A process of the picture is a rank, a thread a lane. Every rank writes a part of its own, which opens alone too;
`merge` makes one file of the parts. Times are microseconds of rank 0's clock; the merged file begins at 0. Source:
"Trace Event Format" of the Chromium project: complete events (`X`) and metadata (`M`).
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron_parm.errors import DataError
from megatron_parm.observe.trace import COMPUTE, Span

Event = dict[str, Any]


def part_path(path: Path, rank: int) -> Path:
    """Where a rank keeps its part until the parts are merged."""
    return path.with_name(f"{path.name}.rank{rank:05d}")


def lanes_of(spans: Iterable[Span]) -> dict[str, list[list[Span]]]:
    """The spans by lane, each lane in as many rows as it takes for spans of a row to follow or hold each other."""
    found: dict[str, list[list[Span]]] = {COMPUTE: []}
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)):
        rows = found.setdefault(span.lane, [])
        fitting = next((row for row in rows if _nests(row, span)), None)
        if fitting is None:
            rows.append([span])
        else:
            fitting.append(span)
    return found


def _nests(row: Sequence[Span], span: Span) -> bool:
    """True if `span`, which starts last, is held by every span of the row that has not ended."""
    for other in reversed(row):
        if other.end_ns > span.start_ns:
            return span.end_ns <= other.end_ns
    return True


def events_of(rank: int, title: str, spans: Sequence[Span], offset_ns: int) -> list[Event]:
    """The events of a rank. offset_ns: its clock minus that of rank 0."""
    events: list[Event] = [
        {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": title}},
        {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}},
    ]
    thread = 0
    for lane, rows in lanes_of(spans).items():
        for number, row in enumerate(rows, start=1):
            name = lane if number == 1 else f"{lane} ({number})"
            place = {"pid": rank, "tid": thread}
            events.append({"ph": "M", **place, "name": "thread_name", "args": {"name": name}})
            events.append({"ph": "M", **place, "name": "thread_sort_index", "args": {"sort_index": thread}})
            events += [_complete(span, place, offset_ns) for span in row]
            thread += 1
    return events


def _complete(span: Span, place: dict[str, int], offset_ns: int) -> Event:
    about = {"axis": span.lane, **span.about} if span.lane != COMPUTE else dict(span.about)
    return {
        "ph": "X",
        **place,
        "name": span.name if span.lane == COMPUTE else f"{span.name}/{span.lane}",
        "cat": span.kind,
        "ts": (span.start_ns - offset_ns) / 1000,
        "dur": (span.end_ns - span.start_ns) / 1000,
        "args": about,
    }


def write_events(path: Path, events: Sequence[Event], about: dict[str, Any]) -> None:
    """Write a file in one rename. Raises DataError where it cannot be written."""
    draft = path.with_name(path.name + ".tmp")
    text = json.dumps({"displayTimeUnit": "ms", "otherData": about, "traceEvents": list(events)})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise DataError(f"--trace {path} cannot be written: {error.strerror}; name a file that can be") from None


def read_trace(path: Path) -> dict[str, Any]:
    """The object of a trace file. Raises DataError for anything else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"the trace {path} cannot be read: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("traceEvents"), list):
        raise DataError(f"{path} is no trace: a JSON object with a list `traceEvents` was expected")
    return found


def merge(parts: Sequence[Path], path: Path, about: dict[str, Any]) -> None:
    """One file of all parts, whose first event begins at 0; the parts are deleted. Raises DataError."""
    events: list[Event] = []
    ranks: list[Any] = []
    for part in parts:
        found = read_trace(part)
        events += found["traceEvents"]
        ranks.append(found.get("otherData"))
    first = min((event["ts"] for event in events if event["ph"] == "X"), default=0.0)
    for event in events:
        if event["ph"] == "X":
            event["ts"] = round(event["ts"] - first, 3)
    write_events(path, events, {**about, "ranks": ranks})
    for part in parts:
        part.unlink()
