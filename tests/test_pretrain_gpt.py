"""The entrance, through real processes: wrong input, stops, deaths, ports, and Megatron's own commands.

Exit codes and limits are those that README promises.
"""

import functools
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from megatron_parm.data.indexed_writer import IndexedWriter
from megatron_parm.errors import DataError
from megatron_parm.observe.json_lines import read_run
from megatron_parm.training import gpt_family
from megatron_parm.training.entrance import pretrain
from megatron_parm.training.step import TrainStep
from megatron_parm.training.trainer import PREEMPTED
from tests.training.processes import free_port, ranks
from tests.training.runs import MOE, NUMBERS, flags, write_corpus

ROOT = Path(__file__).parents[1]
LIMIT_SECONDS = 10.0
SCREEN_LINES = 24


def _magic(prefix: Path) -> None:
    data = Path(f"{prefix}.idx").read_bytes()
    Path(f"{prefix}.idx").write_bytes(b"XXXXXXXXX" + data[9:])


def _short(prefix: Path) -> None:
    data = Path(f"{prefix}.idx").read_bytes()
    Path(f"{prefix}.idx").write_bytes(data[: len(data) // 2])


def _short_bin(prefix: Path) -> None:
    data = Path(f"{prefix}.bin").read_bytes()
    Path(f"{prefix}.bin").write_bytes(data[: len(data) // 2])


def _far_offset(prefix: Path) -> None:
    """The last document's offset points far beyond the .bin."""
    data = bytearray(Path(f"{prefix}.idx").read_bytes())
    (count,) = struct.unpack_from("<Q", data, 18)
    struct.pack_into("<q", data, 34 + 4 * count + 8 * (count - 1), 1 << 40)
    Path(f"{prefix}.idx").write_bytes(data)


def _missing(prefix: Path) -> None:
    Path(f"{prefix}.bin").unlink()


def _large_id(prefix: Path) -> None:
    with IndexedWriter(prefix, np.dtype("u2")) as writer:
        for _ in range(200):
            writer.add_document(np.arange(10))
        writer.add_document(np.array([3, 777, NUMBERS]))


# name -> (ranks, flags, what is done to the data, what the message must contain)
BAD: dict[str, tuple[int, str, Callable[[Path], None] | None, tuple[str, ...]]] = {
    "experts-ep": (
        4,
        "--num-experts 6 --expert-model-parallel-size 4",
        None,
        ("--num-experts 6", "--expert-model-parallel-size 4", "world 4"),
    ),
    "ep-beyond-experts": (
        2,
        "--num-experts 4 --expert-model-parallel-size 8",
        None,
        ("--num-experts 4", "--expert-model-parallel-size 8", "world 2"),
    ),
    "ep-beyond-world": (
        4,
        "--num-experts 8 --expert-model-parallel-size 8",
        None,
        ("--expert-model-parallel-size 8", "--num-experts 8", "world 4"),
    ),
    "tp-world": (4, "--tensor-model-parallel-size 3", None, ("--tensor-model-parallel-size 3", "4 ranks")),
    "esp-ep-stage": (
        4,
        "--num-experts 4 --expert-model-parallel-size 2 --expert-tensor-parallel-size 4",
        None,
        ("--expert-tensor-parallel-size 4", "--expert-model-parallel-size 2", "4 ranks"),
    ),
    "heads-tp": (
        2,
        "--num-attention-heads 3 --hidden-size 18 --tensor-model-parallel-size 2",
        None,
        ("--num-attention-heads 3", "--tensor-model-parallel-size 2"),
    ),
    "unknown-flag": (2, "--num-expert 4", None, ("unknown flag --num-expert", "--num-experts")),
    "batch": (
        2,
        "--global-batch-size 6",
        None,
        ("--global-batch-size 6", "--micro-batch-size 2", "2 data-parallel ranks"),
    ),
    "missing-file": (2, "", _missing, ("numbers.bin",)),
    "idx-magic": (2, "", _magic, ("numbers.idx",)),
    "idx-short": (2, "", _short, ("numbers.idx",)),
    "bin-short": (2, "", _short_bin, ("numbers.bin",)),
    "idx-offset": (2, "", _far_offset, ("numbers.idx",)),
    "token-id": (2, "", _large_id, ("777", "numbers", "--vocab-size")),
}


def _data(corpus: str, folder: Path, damage: Callable[[Path], None] | None) -> str:
    """A copy of the corpus in `folder`, damaged."""
    if damage is None:
        return corpus
    for ending in (".bin", ".idx"):
        shutil.copy(corpus + ending, folder / f"numbers{ending}")
    damage(folder / "numbers")
    return str(folder / "numbers")


def _check_message(text: str, parts: tuple[str, ...]) -> None:
    assert "Traceback" not in text
    lines = text.rstrip().splitlines()
    start = max(number for number, line in enumerate(lines) if "error: " in line)
    assert len(lines) - start <= SCREEN_LINES
    message = "\n".join(lines[start:])
    assert len(message) <= SCREEN_LINES * 80
    for part in parts:
        assert part in message, message
    assert text.count("error: ") == 1, text  # once for all ranks


@pytest.mark.parametrize("name", BAD)
def test_wrong_input_is_a_message_and_code_2_from_every_rank(corpus: str, tmp_path: Path, name: str) -> None:
    world, more, damage, parts = BAD[name]
    argv = flags(_data(corpus, tmp_path, damage), more)
    with ranks(world, argv, tmp_path / "logs") as running:
        assert running.wait() == [2] * world, running.outputs
        assert running.seconds < LIMIT_SECONDS
        _check_message(running.outputs, parts)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("unknown-flag", ""),
        ("missing-file", ""),
        ("idx-magic", ""),
        ("idx-short", ""),
        ("bin-short", ""),
        ("idx-offset", ""),
        ("token-id", ""),
        ("tp-world", "--tensor-model-parallel-size 2"),
        ("experts-ep", "--num-experts 3 --expert-model-parallel-size 2"),
        ("esp-ep-stage", "--num-experts 4 --expert-tensor-parallel-size 2"),
        ("heads-tp", "--num-attention-heads 3"),
        ("batch", "--global-batch-size 7"),
    ],
)
def test_the_same_without_a_launcher(
    corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, more: str
) -> None:
    _, own, damage, parts = BAD[name]
    started = time.monotonic()
    assert pretrain(flags(_data(corpus, tmp_path, damage), more or own)) == 2
    assert time.monotonic() - started < LIMIT_SECONDS
    _check_message(capsys.readouterr().err, tuple(more.split()[-2:]) or parts)


def test_a_missing_required_flag_and_help_need_no_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain(["--num-layers", "2"]) == 2
    _check_message(capsys.readouterr().err, ("--hidden-size", "--help"))
    with pytest.raises(SystemExit) as caught:
        pretrain(["--help"])
    assert caught.value.code == 0 and "--moe-schedule" in capsys.readouterr().out


def test_ranks_with_different_flags_are_told_which(corpus: str, tmp_path: Path) -> None:
    """Before any group exists, with every differing flag and who has which value."""
    first, second = flags(corpus, MOE, "--moe-schedule s1"), flags(corpus, MOE, "--moe-schedule s2 --lr 0.5")
    with ranks(2, [first, second], tmp_path) as running:
        assert running.wait() == [2, 2], running.outputs
        assert running.seconds < LIMIT_SECONDS
        _check_message(
            running.outputs,
            ("--moe-schedule: s1 on rank 0; s2 on rank 1", "--lr: 0.01 on rank 0; 0.5 on rank 1", "same command"),
        )


def test_flags_of_one_rank_that_cannot_be_read_stop_the_others_too(corpus: str, tmp_path: Path) -> None:
    """Rank 1 never comes to the comparison; rank 0 leaves within the set timeout, and the cause is what is shown."""
    good, bad = flags(corpus, "--distributed-timeout-minutes 0.1"), flags(corpus, "--no-such-flag")
    with ranks(2, [good, bad], tmp_path) as running:
        codes = running.wait(30)
        assert codes[1] == 2 and codes[0] not in (0, None), running.outputs
        assert "unknown flag --no-such-flag" in running.output(1)
        assert "Traceback" not in running.outputs


# --- FC-42: one rank fails or dies ---


def _bad_disk(rank: int) -> Any:
    if rank != 1:
        return patch.object(gpt_family, "_unused", None, create=True)

    def failing(*_: Any, **__: Any) -> None:
        raise DataError("/data/numbers.bin: Stale file handle")

    return patch.object(gpt_family, "build_gpt_datasets", failing)


def test_a_data_error_on_one_rank_ends_all_with_its_name(corpus: str, tmp_path: Path) -> None:
    with ranks(2, flags(corpus), tmp_path, _bad_disk) as running:
        assert running.wait() == [2, 2], running.outputs
        _check_message(running.outputs, ("rank 1: /data/numbers.bin: Stale file handle",))


def _in_step(number: int, who: int, action: Callable[[], None], rank: int) -> Any:
    original, calls = TrainStep.run, iter(range(1, 10**9))

    def run(self: TrainStep, *args: Any) -> Any:
        if rank == who and next(calls) == number:
            action()
        return original(self, *args)

    return patch.object(TrainStep, "run", run)


def _raise() -> None:
    raise LookupError("the reason")


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _sleep() -> None:
    time.sleep(3600)


def test_an_exception_on_one_rank_is_the_last_thing_said(corpus: str, tmp_path: Path) -> None:
    """FC-42: all gone in time, the report names the rank first and the file and line."""
    with ranks(2, flags(corpus), tmp_path, functools.partial(_in_step, 2, 1, _raise)) as running:
        codes = running.wait(15)
        assert codes[1] == 1 and codes[0] in (1, 22), running.outputs
        assert running.output(0).count("error") == 0, "rank 0 knows only that a peer left"
        said = running.output(1)
        assert said[said.index("[rank 1]") :].startswith("[rank 1] Traceback")
        assert "test_pretrain_gpt.py" in said
        assert said.rstrip().splitlines()[-1] == "error: LookupError: the reason"


def test_a_killed_rank_ends_the_others(corpus: str, tmp_path: Path) -> None:
    with ranks(2, flags(corpus), tmp_path, functools.partial(_in_step, 2, 1, _die)) as running:
        codes = running.wait(15)
        assert codes[1] == -signal.SIGKILL and codes[0] in (1, 22), running.outputs
        last = running.output(0).rstrip().splitlines()[-1]
        assert last.startswith("[rank 0] error: lost contact with another rank") and "Traceback" not in running.outputs


def test_a_rank_that_hangs_is_given_up_after_the_timeout(corpus: str, tmp_path: Path) -> None:
    argv = flags(corpus, "--distributed-timeout-minutes 0.1")
    with ranks(2, argv, tmp_path, functools.partial(_in_step, 2, 1, _sleep)) as running:
        running.wait_for(lambda: running.processes[0].exitcode is not None, 25)
        assert running.processes[0].exitcode == 22
        assert "lost contact" in running.output(0) and "--distributed-timeout-minutes" in running.output(0)


# --- FC-40: ports ---


def test_a_port_held_by_another_program_is_named(corpus: str, tmp_path: Path) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        with ranks(2, flags(corpus, "--distributed-timeout-minutes 0.1"), tmp_path, port=port) as running:
            assert all(code not in (0, None) for code in running.wait(40)), running.outputs
            assert str(port) in running.outputs and "--master-port" in running.outputs
            assert "Traceback" not in running.outputs


def test_a_second_job_on_the_same_port_stops_and_leaves_the_first_alone(corpus: str, tmp_path: Path) -> None:
    port = free_port()
    first = flags(corpus, "--train-iters 100000 --exit-signal-handler --save", str(tmp_path / "a"))
    with ranks(2, first, tmp_path / "first", port=port) as running:
        running.wait_for(lambda: " iteration " in running.output(0))
        second = flags(corpus, "--distributed-timeout-minutes 0.1")
        with ranks(2, second, tmp_path / "second", port=port) as late:
            assert all(code not in (0, None) for code in late.wait(40)), late.outputs
            assert str(port) in late.outputs and "Traceback" not in late.outputs
        assert [process.is_alive() for process in running.processes] == [True, True]
        before = running.output(0).count(" iteration ")
        running.wait_for(lambda: running.output(0).count(" iteration ") > before)
        os.kill(running.processes[1].pid or 0, signal.SIGTERM)
        assert running.wait() == [0, 0], running.outputs


# --- FC-35: stop signals ---


def test_sigterm_to_one_worker_saves_one_iteration_and_a_resume_goes_on(corpus: str, tmp_path: Path) -> None:
    root, log = tmp_path / "run", tmp_path / "log.jsonl"
    argv = flags(corpus, MOE, "--train-iters 100000 --lr-decay-iters 50 --exit-signal-handler")
    argv += ["--save", str(root), "--load", str(root), "--log-json", str(log)]
    with ranks(2, argv, tmp_path / "first") as running:
        running.wait_for(lambda: running.output(0).count(" iteration ") >= 2)
        os.kill(running.processes[1].pid or 0, signal.SIGTERM)
        os.kill(running.processes[1].pid or 0, signal.SIGTERM)
        assert running.wait() == [0, 0], running.outputs
    stopped = int((root / PREEMPTED).read_text())
    assert (root / "latest_checkpointed_iteration.txt").read_text().strip() == str(stopped)
    assert [folder.name for folder in root.iterdir() if folder.is_dir()] == [f"iter_{stopped:07d}"]
    events = read_run(log).events
    assert [event["iteration"] for event in events if event["event"] == "save"] == [stopped]
    again = [*argv, "--exit-interval", "1", "--train-iters", str(stopped + 1)]
    with ranks(2, [*again, "--override-opt_param-scheduler"], tmp_path / "second") as running:
        assert running.wait() == [0, 0], running.outputs
    assert not (root / PREEMPTED).exists()
    trained = [event["iteration"] for event in read_run(log).events if event["event"] == "train"]
    assert trained == list(range(1, stopped + 2))


def _torchrun(argv: list[str], *own: str) -> "subprocess.Popen[str]":
    """The script under torchrun on two ranks, as a user starts it."""
    command = [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc-per-node", "2", *own]
    return subprocess.Popen(
        [*command, "pretrain_gpt.py", *argv],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("name", ["experts-ep", "token-id"])
def test_wrong_input_under_torchrun_is_code_2_from_both_workers(corpus: str, tmp_path: Path, name: str) -> None:
    """torchrun's own summary tells the codes; our message comes once, before it."""
    _, more, damage, _ = BAD[name]
    more = more.replace("--num-experts 6", "--num-experts 3").replace("parallel-size 4", "parallel-size 2")
    with _torchrun(flags(_data(corpus, tmp_path, damage), more)) as running:
        said = running.communicate(timeout=90)[0]
    assert running.returncode == 1
    assert said.count("exitcode  : 2 ") == 2, said
    ours = said[: said.index("torch/distributed/elastic")]
    assert ours.count("error: ") == 1 and "Traceback" not in ours


@pytest.mark.full
def test_torchrun_restarts_a_run_whose_rank_was_killed(corpus: str, tmp_path: Path) -> None:
    """After a kill the second attempt goes on from the newest checkpoint and ends as the uninterrupted run."""
    argv = flags(
        corpus, MOE, "--train-iters 400 --tensor-model-parallel-size 2 --save-interval 20 --hidden-dropout 0.1"
    )
    golden, log, root = tmp_path / "golden.jsonl", tmp_path / "log.jsonl", tmp_path / "run"
    with _torchrun([*argv, "--log-json", str(golden)]) as running:
        said = running.communicate(timeout=120)[0]
    assert running.returncode == 0, said
    argv += ["--log-json", str(log), "--save", str(root), "--load", str(root)]
    with _torchrun(argv, "--max-restarts", "1") as running:
        deadline = time.monotonic() + 90
        while not log.exists() or log.read_text().count('"event": "save"') < 2:
            assert running.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)
        said = running.communicate(timeout=120)[0]
    assert running.returncode == 0, said
    losses = [
        {event["iteration"]: event["lm_loss"] for event in read_run(path).events if event["event"] == "train"}
        for path in (golden, log)
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 400
    assert [event["event"] for event in read_run(log).events].count("start") == 2


def test_sigterm_to_torchrun_saves_and_leaves_a_marker(corpus: str, tmp_path: Path) -> None:
    """FC-35 through the script itself: torchrun hands the signal on and says 1 whatever its workers say."""
    root, log = tmp_path / "run", tmp_path / "log.jsonl"
    argv = flags(corpus, MOE, "--train-iters 100000 --exit-signal-handler --tensor-model-parallel-size 2")
    argv += ["--save", str(root), "--log-json", str(log)]
    with _torchrun(argv) as running:
        try:
            deadline = time.monotonic() + 90
            while not log.exists() or log.read_text().count('"train"') < 2:
                assert running.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
            running.send_signal(signal.SIGTERM)
            said = running.communicate(timeout=60)[0]
        finally:
            running.kill()
    assert running.returncode == 1
    stopped = int((root / PREEMPTED).read_text())
    assert (root / "latest_checkpointed_iteration.txt").read_text().strip() == str(stopped)
    events = read_run(log).events
    assert events[-1]["event"] == "end" and events[-1]["exit_code"] == 0
    assert events[-1]["reason"] == "exiting after a termination signal"
    assert sum(event["event"] == "train" for event in events) == stopped
    assert f"ended at iteration {stopped}: exiting after a termination signal" in said


def test_without_the_handler_sigterm_ends_the_run(corpus: str, tmp_path: Path) -> None:
    with ranks(2, flags(corpus, "--train-iters 100000"), tmp_path) as running:
        running.wait_for(lambda: " iteration " in running.output(0))
        for process in running.processes:
            os.kill(process.pid or 0, signal.SIGTERM)
        assert all(code not in (0, None) for code in running.wait(20)), running.outputs


# --- one rank prints ---


def test_exactly_one_rank_prints_and_every_sink_is_written_once(corpus: str, tmp_path: Path) -> None:
    """FC-37; the console has Megatron's fields in Megatron's order."""
    log = tmp_path / "log.jsonl"
    argv = flags(corpus, MOE, "--tensor-model-parallel-size 2 --eval-iters 1 --eval-interval 2 --num-workers 1")
    argv += ["--log-json", str(log), "--tensorboard-dir", str(tmp_path / "board")]
    with ranks(2, argv, tmp_path / "logs") as running:
        assert running.wait() == [0, 0], running.outputs
        assert running.output(1) == ""
        lines = [line for line in running.output(0).splitlines() if line.startswith(" iteration ")]
        assert len(lines) == 4
        fields = [field.split(":")[0].strip() for field in lines[0].split("|")]
        order = ["consumed samples", "elapsed time per iteration (ms)", "learning rate", "global batch size", "lm loss"]
        assert [field for field in fields if field in order] == order
        assert running.output(0).count("validation loss at") == 4
    assert len([event for event in read_run(log).events if event["event"] == "train"]) == 4
    assert len(list((tmp_path / "board").iterdir())) == 1


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small corpus."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "numbers")
