"""The benchmark of one layer. References: the rows that were asked for; figures of a row worked by hand."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megatron_parm.moe.schedules import SCHEDULES
from tests.training.processes import ranks
from tools import bench_moe_layer
from tools.cluster.counters import LinkBytes, RankTraffic
from tools.measure import rows as measured

SIZES = "--seq 16 --hidden 8 --ffn 16 --num-experts 4 --iters 3 --warmup 1"
TIMES = {"median_ms", "p10_ms", "p90_ms", "predicted_ms", "processor_ms"}
FIGURES = {"schedule", "chunks", "bytes_intra", "bytes_inter"} | TIMES


def _check_rows(file: Path, wanted: list[tuple[str, int]]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(file.read_text())["results"]
    *given, auto = rows
    assert [(row["schedule"], row["chunks"]) for row in given] == wanted
    assert all(set(row) == FIGURES for row in given)
    assert auto["schedule"] == "auto" and set(auto) == FIGURES | {"chosen"}
    assert auto["chosen"]["schedule"] in SCHEDULES and auto["chosen"]["chunks"] == auto["chunks"]
    for row in rows:
        assert 0 < row["p10_ms"] <= row["median_ms"] <= row["p90_ms"] and row["predicted_ms"] > 0
    return rows


def test_two_ranks(tmp_path: Path) -> None:
    file = tmp_path / "layer.json"
    argv = f"{SIZES} --tp 2 --esp 2 --chunks 1,2 --json {file}".split()
    with ranks(2, argv, tmp_path / "logs", main=bench_moe_layer.main) as run:
        assert run.wait() == [0, 0], run.outputs
        printed = run.output(0).splitlines()
        assert run.output(1) == ""
    rows = _check_rows(file, [(name, chunks) for name in SCHEDULES for chunks in (1, 2)])
    assert all(row["bytes_intra"] is row["bytes_inter"] is None for row in rows), "no emulated cluster"
    assert json.loads(file.read_text())["world"] == 2
    assert len(printed) == 1 + len(rows) and printed[0].split()[:3] == ["schedule", "chunks", "median"]
    assert printed[-1].startswith(f"auto ({rows[-1]['chosen']['schedule']})")


def test_one_rank_with_counted_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, sent = tmp_path / "layer.json", iter(range(1000))

    def traffic() -> RankTraffic:
        number = next(sent)
        return RankTraffic(LinkBytes(5_000_000 * number, 0), LinkBytes(2_000_000 * number, 0))

    with patch.object(measured, "own_traffic", traffic):
        argv = f"{SIZES} --tp 1 --esp 1 --capacity-factor -1 --schedules s1,auto --dtype bf16 --json {file}"
        assert bench_moe_layer.main(argv.split()) == 0
    for row in _check_rows(file, [("s1", 1)]):
        assert (row["bytes_inter"], row["bytes_intra"]) == (2e6, 3e6)
    title, *rows = capsys.readouterr().out.splitlines()
    assert title.endswith("MB sent between and inside nodes") and len(rows) == 2
    assert all(row.split()[-2:] == ["2.00", "3.00"] for row in rows)


def test_the_figures_of_a_row() -> None:
    times = [float(number) for number in range(11, 0, -1)]
    row = measured.Row("auto", "s1h", 2, 4.5, times, processor_ms=[3.0, 9.0, 7.0])
    shown = row.as_json()
    assert (shown["median_ms"], shown["p10_ms"], shown["p90_ms"]) == (6.0, 2.0, 10.0)
    assert shown["processor_ms"] == 7.0
    assert shown["chosen"] == {"schedule": "s1h", "chunks": 2}
    assert row.as_text().split() == ["auto", "(s1h)", "2", "6.0", "2.0", "10.0", "4.5", "7.0"]
    assert measured.spread([3.0]) == (3.0, 3.0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--schedules s1,s3", "--schedules s3: not known; use baseline, deepspeed, s1, s2, s1h"),
        ("--schedules s2 --capacity-factor -1", "--schedules s2: s2 splits expert slots"),
        ("--chunks 1,x", "--chunks 1,x: expected whole numbers"),
        ("--chunks 0", "--chunks 0: expected whole numbers"),
        ("--iters 0", "--iters 0 must be at least 1"),
        ("--topk 5", "--topk 5 must not exceed the 4 experts"),
        ("--tp 2", "--tensor-model-parallel-size 2"),
    ],
)
def test_wrong_flags_are_one_line(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with patch.object(bench_moe_layer, "measure", None):  # found before the seconds of a measurement
        assert bench_moe_layer.main(f"{SIZES} --tp 1 --esp 1 {flags}".split()) == 2
    text = capsys.readouterr().err
    assert message in text and text.count("\n") == 1
