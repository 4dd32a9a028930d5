"""The table of predictions. References: `predict` and `choose` themselves, entries of a file written by hand."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_parm.moe.advise import advise
from megatron_parm.moe.calibrate import keep_model
from megatron_parm.moe.choose import choose
from megatron_parm.moe.cost import PUBLISHED, CostModel, Line, predict
from megatron_parm.moe.schedules import SCHEDULES
from tools.explain_schedule import main, parse, plan_of, shape_of

SIZES = "--seq-length 128 --hidden-size 64 --ffn-hidden-size 128 --num-experts 8"
LAYOUT = f"{SIZES} --tp 4 --ep 2 --esp 4 --capacity-factor 1.25"
FREE = CostModel("free links", {**dict.fromkeys(PUBLISHED.lines, Line(0.0, 0.0)), "experts": Line(1.0, 0.0)})


def _rows(text: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in text.splitlines()}


def test_the_table_and_the_choice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(LAYOUT.split()) == 0
    text = capsys.readouterr().out
    assert PUBLISHED.source in text
    shape, rows = shape_of(parse(LAYOUT.split())), _rows(text)
    for name in SCHEDULES:
        wanted = [f"{predict(name, chunks, shape, PUBLISHED):.3f}" for chunks in (1, 2, 4)]
        assert rows[name][:3] == wanted
    assert rows["s2h"][3] == "all_to_all/ep", "the bytes follow the times"
    choice = choose(shape, PUBLISHED)
    assert rows["auto:"][:3] == [choice.schedule, "in", str(choice.chunks)] and choice.reason in text


def test_what_cannot_run_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"{SIZES} --tp 4 --ep 2 --esp 2 --seq-length 126".split()) == 0
    text = capsys.readouterr().out
    for name, reason in (("s1", "do not divide"), ("s1h", "do not divide"), ("s2", "capacity"), ("s2h", "capacity")):
        assert re.search(rf"^{name} .*{reason}", text, re.MULTILINE)
    assert _rows(text)["auto:"][0] == "baseline"


def test_chunks_and_bytes_follow_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"{LAYOUT} --chunks 3 --bytes-per-element 4 --swiglu".split()) == 0
    text = capsys.readouterr().out
    assert "3 chunks" in text and "4 chunks" not in text
    assert "all_gather/tp 0.03" in text, "128 tokens of 64 elements of 4 bytes are 0.03 MB, gathered by s1"


def test_the_entry_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cluster.json"
    flags = [*LAYOUT.split(), "--moe-cost-model", str(file)]
    keep_model(file, "one", FREE)
    assert main(flags) == 0
    text = capsys.readouterr().out
    assert "free links (cluster.json)" in text and _rows(text)["s1"][0] == "2.000", "the experts' start, twice"
    keep_model(file, "two", replace(FREE, source="other"))
    assert main([*flags, "--cluster", "two"]) == 0
    assert "other (cluster.json)" in capsys.readouterr().out
    assert main(flags) == 2
    assert "has one, two; name one with --cluster" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tp 0", "tp 0 must be at least 1"),
        ("--chunks 1 0", "--chunks and --bytes-per-element must be at least 1"),
        ("--topk 9", "--topk 9 must not exceed the 8 experts"),
        ("--ep 3", "ep 3 must divide the num experts 8"),
        ("--esp 3", "esp 3 must divide the ffn hidden size 128"),
        ("--capacity-factor 0", "must be above 0"),
        ("--cluster one", "give --moe-cost-model too"),
        ("--moe-cost-model /nowhere/x.json", "no entry; write one with tools/calibrate.py"),
    ],
)
def test_wrong_flags_are_one_line(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"{LAYOUT} {flags}".split()) == 2
    text = capsys.readouterr().err
    assert message in text and text.count("\n") == 1


def test_a_damaged_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cluster.json"
    file.write_text("{")
    assert main([*LAYOUT.split(), "--moe-cost-model", str(file)]) == 2
    text = capsys.readouterr().err
    assert "delete it to measure anew" in text and text.count("\n") == 1


ADVISE = f"{SIZES} --capacity-factor 1.25 --advise --ranks 32 --ranks-per-node 4"


def test_advice_prints_the_ten_best_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"{ADVISE} --memory-gb 80 --num-layers 4".split()) == 0
    lines = capsys.readouterr().out.splitlines()
    plan = plan_of(parse(f"{ADVISE} --memory-gb 80 --num-layers 4".split()), shape_of(parse(LAYOUT.split())))
    best = advise(plan, PUBLISHED)[:10]
    assert [tuple(map(int, line.split()[:4])) for line in lines[2:12]] == [
        (one.tp, one.ep, one.esp, one.dp) for one in best
    ]
    assert "32 ranks (4 a node) fit 80 GB" in lines[0] and PUBLISHED.source in lines[0]
    assert any("assumed:" in line for line in lines[12:]) and any("%" in line for line in lines[12:])


def test_advice_says_what_a_model_was_not_measured_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cluster.json"
    keep_model(file, "one", replace(FREE, crossing=frozenset()))
    assert main([*f"{ADVISE} --memory-gb 80".split(), "--moe-cost-model", str(file)]) == 0
    assert "measured inside one node only" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "--advise needs --ranks and --memory-gb"),
        ("--memory-gb 0.00001", "no layout of 32 ranks fits"),
        ("--memory-gb 80 --num-moe-layers 99", "must not exceed"),
        ("--memory-gb 80 --ranks 0", "--ranks 0 must be at least 1"),
    ],
)
def test_advice_that_cannot_be_given_is_one_line(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"{ADVISE} {flags}".split()) == 2
    text = capsys.readouterr().err
    assert message in text and text.count("\n") == 1
