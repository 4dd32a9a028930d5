"""Faults of a run around its checkpoints: kills, damage, signals. Reference: the run that met none, bitwise.

The faults are put in by the tests, by patching the saving code of one rank; the program has no switch for them.
"""

import functools
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron_parm.checkpoint import paths, save, storage
from megatron_parm.data import samplers
from megatron_parm.observe.json_lines import read_run
from megatron_parm.training.trainer import PREEMPTED
from tests.harness.layouts import SINGLE, Layout
from tests.harness.pools import Pools
from tests.training.processes import ranks
from tests.training.runs import DROPOUT, MOE, Outcome, flags, run_training

LENGTH = "--train-iters 6 --save-interval 2"
TRACKER = "latest_checkpointed_iteration.txt"
CORRUPT = 21


def _run(pools: Pools, layout: Layout, argv: list[str]) -> list[Outcome]:
    outcomes: list[Outcome] = pools.run(layout, run_training, argv)
    return outcomes


def _folders(root: Path) -> list[str]:
    return sorted(entry.name for entry in root.iterdir() if entry.is_dir())


def _die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _half_then_die(file: Any, data: memoryview) -> None:
    file.write(data[: len(data) // 2])
    _die()


# where a rank dies in its second save: what is patched, which rank, and the iteration that a rerun goes on from
KILLS: dict[str, tuple[Any, str, Any, int, int]] = {
    "before the first shard": (save, "write_shard", _die, 1, 2),
    "in a shard": (storage, "write_all", _half_then_die, 1, 2),
    "after the shards": (save, "_write_state", _die, 0, 2),
    "after the manifest": (paths, "publish", _die, 0, 2),
    "before the tracker": (paths, "write_tracker", _die, 0, 4),
}


def _dies_in_the_second_save(point: str, rank: int) -> Any:
    owner, name, fault, who, _ = KILLS[point]
    original = getattr(owner, name)

    def second(*args: Any) -> Any:
        place = next((part for part in map(str, (*args, getattr(args[0], "name", ""))) if "iter_" in part), "")
        is_second = "iter_0000004" in place or (name == "write_tracker" and args[1] == 4)
        return fault(*args) if is_second else original(*args)

    return mock.patch.object(owner, name, second) if rank == who else mock.MagicMock()


@pytest.mark.parametrize(
    "point",
    [pytest.param(p, marks=[] if p in ("in a shard", "before the tracker") else pytest.mark.full) for p in KILLS],
)
def test_a_run_killed_while_saving_goes_on_bitwise(pools: Pools, corpus: str, tmp_path: Path, point: str) -> None:
    """The rerun of the same command takes the newest whole checkpoint and ends as if nothing had happened."""
    root = tmp_path / "run"
    argv = flags(corpus, MOE, DROPOUT, LENGTH, f"--save {root} --load {root}")
    golden = _run(pools, Layout(2), flags(corpus, MOE, DROPOUT, LENGTH))
    with ranks(2, argv, tmp_path / "first", functools.partial(_dies_in_the_second_save, point)) as running:
        codes = running.wait()
        assert -signal.SIGKILL in codes and 0 not in codes, running.outputs
    outcomes = _run(pools, Layout(2), argv)
    resumed = KILLS[point][4]
    assert outcomes[0].error is None
    assert outcomes[0].figures() == golden[0].figures()[resumed:]
    assert _folders(root) == ["iter_0000002", "iter_0000004", "iter_0000006"]


@pytest.fixture(scope="module")
def three(pools: Pools, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with checkpoints at 2, 4 and 6. Damage is undone by the test that does it."""
    root = tmp_path_factory.mktemp("three")
    assert _run(pools, SINGLE, flags(corpus, MOE, LENGTH, f"--save {root}"))[0].error is None
    return root


@pytest.mark.parametrize("kind", ["safetensors", "state.json", "manifest.json"])
def test_a_flipped_bit_stops_or_falls_back(pools: Pools, corpus: str, three: Path, kind: str) -> None:
    (file,) = (three / "iter_0000006").glob(f"*{kind}")
    before = file.read_bytes()
    damaged = bytearray(before)
    damaged[len(damaged) // 2] ^= 1
    file.write_bytes(damaged)
    try:
        argv = flags(corpus, MOE, LENGTH, f"--load {three}")
        error = _run(pools, SINGLE, argv)[0].error
        assert error is not None and error[1] == CORRUPT and file.name in error[2]
        fallen = _run(pools, SINGLE, [*argv, "--resume", "auto"])[0]
    finally:
        file.write_bytes(before)
    assert fallen.error is None and fallen.column("iteration") == [5, 6]
    assert "resuming from" in fallen.said and "iter_0000004" in fallen.said


def _record_samples(seen: list[list[int]]) -> Any:
    original = samplers.SequentialSampler.__iter__

    def noting(self: Any) -> Any:
        for batch in original(self):
            seen.append(list(batch))
            yield batch

    return mock.patch.object(samplers.SequentialSampler, "__iter__", noting)


def _samples(ctx: Any, argv: list[str]) -> list[list[int]]:
    seen: list[list[int]] = []
    with _record_samples(seen):
        outcome = run_training(ctx, argv)
    assert outcome.error is None, outcome.error
    return seen


def test_other_ranks_read_the_same_samples(pools: Pools, corpus: str, tmp_path: Path) -> None:
    """4 ranks for 3 steps, 2 ranks for 3: each global batch is that of a run on 2 ranks alone."""
    argv = flags(corpus, "--train-iters 6 --micro-batch-size 1")
    saving = [*argv, "--save", str(tmp_path), "--exit-interval", "3"]
    parts = (
        (pools.run(Layout(4), _samples, saving), 3),
        (pools.run(Layout(2), _samples, [*argv, "--load", str(tmp_path)]), 3),
    )
    steps = [step for seen, count in parts for step in _global_batches(seen, count)]
    assert steps == _global_batches(pools.run(Layout(2), _samples, argv), 6)
    assert sorted(sample for step in steps for sample in step) == list(range(48))


def _global_batches(ranks_seen: list[list[list[int]]], steps: int) -> list[list[int]]:
    """The samples of each step, in order; a loader may have fetched further ones."""
    per_rank = 8 // len(ranks_seen)
    return [
        sorted(
            sample
            for seen in ranks_seen
            for sample in [one for batch in seen for one in batch][step * per_rank : (step + 1) * per_rank]
        )
        for step in range(steps)
    ]


def test_loader_processes_go_on_where_they_were(pools: Pools, corpus: str, tmp_path: Path) -> None:
    """With 2 of them, which fetch ahead, as without any. In processes: a worker of a pool may have no children."""
    argv = flags(corpus, DROPOUT, "--train-iters 6")
    straight = _run(pools, SINGLE, argv)[0].column("lm_loss")
    log = tmp_path / "broken.jsonl"
    more = ["--num-workers", "2", "--log-json", str(log)]
    for place, part in enumerate(
        (["--save", f"{tmp_path}/run", "--exit-interval", "3"], ["--load", f"{tmp_path}/run"])
    ):
        with ranks(1, [*argv, *more, *part], tmp_path / str(place)) as running:
            assert running.wait() == [0], running.outputs
    assert [event["lm_loss"] for event in read_run(log).events if event["event"] == "train"] == straight
    assert len(straight) == 6


@pytest.mark.parametrize("how", ["SIGUSR1", pytest.param("budget", marks=pytest.mark.full)])
def test_a_time_budget_or_sigusr1_saves_and_a_resume_goes_on(
    pools: Pools, corpus: str, tmp_path: Path, how: str
) -> None:
    root = tmp_path / "run"
    argv = flags(corpus, MOE, DROPOUT, f"--train-iters 100000 --lr-decay-iters 50 --save {root} --load {root}")
    more = ["--exit-duration-in-mins", "0.05"] if how == "budget" else ["--exit-signal-handler"]
    with ranks(2, [*argv, *more], tmp_path / "first") as running:
        running.wait_for(lambda: running.output(0).count("lm loss") >= 2)
        if how == "SIGUSR1":
            os.kill(running.processes[1].pid or 0, signal.SIGUSR1)
        assert running.wait() == [0, 0], running.outputs
    stopped = int((root / PREEMPTED).read_text())
    assert (root / TRACKER).read_text() == str(stopped)
    further = ["--exit-interval", str(stopped + 2)]
    resumed = _run(pools, Layout(2), [*argv, *further])[0]
    golden = _run(pools, Layout(2), [*_without_folders(argv), *further])[0]
    assert resumed.column("iteration") == [stopped + 1, stopped + 2]
    assert resumed.column("lm_loss") == golden.column("lm_loss")[stopped:]


def _without_folders(argv: list[str]) -> list[str]:
    at = argv.index("--save")
    return argv[:at] + argv[at + 4 :]


def _slow_writes(marker: Path, rank: int) -> Any:
    original = storage.write_all

    def slow(file: Any, data: memoryview) -> None:
        marker.with_suffix(f".{rank}").touch()
        time.sleep(0.05)
        original(file, data)

    return mock.patch.object(storage, "write_all", slow)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_second_signal_during_the_save(corpus: str, tmp_path: Path, number: signal.Signals) -> None:
    """SIGTERM twice: the save completes. SIGINT twice: it is dropped whole, and the older checkpoint is the newest."""
    root, marker = tmp_path / "run", tmp_path / "writing"
    first = flags(corpus, f"--train-iters 2 --save {root}")
    with ranks(1, first, tmp_path / "first") as running:
        assert running.wait() == [0], running.outputs
    argv = flags(corpus, f"--train-iters 100000 --lr-decay-iters 4 --save {root} --load {root} --exit-signal-handler")
    argv += ["--override-opt_param-scheduler", *(["--save-interval", "4"] if number == signal.SIGINT else [])]
    with ranks(2, argv, tmp_path / "second", functools.partial(_slow_writes, marker)) as running:
        running.wait_for(lambda: "lm loss" in running.output(0))
        for count in range(2):
            if count or number == signal.SIGINT:
                running.wait_for(lambda: all(marker.with_suffix(f".{rank}").exists() for rank in range(2)))
            for process in running.processes:
                with suppress(ProcessLookupError):  # the first SIGINT was enough
                    os.kill(process.pid or 0, number)
        codes = running.wait()
    saved = (root / TRACKER).read_text()
    if number == signal.SIGTERM:
        assert codes == [0, 0] and (root / PREEMPTED).read_text().strip() == saved != "2"
    else:
        assert 0 not in codes and saved == "2"
    with ranks(1, [*argv, "--exit-interval", "1"], tmp_path / "third") as running:
        assert running.wait() == [0], running.outputs
        assert f"iter_{int(saved):07d}" in running.outputs
    assert not any(".tmp-" in name for name in _folders(root))
