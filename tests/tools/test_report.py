"""The report of a results folder. References: a folder with figures given by hand, worked out on paper."""

import json
import re
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tools import report
from tools.measure.layer_grid import GridPoint
from tools.paper.figures import claims, figures_of
from tools.paper.folder import Folder, append_line, read_lines, write_table

POINT = GridPoint(tp=2, esp=2, factor=1.2, batch=1, seq=64, hidden=32, ffn=64)
OTHER = replace(POINT, esp=1, seq=128)
FACTS = {"date": "2026-12-01 12:00 UTC", "commit": "abc", "torch": "2.13.0", "processor": "two cores"}


def _layer(point: GridPoint, baseline: float, chosen: float, best: float) -> dict[str, Any]:
    def row(schedule: str, milliseconds: float, **more: Any) -> dict[str, Any]:
        times = dict.fromkeys(("median_ms", "p10_ms", "p90_ms"), milliseconds)
        return {"schedule": schedule, "chunks": 1, **times, "predicted_ms": 1.1 * milliseconds, **more}

    rows = [row("baseline", baseline), row("deepspeed", 2 * chosen), row("s1", chosen), row("s2", best)]
    rows.append(row("auto", chosen, chosen={"schedule": "s1", "chunks": 1}))
    return {"key": point.key, "point": asdict(point), "results": rows}


def _model(schedule: str, purpose: str, step: float, losses: list[float], turn: int = 0) -> dict[str, Any]:
    place = {"kind": "gpt", "schedule": schedule, "tp": 2, "esp": 2, "purpose": purpose, "turn": turn}
    figures = {"step_ms": step, "tokens_per_second": 1e5 / step, "resident_mib": 300.0, "ran": f"{schedule} x 1"}
    return {"key": f"{schedule}-{purpose}-{turn}", **place, **figures, "exposed_communication": 0.5, "losses": losses}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Two layers: auto is 4 and 2 times as fast as the baseline, and 25 % and 0 % slower than the best."""
    folder = Folder(tmp_path / "results")
    folder.root.mkdir()
    start = {"facts": FACTS, "command": "stages.py --quick"}
    about = {"cluster": "emulated 2 x 4 ranks", "emulated": True, "scale": 16, "model_sizes": {"layers": 3}}
    folder.facts.write_text(json.dumps({**about, "starts": [start]}))
    append_line(folder.layers, _layer(POINT, baseline=40.0, chosen=10.0, best=8.0))
    append_line(folder.layers, _layer(OTHER, baseline=10.0, chosen=5.0, best=20.0))
    for row in (
        _model("baseline", "time", 900.0, [7.0]),
        _model("baseline", "time", 700.0, [7.0], turn=1),
        _model("auto", "time", 200.0, [7.0]),
        _model("baseline", "curve", 1.0, [8.0, 6.0]),
        _model("auto", "curve", 1.0, [8.0, 6.00003]),
    ):
        append_line(folder.models, row)
    predicted = {"tp": 2, "esp": 2, "schedule": "s1h", "chunks": 2, "s1_or_s2": "s1"}
    times = {"baseline_ms": 60.0, "deepspeed_ms": "", "auto_ms": 10.0, "s1_or_s2_ms": 20.0}
    write_table(folder.table("predicted"), [{"source": "published", **predicted, **times}])
    grown = {"tp": 4, "esp": 4, "kind": "PCIe + 100 Gb/s", "deepspeed_ms": 5.0, "schedule": "s1h", "chunks": 1}
    ranks = [{**grown, "ranks": ranks, "baseline_ms": 8.0, "auto_ms": 2.0} for ranks in (8, 16)]
    write_table(folder.table("growth"), ranks)
    check = {"cluster": "emulated-8x4", "ranks": 32, "schedule": "s1"}
    check |= {"communication_predicted_ms": 110.0, "communication_measured_ms": 100.0}
    write_table(folder.table("growth_check"), [check])
    peers = {
        "what": "layer",
        "flags": {"tp": 4, "esp": 4, "rounds": 3},
        "results": [{"program": "deepspeed", "median_ms": 30.0, "what": ["version 1"], "failure": None}],
        "times_ours": {"deepspeed": {"median": 1.5, "rounds": [1.5]}},
    }
    (folder.root / "peers-layer-tp4-esp4.json").write_text(json.dumps(peers))
    return folder.root


def test_the_claims_keep_three_columns_apart(results: Path) -> None:
    layer, code, step, _, curves, regret = claims(figures_of(Folder(results)))
    assert layer.paper.startswith("1.13 to 5.77 x") and layer.measured == "2.00 / 3.00 / 4.00 x (2)"
    assert layer.predicted == "8 x 4 RTX 2080 Ti, published constants: 6.00 / 6.00 / 6.00 x (1)"
    assert code.measured == "2.00 / 2.00 / 2.00 x (2)" and code.paper == "none known"
    assert step.measured == "gpt tp 2 esp 2: 4.00 x"  # the median of 900 and 700 over 200
    assert curves.measured == "at most 5.0e-06 apart, relative"
    assert regret.measured == "mean 12.5%, most 25.0% of 2 layers"


class _Page(HTMLParser):
    """What a browser would ask for, and what a reader of pictures gets."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        named = dict(attrs)
        self.asked += [str(named[name]) for name in ("src", "href") if name in named]


def test_the_page_needs_nothing_beside_it(results: Path) -> None:
    file = results / "report.html"
    assert report.main([str(results), "--html", str(file)]) == 0
    page = file.read_text()
    assert len(page) < report.MOST_BYTES
    seen = _Page()
    seen.feed(page)
    assert not {"script", "link", "img", "iframe"} & set(seen.tags)
    for name in seen.asked:
        assert "//" not in name and (name in ("layers.csv", "models.csv", "losses.csv") or (results / name).exists()), (
            name
        )
    assert page.count("<svg") == page.count('role="img"') == seen.tags.count("desc") > 4
    assert seen.tags.count("table") == seen.tags.count("caption") > 4
    assert 'lang="en"' in page and "not a GPU" not in page and "Nothing here is a GPU result" in page
    assert "reconstruction" in page
    rows = [re.sub("<[^>]+>", " ", row).split() for row in re.findall("<tr>(.*?)</tr>", page)]
    assert ["gpt", "2,", "2", "baseline", "baseline", "x", "1", "800", "4", "127", "50%", "300"] in rows
    assert next(row for row in rows if row[:2] == ["2,", "1"])[:9] == [
        "2,",
        "1",
        "2.00",
        "/",
        "2.00",
        "/",
        "2.00",
        "x",
        "(1)",
    ]
    assert "Largest error of the predicted communication: 10.0%" in page
    assert ["deepspeed", "1.5"] in rows


def test_the_summary_and_the_page_of_docs(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([str(results)]) == 0
    text = capsys.readouterr().out
    assert "measured here: 2.00 / 3.00 / 4.00 x (2)" in text and "deepspeed 1.50 x of our time" in text
    assert "2 shapes; regret of auto: mean 12.5%, most 25.0%" in text and "predicted within 10.0%" in text
    file = results / "page.md"
    assert report.main([str(results), "--markdown", str(file)]) == 0
    page = file.read_text()
    assert "| the paper claims | measured here | predicted |" in page and f"--markdown {file}" in page
    assert "| gpt | 2, 2 | baseline | baseline x 1 | 800 | 4 |" in page
    assert "| layer, tp 4, esp 4 | deepspeed | 30 | 1.5 |" in page


def test_two_folders_are_compared(results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    second = Folder(tmp_path / "second")
    second.root.mkdir()
    second.facts.write_text(json.dumps({"cluster": "another", "starts": []}))
    append_line(second.layers, _layer(POINT, baseline=40.0, chosen=20.0, best=20.0))
    assert report.main([str(results), str(second.root)]) == 0
    text = capsys.readouterr().out
    assert "1 layers in both: B / A of auto 2.000 least" in text
    assert re.search(r"layers: auto over baseline, median +3 +2 +0\.667", text)
    assert "only in A: gpt tp 2 esp 2, baseline: step ms" in text


def test_an_unfinished_folder_is_reported_and_a_wrong_one_refused(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in results.iterdir():
        if path.name != "run.json":
            path.unlink()
    file = tmp_path / "empty.html"
    assert report.main([str(results), "--html", str(file)]) == 0
    assert "No layer has been measured" in file.read_text() and "not measured" in file.read_text()
    assert report.main([str(tmp_path / "nowhere")]) == 2
    assert "holds no run.json" in capsys.readouterr().err


def test_a_torn_line_is_left_out_and_the_next_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": 1}\n{"a": 2')
    append_line(file, {"a": 3})
    assert read_lines(file) == [{"a": 1}, {"a": 3}]
