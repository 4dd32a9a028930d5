"""Reference: small logs written line by line here, and what a picture of them must hold."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.image import imread

from megatron_parm.observe.json_lines import read_run
from tools.plot_run import curves_of, labels_of, main, smoothed

ROOT = Path(__file__).resolve().parents[2]


def train(iteration, loss, **fields):
    return {"event": "train", "iteration": iteration, "consumed_samples": 8 * iteration, "lm_loss": loss, **fields}


def valid(iteration, loss, **fields):
    return {"event": "valid", "iteration": iteration, "consumed_samples": 8 * iteration, "lm_loss": loss, **fields}


START = {"event": "start", "iteration": 0}
RESUMED = [START, train(1, 5.0), train(2, 4.0), valid(2, 4.5), train(3, 9.0), {"event": "start", "iteration": 2},
           train(3, 3.0), train(4, 2.0), valid(4, 2.5), {"event": "end", "iteration": 4}]  # fmt: skip


@pytest.fixture
def log_file(tmp_path):
    def write(events, name="run.jsonl", tail=""):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(event) + "\n" for event in events) + tail)
        return path

    return write


def test_a_resumed_run_has_the_later_lines(log_file):
    run = curves_of(read_run(log_file(RESUMED)), "run", "lm_loss", "iteration")
    assert run.train == {1: 5.0, 2: 4.0, 3: 3.0, 4: 2.0}
    assert run.valid == {2: 4.5, 4: 2.5}
    assert run.restarts == [2]


def test_samples_as_the_x_axis(log_file):
    run = curves_of(read_run(log_file(RESUMED)), "run", "lm_loss", "consumed_samples")
    assert list(run.train) == [8, 16, 24, 32] and run.restarts == [16]


def test_skipped_iterations_and_test_losses_are_not_drawn(log_file):
    events = [train(1, 5.0), train(2, "NaN", skipped=1), train(3, "NaN"), valid(3, 7.0, split="test")]
    run = curves_of(read_run(log_file(events)), "run", "lm_loss", "iteration")
    assert list(run.train) == [1, 3] and math.isnan(run.train[3]) and run.valid == {}


def test_smoothing_leaves_out_what_is_not_finite():
    assert smoothed([1.0, 3.0, math.nan, 5.0], 3) == [2.0, 2.0, 4.0, 5.0]
    assert smoothed([1.0, 2.0], 1) == [1.0, 2.0]


def test_files_of_one_name_are_told_apart():
    assert labels_of([Path("/a/run.jsonl"), Path("/b/run.jsonl"), Path("/b/s1.jsonl")]) == ["a/run", "b/run", "s1"]


@pytest.mark.parametrize("smooth", ["1", "2"])
def test_several_runs_in_one_picture(log_file, tmp_path, smooth):
    picture = tmp_path / "new" / "loss.png"
    other = [START, train(1, 6.0), train(2, 5.5), valid(1, 6.2), valid(2, 5.7)]
    paths = [str(log_file(RESUMED)), str(log_file(other, "b.jsonl"))]
    rc = main([*paths, "--output", str(picture), "--smooth", smooth, "--reference", "unigram entropy=4.2"])
    assert rc == 0
    pixels = imread(picture)
    assert pixels.shape[:2] == (900, 1500)
    colours = (pixels[:, :, :3] * 255).round().astype(int)
    for red_green_blue in ((0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)):  # the colours of the first and second run
        assert (colours == red_green_blue).all(axis=2).sum() > 500


def test_the_table(log_file, capsys):
    assert main([str(log_file(RESUMED)), "--text", "--reference", "entropy=4.25"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["1", "5.000000"]
    assert lines[3].split() == ["2", "4.000000", "4.500000"]
    assert lines[-3].split() == ["4", "2.000000", "2.500000"]
    assert lines[-2:] == ["resumed at 2", "entropy: 4.250000"]


def test_a_long_run_has_a_short_table_with_its_last_row(log_file, capsys):
    assert main([str(log_file([train(i, float(i)) for i in range(1, 1001)])), "--text"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 15 and lines[-1].split() == ["1000", "1000.000000"]


def test_a_line_cut_off_is_noted_and_skipped(log_file, capsys):
    path = log_file(RESUMED, tail='{"event": "train", "iter')
    assert main([str(path), "--text"]) == 0
    captured = capsys.readouterr()
    assert f"note: {path}: skipped 1 line(s) cut off or not JSON: 11" in captured.err
    assert "2.500000" in captured.out


@pytest.mark.parametrize(
    ("events", "flags", "message"),
    [
        ([START], ["--text"], "holds no lm_loss"),
        (RESUMED, ["--text", "--loss", "sop_loss"], "holds no sop_loss"),
        (RESUMED, [], "nothing to do"),
        (RESUMED, ["--output", "loss.xyz"], "--output loss.xyz must end in .png, .pdf or .svg"),
        (RESUMED, ["--output", "/dev/null/loss.png"], "cannot write --output /dev/null/loss.png: "),
        (RESUMED, ["--text", "--reference", "6.1"], 'must be "name=value"'),
        (RESUMED, ["--text", "--reference", "a=b"], 'must be "name=value"'),
    ],
)
def test_bad_input_is_one_message_and_code_2(log_file, capsys, events, flags, message):
    assert main([str(log_file(events)), *flags]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and message in captured.err and captured.err.count("\n") == 1


def test_the_command_runs_from_anywhere(tmp_path):
    missing = tmp_path / "none.jsonl"
    command = [sys.executable, str(ROOT / "tools" / "plot_run.py"), str(missing), "--text"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == f"error: cannot read the run log {missing}: No such file or directory\n"
