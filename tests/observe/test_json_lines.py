"""Reference: Python's own JSON reader in strict mode, and the fields that the contract of `--log-json` names."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch

from megatron_parm.errors import DataError
from megatron_parm.observe.json_lines import JsonLinesSink, as_event, number_of, plain, read_run
from tests.observe.fixtures import ALL_RECORDS, END, SAVE, START, TRAIN, VALID

CONTRACT = {
    "start": "version config layout parameters moe_schedule",
    "train": "iteration consumed_samples lm_loss load_balancing_loss grad_norm learning_rate loss_scale skipped "
    "iteration_time_ms tokens_per_second tflops_per_second moe",
    "valid": "iteration lm_loss",
    "save": "iteration path seconds stall_seconds",
    "end": "iteration reason exit_code",
}


def strict_lines(path):
    def refuse(text):
        raise AssertionError(f"{text} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def write(path, *records):
    sink = JsonLinesSink(path)
    for record in records:
        sink.write(record)
    sink.close()


def test_every_event_has_the_fields_of_the_contract(tmp_path):
    path = tmp_path / "deep" / "run.jsonl"
    write(path, *ALL_RECORDS)
    lines = strict_lines(path)
    assert [line["event"] for line in lines] == list(CONTRACT)
    for line in lines:
        assert set(CONTRACT[line["event"]].split()) <= line.keys()
    start, train = lines[:2]
    assert start["config"] == {"hidden_size": 32, "load": "runs/a", "lr": 0.001}
    assert start["parameters"] == {"total": 1234567, "per_rank": 400000}
    assert start["moe_schedule"] == {
        "name": "s1",
        "chunks": 1,
        "reason": "s1: 4.1 ms predicted, s2 5.0 ms",
        "predicted_ms": {"s1": 4.1, "s2": 5.0},
    }
    assert train["moe"] == {"drop_rate": 0.0, "max_load": 1.5, "router_entropy": 1.38}


@pytest.mark.parametrize("value", [1.0 / 3.0, 0.1 + 0.2, 5e-324, 1.7976931348623157e308, float(numpy.float32(0.1))])
def test_numbers_read_back_exactly(tmp_path, value):
    path = tmp_path / "run.jsonl"
    write(path, replace(TRAIN, losses={"lm loss": value}))
    assert strict_lines(path)[0]["lm_loss"] == value
    assert f'"lm_loss": {value!r}' in path.read_text()  # repr is the shortest text that reads back exactly


def test_numbers_that_are_not_finite_are_strings_and_read_back(tmp_path):
    path = tmp_path / "run.jsonl"
    write(path, replace(TRAIN, losses={"lm loss": math.nan}, grad_norm=math.inf, learning_rate=-math.inf))
    (line,) = strict_lines(path)
    assert (line["lm_loss"], line["grad_norm"], line["learning_rate"]) == ("NaN", "Infinity", "-Infinity")
    assert math.isnan(number_of(line["lm_loss"])) and number_of(line["grad_norm"]) == math.inf


def test_a_resumed_run_appends(tmp_path):
    path = tmp_path / "run.jsonl"
    write(path, START, TRAIN)
    write(path, replace(START, iteration=3), END)
    assert [line["event"] for line in strict_lines(path)] == ["start", "train", "start", "end"]


def test_a_line_torn_by_a_killed_writer_spoils_no_other(tmp_path):
    path = tmp_path / "run.jsonl"
    write(path, START)
    with path.open("a") as file:
        file.write('{"event": "train", "iterat')
    write(path, VALID, SAVE)
    log = read_run(path)
    assert [event["event"] for event in log.events] == ["start", "valid", "save"]
    assert log.unreadable_lines == [2]


def test_what_was_written_is_on_disk_when_the_process_is_killed(tmp_path):
    """A writer that ends by SIGKILL right after its write: no buffer is flushed for it."""
    path = tmp_path / "run.jsonl"
    program = (
        "import os, signal, sys\n"
        "from megatron_parm.observe.json_lines import JsonLinesSink\n"
        "from megatron_parm.observe.records import SaveRecord\n"
        "sink = JsonLinesSink(sys.argv[1])\n"
        "sink.write(SaveRecord(3, 'x', 0.5, 0.25))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", program, str(path)], cwd=root, check=False).returncode == -9
    assert strict_lines(path)[0]["event"] == "save"


def test_optional_figures_are_left_out_when_not_measured():
    bare = replace(TRAIN, num_zeros=None, params_norm=None, moe=None, memory=None, spans_ms={}, grad_norm=None)
    event = as_event(bare)
    assert not {"num_zeros", "params_norm", "moe", "memory", "spans_ms"} & event.keys()
    assert event["grad_norm"] is None  # a field of the contract is always there


def test_plain_takes_what_configurations_hold():
    value = {"dtype": torch.bfloat16, "t": torch.tensor(2.5), "n": numpy.int64(3), "p": Path("a/b"), "s": (1, None)}
    assert plain(value) == {"dtype": "torch.bfloat16", "t": 2.5, "n": 3, "p": "a/b", "s": [1, None]}


def test_a_missing_file_is_told_by_name(tmp_path):
    with pytest.raises(DataError, match=r"cannot read the run log .*none\.jsonl: No such file"):
        read_run(tmp_path / "none.jsonl")
