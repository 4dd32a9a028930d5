"""The figures of a trace. References: traces drawn by hand, whose shares are read off the drawing."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_parm.observe.trace import COMPUTE, Recording, Span
from megatron_parm.observe.trace_files import events_of, part_path, read_trace, write_events
from megatron_parm.parallel.context import ParallelContext
from tests.harness.layouts import Layout
from tests.harness.pools import Pools
from tests.moe.layer_run import Case, run_layer
from tools.analyse_trace import analyse, main

MS = 1_000_000


def _span(kind: str, lane: str, name: str, start: float, end: float, size_bytes: int = 0) -> Span:
    about: dict[str, Any] = {"bytes": size_bytes} if kind == "collective" else {}
    return Span(lane, name, kind, round(start * MS), round(end * MS), about)


# ms       0         4         8        10
# compute  [ gate    ][ experts ]                gate 0-4, experts 4-6, waits 6-9, combine 9-10
# ep                 [ all_to_all      ]         4-8
# esp                     [ all_gather    ]      5-9
DRAWN = [
    _span("compute", COMPUTE, "gate", 0, 4),
    _span("compute", COMPUTE, "experts", 4, 6),
    _span("compute", COMPUTE, "MoE layer", 0, 10),
    _span("compute", COMPUTE, "combine", 9, 10),
    _span("wait", COMPUTE, "wait all_to_all/ep", 6, 8),
    _span("wait", COMPUTE, "wait all_gather/esp", 8, 9),
    _span("collective", "ep", "all_to_all", 4, 8, 4_000_000),
    _span("collective", "esp", "all_gather", 5, 9, 2_000_000),
]


def test_shares_of_a_drawn_trace() -> None:
    """8 ms in flight: 2 + 1 beside the experts; of 6-9 both fly until 8: 2 ms of the second hide behind the first."""
    (found,) = analyse({"traceEvents": events_of(5, "rank 5", DRAWN, 0)})
    assert (found.rank, found.window_ms, found.communication_ms) == (5, 10, 8)
    assert found.idle_share == pytest.approx(3 / 10)
    assert found.hidden_by_computation == pytest.approx(3 / 8)
    assert found.hidden_by_communication == pytest.approx(2 / 8)
    assert found.exposed == pytest.approx(3 / 8)
    totals = {total.name: (total.count, total.milliseconds, total.megabytes) for total in found.collectives}
    assert totals == {"all_to_all/ep": (1, 4, 4), "all_gather/esp": (1, 4, 2)}
    stages = {total.name: total.milliseconds for total in found.stages}
    assert stages == {"gate": 4, "experts": 2, "MoE layer": 10, "combine": 1}


def test_blocking_communication_is_all_exposed_and_gaps_are_idle() -> None:
    spans = [
        _span("compute", COMPUTE, "gate", 0, 2),
        _span("wait", COMPUTE, "wait all_reduce/tp", 2, 3),
        _span("collective", "tp", "all_reduce", 2, 3, 8),
        _span("compute", COMPUTE, "optimizer", 4, 5),
    ]
    (found,) = analyse({"traceEvents": events_of(0, "rank 0", spans, 0)})
    assert (found.hidden_by_computation, found.hidden_by_communication, found.exposed) == (0, 0, 1)
    assert found.idle_share == pytest.approx(2 / 5), "the wait, and 1 ms of which nothing is known"


def test_the_report_and_its_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, figures = tmp_path / "trace.json", tmp_path / "figures.json"
    for rank in (0, 1):
        write_events(part_path(path, rank), events_of(rank, f"rank {rank}", DRAWN, 0), {"rank": rank})
    parts = [str(part_path(path, rank)) for rank in (0, 1)]
    assert main(["--merge", str(path), *parts, "--json", str(figures)]) == 0
    text = capsys.readouterr().out
    assert "   0      10.00  30.0%       8.00       37.5%       25.0%    37.5%" in text
    row = next(line for line in text.splitlines() if line.startswith("all_to_all/ep"))
    assert row.split() == ["all_to_all/ep", "1", "4.00", "4.000", "1000.0"]
    assert [one["exposed"] for one in json.loads(figures.read_text())] == [0.375, 0.375]
    assert main([str(path)]) == 0, "the merged file stays"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"traceEvents": []}', "holds no span"),
        ('{"traceEvents": [{"ph": "X", "name": "a"}]}', "not one of --trace"),
        ("{", "cannot be read"),
    ],
)
def test_other_files_are_one_line(
    tmp_path: Path, content: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    assert main([str(path)]) == 2
    text = capsys.readouterr().err
    assert message in text and text.count("\n") == 1
    assert main([str(path), "part"]) == 2 and "--merge" in capsys.readouterr().err


def _layer_events(ctx: ParallelContext, schedule: str, chunks: int) -> list[dict[str, Any]]:
    trace = Recording()
    case = Case(sequence=64, hidden=64, ffn=64)
    run_layer(ctx, case, schedule, chunks=chunks)
    trace.start()
    run_layer(ctx.traced(trace), case, schedule, chunks=chunks)
    return events_of(ctx.rank, f"rank {ctx.rank}", trace.spans, 0)


def test_a_real_layer_on_4_ranks(pools: Pools, tmp_path: Path) -> None:
    """In one chunk the program has nothing to do while the exchange flies; in 4 chunks other chunks hide some of it."""
    hidden = []
    for chunks in (1, 4):
        events = [event for part in pools.run(Layout(4, tp=2, ep=2, esp=2), _layer_events, "s1h", chunks)
                  for event in part]  # fmt: skip
        write_events(tmp_path / "trace.json", events, {})
        found = analyse(read_trace(tmp_path / "trace.json"))
        assert [one.rank for one in found] == [0, 1, 2, 3]
        for one in found:
            shares = one.hidden_by_computation + one.hidden_by_communication + one.exposed
            assert shares == pytest.approx(1) and min(one.idle_share, one.exposed) >= 0
            names = {total.name for total in one.collectives}
            assert {"all_gather/tp", "all_gather/esp"} < names or {"all_to_all_uneven/ep"} < names
        hidden.append([one.hidden_by_computation + one.hidden_by_communication for one in found])
    assert sum(hidden[1]) > sum(hidden[0])
