"""Trace files. Reference: files written out by hand."""

import json
from pathlib import Path

import pytest

from megatron_parm.errors import DataError
from megatron_parm.observe.trace import COMPUTE, Span
from megatron_parm.observe.trace_files import events_of, lanes_of, merge, part_path, read_trace, write_events


def _flight(start: int, end: int, lane: str = "ep") -> Span:
    return Span(lane, "all_to_all", "collective", start, end, {"bytes": 64})


def test_rows_of_a_lane_hold_what_nests() -> None:
    outer, inner, after = (
        Span(COMPUTE, name, "compute", *at) for name, at in zip("abc", [(0, 9), (2, 5), (9, 12)], strict=True)
    )
    first, second, third = _flight(0, 5), _flight(3, 8), _flight(6, 9)
    rows = lanes_of([inner, outer, after, third, second, first])
    assert rows == {COMPUTE: [[outer, inner, after]], "ep": [[first, third], [second]]}


def test_the_events_of_a_rank() -> None:
    spans = [Span(COMPUTE, "gate", "compute", 2_500, 4_000), _flight(3_000, 7_000), _flight(3_500, 8_000)]
    events = events_of(3, "rank 3 on alpha", spans, offset_ns=500)
    names = [event["args"]["name"] for event in events if event["name"] in ("process_name", "thread_name")]
    assert names == ["rank 3 on alpha", COMPUTE, "ep", "ep (2)"]
    assert {event["pid"] for event in events} == {3}
    assert [event for event in events if event["ph"] == "X"] == [
        {"ph": "X", "pid": 3, "tid": 0, "name": "gate", "cat": "compute", "ts": 2.0, "dur": 1.5, "args": {}},
        *(
            {
                "ph": "X",
                "pid": 3,
                "tid": thread,
                "name": "all_to_all/ep",
                "cat": "collective",
                "ts": start,
                "dur": end,
                "args": {"axis": "ep", "bytes": 64},
            }
            for thread, start, end in ((1, 2.5, 4.0), (2, 3.0, 4.5))
        ),
    ]


def test_parts_become_one_file_that_begins_at_0(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "trace.json"
    for rank, offset in ((0, 0), (1, 10_000)):
        span = Span(COMPUTE, "gate", "compute", 5_000 + offset, 6_000 + offset)
        write_events(part_path(path, rank), events_of(rank, f"rank {rank}", [span], offset), {"rank": rank})
    parts = [part_path(path, rank) for rank in (0, 1)]
    merge(parts, path, {"about": "iterations 3 to 4"})
    found = json.loads(path.read_text())
    assert found["otherData"] == {"about": "iterations 3 to 4", "ranks": [{"rank": 0}, {"rank": 1}]}
    times = [(event["pid"], event["ts"], event["dur"]) for event in found["traceEvents"] if event["ph"] == "X"]
    assert times == [(0, 0.0, 1.0), (1, 0.0, 1.0)], "the clock of rank 1 is 10 microseconds ahead"
    assert sorted(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("content", ["{", "[]", '{"traceEvents": 3}'])
def test_what_is_no_trace_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(DataError, match=r"trace\.json"):
        read_trace(path)


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "trace.json").mkdir()
    with pytest.raises(DataError, match=r"--trace .*trace\.json cannot be written"):
        write_events(tmp_path / "trace.json", [], {})
