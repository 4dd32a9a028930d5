"""The benchmark of a grid of layers. References: lines of results written by hand, whose figures are worked by hand."""

import csv
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from megatron_parm.errors import ConfigError, DataError
from megatron_parm.moe.schedules import SCHEDULES
from tests.training.processes import ranks
from tools import bench_layer_grid
from tools.measure.layer_grid import STANDARD_GRID, GridPoint, judge, read_grid, read_results, summarise, write_grid

POINT = GridPoint(tp=2, esp=2, factor=1.25, batch=1, seq=16, hidden=8, ffn=16, num_experts=4)
OTHER = replace(POINT, esp=1, factor=2.0)


def _row(schedule: str, chunks: int, measured: float, predicted: float, **more: Any) -> dict[str, Any]:
    figures = {"median_ms": measured, "p10_ms": measured, "p90_ms": measured, "predicted_ms": predicted}
    return {"schedule": schedule, "chunks": chunks, **figures, **more}


def _result(point: GridPoint, best_s2: float) -> dict[str, Any]:
    """Auto chose s1 in one chunk, which takes 10 ms."""
    rows = [
        _row("baseline", 1, 60.0, 60.0),
        _row("deepspeed", 1, 12.0, 15.0),
        _row("s1", 1, 10.0, 9.0),
        _row("s1", 2, 11.0, 11.0),
        _row("s2", 2, best_s2, 12.0),
        _row("auto", 1, 10.4, 9.0, chosen={"schedule": "s1", "chunks": 1}),
    ]
    return {"key": point.key, "point": asdict(point), "results": rows}


def test_the_verdict_on_a_shape() -> None:
    found = judge(_result(POINT, best_s2=8.0))
    assert (found.best, found.best_ms, found.chosen, found.chosen_ms) == (("s2", 2), 8.0, ("s1", 1), 10.0)
    assert found.regret == pytest.approx(0.25)
    assert found.speedup_over("baseline") == 6.0 and found.speedup_over("s2h") is None
    assert found.errors == pytest.approx((0.0, 0.25, 0.1, 0.0, 0.5))


def test_the_figures_of_a_grid() -> None:
    found = summarise([_result(POINT, best_s2=8.0), _result(OTHER, best_s2=20.0)])
    assert (found.shapes, found.winners) == (2, {"s2": 1, "s1": 1})
    assert (found.mean_regret, found.max_regret) == pytest.approx((0.125, 0.25))
    assert found.mean_auto_row_regret == pytest.approx((10.4 / 8 - 1 + 10.4 / 10 - 1) / 2)
    assert found.median_error == pytest.approx(0.1)  # of 0, 0, 0, 0, 0.1, 0.1, 0.25, 0.25, 0.4, 0.5
    assert found.median_error_of_choices == pytest.approx(abs(9 / 10.4 - 1))
    assert found.speedups == {"baseline": (6.0, 6.0, 6.0), "deepspeed": pytest.approx((1.2, 1.2, 1.2))}
    with pytest.raises(DataError, match="no shape"):
        summarise([])


def test_the_standard_grid_varies_what_it_must(tmp_path: Path) -> None:
    assert len(STANDARD_GRID) == len({point.key for point in STANDARD_GRID}) >= 36
    for name in ("tp", "esp", "factor", "seq", "hidden"):
        assert len({getattr(point, name) for point in STANDARD_GRID}) > 1, name
    for point in STANDARD_GRID:
        point.shape(8, 2)
    file = tmp_path / "grid.csv"
    assert bench_layer_grid.main(["--results", "unused", "--write-grid", str(file)]) == 0
    assert tuple(read_grid(file)) == STANDARD_GRID


@pytest.mark.parametrize("text", ["", "tp,esp\n2,2\n", "tp,esp,factor,batch,seq,hidden,ffn\n2,2,x,1,1,1,1\n"])
def test_what_is_no_grid_is_a_message(text: str, tmp_path: Path) -> None:
    file = tmp_path / "grid.csv"
    file.write_text(text)
    with pytest.raises(DataError, match="list"):
        read_grid(file)


def test_a_layer_that_the_ranks_cannot_hold() -> None:
    with pytest.raises(ConfigError, match="must divide the 6 ranks"):
        replace(POINT, tp=4).shape(6, 1)
    assert replace(POINT, num_experts=0).shape(8, 2).num_experts == 4  # one for each rank of ep


def test_an_interrupted_run_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first layer is there already, with figures that no run can give; a torn line after it is measured anew."""
    grid, results = tmp_path / "grid.csv", tmp_path / "results.jsonl"
    write_grid(grid, [POINT, OTHER])
    results.write_text(json.dumps(_result(POINT, best_s2=8.0)) + "\n" + json.dumps({"key": OTHER.key})[:9] + "\n")
    argv = f"--grid {grid} --results {results} --iters 1 --warmup 0 --chunks 1,2 --calibrate layout".split()
    with ranks(2, argv, tmp_path / "logs", main=bench_layer_grid.main) as run:
        assert run.wait() == [0, 0], run.outputs
        printed = run.output(0)
    assert "1/1 " + OTHER.key in printed and "2 shapes; regret of auto" in printed
    found = read_results(results)
    assert found[POINT.key] == _result(POINT, best_s2=8.0)
    rows = found[OTHER.key]["results"]
    wanted = [
        (name, chunks) for name in SCHEDULES for chunks in ((1,) if name in ("baseline", "deepspeed") else (1, 2))
    ]
    assert [(row["schedule"], row["chunks"]) for row in rows[:-1]] == wanted and rows[-1]["schedule"] == "auto"
    assert found[OTHER.key]["facts"]["torch"] and found[OTHER.key]["cost_model"]["lines_ms"]

    table, picture = tmp_path / "grid_rows.csv", tmp_path / "grid.png"
    judged = [*argv, "--only-judge", "--csv", str(table), "--picture", str(picture)]
    assert bench_layer_grid.main(judged) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("deepspeed / auto:")
    with table.open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 6 + len(rows) and lines[5]["chosen"] == "s1 x 1" and lines[4]["median_ms"] == "8.0"
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--schedules s3", "--schedules s3: not known"),
        ("--chunks 0", "--chunks 0: expected whole numbers"),
        ("--iters 0", "--iters 0 must be at least 1"),
        ("--grid nowhere.csv", "nowhere.csv is no list of layers"),
    ],
)
def test_wrong_flags_are_one_line(flags: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert bench_layer_grid.main(["--results", str(tmp_path / "results.jsonl"), *flags.split()]) == 2
    text = capsys.readouterr().err
    assert message in text and text.count("\n") == 1
