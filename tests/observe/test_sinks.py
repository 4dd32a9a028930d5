"""Reference: a failing sink costs one warning, never the run, and the other sinks stay complete (fault 37); what is in
the environment is in no artefact (fault 43)."""

import io
import json
import sys
import types

import pytest

from megatron_parm.observe.console import ConsoleSink
from megatron_parm.observe.json_lines import JsonLinesSink
from megatron_parm.observe.log import Log
from megatron_parm.observe.sinks import Recorder
from megatron_parm.observe.tensorboard_sink import TensorBoardSink
from megatron_parm.observe.wandb_sink import WandbSink
from tests.observe.fixtures import ALL_RECORDS

SECRET = "SECRETSENTINEL"


class Kept:
    """A sink that remembers, and raises on the write and the close that it is told to fail."""

    def __init__(self, fails_at=None, fails_on_close=False):
        self.records = []
        self.fails_at = fails_at
        self.fails_on_close = fails_on_close
        self.calls = 0

    def write(self, record):
        self.calls += 1
        if self.calls == self.fails_at:
            raise OSError("disk full")
        self.records.append(record)

    def close(self):
        if self.fails_on_close:
            raise RuntimeError("no goodbye")


@pytest.fixture
def log():
    return Log(0, out=io.StringIO(), err=io.StringIO())


def warnings_of(log):
    return log._err.getvalue().splitlines()


def run(log, **sinks):
    with Recorder(log.warn_once) as recorder:
        for name, make in sinks.items():
            recorder.add(name, make)
        for record in ALL_RECORDS:
            recorder.write(record)


@pytest.mark.parametrize("fails_at", [1, 2, 5])
def test_a_sink_that_raises_is_switched_off_with_one_warning(log, fails_at):
    bad, good = Kept(fails_at), Kept()
    run(log, bad=lambda: bad, good=lambda: good)
    assert bad.calls == fails_at
    assert good.records == list(ALL_RECORDS)
    assert warnings_of(log) == ["warning: bad failed and is switched off, training goes on: OSError: disk full"]


def test_a_sink_that_fails_on_close(log):
    bad, good = Kept(fails_on_close=True), Kept()
    run(log, bad=lambda: bad, good=lambda: good)
    assert good.records == list(ALL_RECORDS)
    assert len(warnings_of(log)) == 1


def test_a_folder_that_cannot_be_written(log, tmp_path):
    """A path below a file fails for every user, root included, as a read-only folder does for others."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    path = tmp_path / "run.jsonl"
    run(
        log,
        tensorboard=lambda: TensorBoardSink(blocked / "tb"),
        json=lambda: JsonLinesSink(path),
        other=lambda: JsonLinesSink(blocked / "run.jsonl"),
    )
    assert len(warnings_of(log)) == 2
    assert len(path.read_text().splitlines()) == len(ALL_RECORDS)


def test_stopping_by_the_keyboard_is_not_swallowed(log):
    class Interrupted(Kept):
        def write(self, record):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(log, console=Interrupted)


def fake_wandb(monkeypatch, init):
    module = types.ModuleType("wandb")
    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)


def test_wandb_that_is_missing_or_raises_costs_one_warning_without_its_text(log, tmp_path, monkeypatch):
    def refuse(**_):
        raise RuntimeError(f"bad key {SECRET}")

    monkeypatch.setitem(sys.modules, "wandb", None)  # import wandb raises ImportError
    run(log, absent=lambda: WandbSink("p", tmp_path, name="n"))
    fake_wandb(monkeypatch, refuse)
    run(log, wandb=lambda: WandbSink("p", tmp_path, name="n"))
    absent, raising = warnings_of(log)
    assert "pip install wandb" in absent
    assert "RuntimeError from wandb" in raising and SECRET not in raising


def test_wandb_gets_configuration_and_scalars(log, tmp_path, monkeypatch):
    logged = []
    config = types.SimpleNamespace(update=lambda values, **_: logged.append(("config", values["config"])))
    wandb_run = types.SimpleNamespace(
        config=config, log=lambda scalars, step: logged.append((step, scalars)), finish=lambda: logged.append("end")
    )
    asked = {}
    fake_wandb(monkeypatch, lambda **names: asked.update(names) or wandb_run)
    run(log, wandb=lambda: WandbSink("p", tmp_path, name="n"))
    assert asked == {"project": "p", "entity": None, "name": "n", "dir": str(tmp_path)}
    assert logged[0] == ("config", {"hidden_size": 32, "load": "runs/a", "lr": 0.001})
    assert logged[1][0] == 3 and logged[1][1]["grad-norm"] == 2.5
    assert logged[2] == (3, {"lm loss validation": 9.2})
    assert logged[3] == "end" and warnings_of(log) == []


def test_no_secret_of_the_environment_reaches_an_artefact(log, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    run(
        log,
        console=lambda: ConsoleSink(log.say),
        json=lambda: JsonLinesSink(tmp_path / "run.jsonl"),
        tensorboard=lambda: TensorBoardSink(tmp_path / "tb"),
    )
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 2
    assert all(SECRET.encode() not in path.read_bytes() for path in files)
    assert SECRET not in log._out.getvalue() + log._err.getvalue()
    assert "hidden_size" in json.loads((tmp_path / "run.jsonl").read_text().splitlines()[0])["config"]
