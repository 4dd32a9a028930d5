"""The layout tool. References: groups written by hand; the messages of RankGrid and of the settings' parser."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools.show_layout import main

ROOT = Path(__file__).parents[2]


def _groups(text: str) -> dict[str, list[str]]:
    """Axis -> its printed groups."""
    paragraphs = [part.splitlines() for part in text.split("\n\n")[1:-1]]
    return {lines[0].split(":")[0]: [line.strip() for line in lines[1:]] for lines in paragraphs}


def test_groups_and_places_of_eight_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        "--world-size 8 --tensor-model-parallel-size 4 --expert-model-parallel-size 2 --expert-tensor-parallel-size 2"
    )
    assert main(flags.split()) == 0
    text = capsys.readouterr().out
    assert text.startswith("world 8 = pp 1 x dp 2 x tp 4 = pp 1 x edp 2 x ep 2 x esp 2\n")
    groups = _groups(text)
    assert groups["tp"] == ["0 1 2 3", "4 5 6 7"]
    assert groups["dp"] == ["0 4", "1 5", "2 6", "3 7"]
    assert groups["esp"] == ["0 1", "2 3", "4 5", "6 7"]
    assert groups["ep"] == ["0 2", "1 3", "4 6", "5 7"]
    assert groups["edp"] == ["0 4", "1 5", "2 6", "3 7"]
    assert groups["ep_esp"] == ["0 1 2 3", "4 5 6 7"]
    table = [line.split() for line in text.strip().splitlines()[-9:]]
    assert table[0] == ["rank", "pp", "dp", "tp", "edp", "ep", "esp", "ep_esp"]
    assert table[7] == ["6", "0", "1", "2", "1", "1", "0", "2"]


def test_old_spellings_and_stages(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["--world-size", "4", "--expert-sharding-parallel-size", "2", "--pipeline-model-parallel-size", "2"]) == 0
    )
    groups = _groups(capsys.readouterr().out)
    assert groups["esp"] == ["0 1", "2 3"] and groups["pp"] == ["0 2", "1 3"] and groups["stage"] == ["0 1", "2 3"]


def test_esp_follows_tp_where_it_is_not_given(capsys: pytest.CaptureFixture[str]) -> None:
    """Reference: the default of --expert-tensor-parallel-size."""
    assert main(["--world-size", "4", "--tensor-model-parallel-size", "2"]) == 0
    assert _groups(capsys.readouterr().out)["esp"] == ["0 1", "2 3"]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--world-size 8 --tensor-model-parallel-size 3", "must divide the 8 ranks"),
        ("--world-size 8 --expert-model-parallel-size 16", "--expert-model-parallel-size 16"),
        ("--world-size 0", "--world-size 0 must be at least 1"),
        ("--world-size eight", "--world-size"),
        ("", "--world-size"),
        ("--world-size 8 --tensor-model-paralel-size 2", "--tensor-model-parallel-size"),
    ],
)
def test_bad_sizes_are_one_message_and_exit_code_2(flags: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags.split()) == 2
    captured = capsys.readouterr()
    assert told in captured.err and "Traceback" not in captured.err and not captured.out


def test_it_runs_as_a_script_from_anywhere(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "show_layout.py"), "--world-size", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "stage: all ranks of a pipeline stage; 1 group of 2\n  0 1\n" in done.stdout


def test_it_needs_no_torch() -> None:
    """So it answers at once, and on a login node without torch."""
    code = "import sys, tools.show_layout as t; t.main(['--world-size', '2']); sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
