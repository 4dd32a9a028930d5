"""How a worker ends: codes, messages, sinks. Reference: the table of exit codes in README."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_parm.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    LayoutError,
    MegatronParmError,
    NonFiniteError,
    UntrustedCheckpointError,
)
from megatron_parm.observe.json_lines import read_run
from megatron_parm.parallel.launch import LaunchEnvironment
from megatron_parm.training.entrance import guarded, pretrain
from tests.training.processes import LAUNCHER_VARIABLES
from tests.training.runs import MOE, flags

SECRET = "SECRETSENTINEL"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher, whatever started these tests."""
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def _raising(error: BaseException) -> Callable[[LaunchEnvironment], None]:
    def work(_: LaunchEnvironment) -> None:
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("told"), 2),
        (LayoutError("told"), 2),
        (DataError("told"), 2),
        (MegatronParmError("told"), 2),
        (CheckpointError("told"), 21),
        (UntrustedCheckpointError("told"), 21),
        (NonFiniteError("told"), 24),
    ],
)
def test_our_errors_are_a_message_and_their_code(
    error: MegatronParmError, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(_raising(error)) == code
    assert capsys.readouterr().err == "error: told\n"


@pytest.mark.parametrize(
    ("error", "code", "last"),
    [
        (LookupError("the reason"), 1, "error: LookupError: the reason"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), 23, "--micro-batch-size"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate"), 23, "--micro-batch-size"),
        (MemoryError(), 23, "MemoryError"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_other_errors_end_with_their_cause(
    error: BaseException, code: int, last: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(_raising(error)) == code
    said = capsys.readouterr().err
    assert last in said.rstrip().splitlines()[-1]
    assert ("Traceback" in said) == (not isinstance(error, KeyboardInterrupt))


@pytest.mark.parametrize(("reason", "code"), [("Connection reset by peer", 1), ("Timed out waiting 6000ms", 22)])
def test_a_lost_peer_is_no_traceback(reason: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(_raising(RuntimeError(f"[gloo/pair.cc] {reason}\nmore"))) == code
    said = capsys.readouterr().err
    assert "lost contact with another rank" in said and reason in said and "Traceback" not in said


def test_an_environment_that_is_no_launchers_is_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert guarded(_raising(AssertionError("not reached"))) == 2
    assert "torchrun" in capsys.readouterr().err


def test_work_that_ends_is_code_0() -> None:
    seen: list[LaunchEnvironment] = []
    assert guarded(seen.append) == 0
    assert (seen[0].rank, seen[0].world) == (0, 1)


def test_a_whole_run_in_one_process(
    corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Console, JSON lines, TensorBoard and checkpoint from one command; no secret of the environment in any of them."""
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    argv = flags(corpus, MOE, "--eval-iters 1 --eval-interval 2 --log-interval 2 --log-validation-ppl-to-tensorboard")
    argv += ["--save", str(tmp_path / "run"), "--log-json", str(tmp_path / "log.jsonl")]
    assert pretrain([*argv, "--tensorboard-dir", str(tmp_path / "board")]) == 0
    said = capsys.readouterr()
    assert said.out.count(" iteration ") - said.out.count("at iteration ") >= 2
    events = read_run(tmp_path / "log.jsonl").events
    assert [event["event"] for event in events] == (
        ["start", "train", "train", "valid", "train", "train", "valid", "save", "valid", "valid", "end"]
    )
    assert events[-1]["exit_code"] == 0 and events[0]["config"]["num_experts"] == 4  # type: ignore[index,call-overload]
    texts = [said.out, said.err, *(path.read_bytes().decode(errors="replace") for path in _files(tmp_path))]
    assert len(texts) > 6 and not any(SECRET in text for text in texts)


def _files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


def test_a_sink_that_cannot_be_opened_is_one_warning_and_training_goes_on(
    corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """TensorBoard's folder is a file; the JSON log beside it stays complete."""
    (tmp_path / "file").write_text("in the way")
    argv = [*flags(corpus), "--tensorboard-dir", str(tmp_path / "file"), "--log-json", str(tmp_path / "log.jsonl")]
    assert pretrain(argv) == 0
    assert capsys.readouterr().err.count("warning: TensorBoard") == 1
    assert len([event for event in read_run(tmp_path / "log.jsonl").events if event["event"] == "train"]) == 4


def test_names_that_do_nothing_are_said_once(corpus: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain(flags(corpus, "--use-flash-attn --train-iters 1 --use-flash-attn")) == 0
    assert capsys.readouterr().err.count("--use-flash-attn is accepted and ignored") == 1


def test_what_is_wrong_before_training_writes_nothing(corpus: str, tmp_path: Path) -> None:
    argv = [*flags(corpus), "--log-json", str(tmp_path / "log.jsonl"), "--load", str(tmp_path / "none")]
    assert pretrain(argv) == 2
    assert not os.listdir(tmp_path)


def test_the_yaml_file_of_flags_is_the_same_run(corpus: str, tmp_path: Path) -> None:
    """--config under the flags: same numbers, and the flags win."""
    argv = flags(corpus)
    pairs = zip(argv[::2], argv[1::2], strict=True)
    (tmp_path / "run.yaml").write_text("".join(f"{name[2:]}: {json.dumps(value)}\n" for name, value in pairs))
    logs = [tmp_path / "flags.jsonl", tmp_path / "file.jsonl"]
    assert pretrain([*argv, "--log-json", str(logs[0])]) == 0
    assert pretrain(["--config", str(tmp_path / "run.yaml"), "--log-json", str(logs[1])]) == 0
    losses = [[event["lm_loss"] for event in read_run(log).events if event["event"] == "train"] for log in logs]
    assert losses[0] == losses[1] and len(losses[0]) == 4


def test_every_flag_of_the_sinks_reaches_its_sink(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """wandb's package is a stand-in; TensorBoard is read by its own reader."""
    asked: dict[str, Any] = {}
    scalars: list[dict[str, float]] = []
    run = SimpleNamespace(
        config=SimpleNamespace(update=lambda *_, **__: None),
        log=lambda values, step: scalars.append(values),
        finish=lambda: asked.update(is_finished=True),
    )
    stand_in = ModuleType("wandb")
    stand_in.init = lambda **names: asked.update(names) or run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    sinks = f"--wandb-project p --wandb-exp-name n --wandb-entity e --save {tmp_path} --tensorboard-dir {tmp_path}/tb"
    timers = "--timing-log-level 1 --timing-log-option all --log-timers-to-tensorboard --train-iters 2"
    assert pretrain(flags(corpus, sinks, timers)) == 0
    assert asked == {
        "project": "p",
        "name": "n",
        "entity": "e",
        "dir": str(tmp_path / "wandb"),
        "is_finished": True,
    }
    assert {"lm loss", "optimizer-time", "iteration-time"} <= scalars[0].keys()
    reader = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert "forward-backward-time" in reader.Tags()["scalars"]
    assert "  all-grads-sync:\n     rank  0: " in capsys.readouterr().out
