"""Saves of whole runs: beside training, by all replicas, kept and deleted. Reference: the run that waits for each."""

import errno
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from megatron_parm.checkpoint import save
from megatron_parm.checkpoint.manifest import FileEntry
from megatron_parm.checkpoint.storage import Stored, write_shard
from tests.harness.layouts import SINGLE, Layout
from tests.harness.pools import Pools
from tests.training.runs import DROPOUT, MOE, Outcome, flags, run_training, same_bits

SPREAD = Layout(4, tp=2, ep=2)
SIZES = "--tensor-model-parallel-size 2 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
TRACKER = "latest_checkpointed_iteration.txt"


def _run(pools: Pools, layout: Layout, argv: list[str], *more: Any) -> list[Outcome]:
    outcomes: list[Outcome] = pools.run(layout, run_training, argv, *more)
    return outcomes


def _folders(root: Path) -> list[str]:
    return sorted(entry.name for entry in root.iterdir() if entry.is_dir())


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= {f"{file.name}: {name}": value for name, value in load_file(file).items()}
    return found


@pytest.mark.parametrize(
    ("layout", "more"), [(SINGLE, ""), (SPREAD, f"{SIZES} --use-distributed-optimizer --bf16")], ids=["one", "four"]
)
def test_a_save_beside_training_holds_the_same_bits(
    pools: Pools, corpus: str, tmp_path: Path, layout: Layout, more: str
) -> None:
    """Every file of every checkpoint, the losses, and a resume. The last save is complete before the run ends."""
    argv = flags(corpus, MOE, DROPOUT, more, "--train-iters 6 --save-interval 2")
    waited = _run(pools, layout, [*argv, "--save", str(tmp_path / "waited")])
    beside = _run(pools, layout, [*argv, "--save", str(tmp_path / "beside"), "--async-save"])
    assert waited[0].error is beside[0].error is None
    assert beside[0].figures() == waited[0].figures()
    assert _folders(tmp_path / "beside") == ["iter_0000002", "iter_0000004", "iter_0000006"]
    for name in _folders(tmp_path / "beside"):
        ours, theirs = _tensors(tmp_path / "beside" / name), _tensors(tmp_path / "waited" / name)
        assert same_bits(ours, theirs) == [] and len(ours) > 20
    assert beside[0].column("iteration", "save") == [2, 4, 6]
    for event in beside[0].of("save"):
        assert 0 < event["stall_seconds"] <= event["seconds"]
    for event in waited[0].of("save"):
        assert event["stall_seconds"] == event["seconds"]
    again = _run(pools, layout, [*argv, "--load", str(tmp_path / "beside"), "--ckpt-step", "4"])
    assert again[0].figures() == waited[0].figures()[4:]


def _failing_disk(rank: int) -> Any:
    """On rank 1 the first checkpoint can be written, no later one."""

    def write(path: Path, stored: dict[str, Stored]) -> FileEntry:
        if rank == 1 and "iter_0000002" not in str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return write_shard(path, stored)

    return mock.patch.object(save, "write_shard", write)


@pytest.mark.parametrize("last", [10, 4], ids=["next step", "end"])
def test_a_write_that_fails_in_the_background_stops_the_run(
    pools: Pools, corpus: str, tmp_path: Path, last: int
) -> None:
    """At the next step, or at the end of the run; the older checkpoint stays the newest."""
    argv = flags(corpus, f"--train-iters {last} --save-interval 2 --async-save --save {tmp_path}")
    for outcome in _run(pools, Layout(2), argv, _failing_disk):
        assert outcome.error is not None and outcome.error[:2] == ("CheckpointStorageError", 1)
        assert f"rank 1: saving {tmp_path / 'iter_0000004'} failed: [Errno 5]" in outcome.error[2]
        assert outcome.progress["iteration"] <= 6, "the failure was noticed only at the next save"
    assert (tmp_path / TRACKER).read_text() == "2"
    assert _folders(tmp_path) == ["iter_0000002"]


@pytest.mark.parametrize(
    ("more", "left"),
    [
        ("--save-keep-last 2", [5, 6]),
        ("--save-retain-interval 3", [3, 5, 6]),
        ("--save-keep-last 3 --save-retain-interval 2 --async-save", [2, 4, 5, 6]),
        ("", [1, 2, 3, 4, 5, 6]),
    ],
)
def test_old_checkpoints_go_as_the_flags_say(
    pools: Pools, corpus: str, tmp_path: Path, more: str, left: list[int]
) -> None:
    argv = flags(corpus, f"--train-iters 6 --save-interval 1 --save {tmp_path}", more)
    outcome = _run(pools, SINGLE, argv)[0]
    assert outcome.error is None
    assert _folders(tmp_path) == [f"iter_{iteration:07d}" for iteration in left]
    assert outcome.said.count("removed") == 6 - len(left)


def test_replicas_share_the_writing(pools: Pools, corpus: str, tmp_path: Path) -> None:
    """Of a dense model on 4 replicas each writes about a quarter, and nothing is written twice."""
    argv = flags(corpus, f"--micro-batch-size 1 --hidden-size 64 --num-layers 4 --save {tmp_path} --no-save-rng")
    outcomes = _run(pools, Layout(4), argv)
    assert outcomes[0].error is None
    sizes = [file.stat().st_size for file in (tmp_path / "iter_0000004").glob("*.safetensors")]
    assert len(sizes) == 4 and max(sizes) < 1.3 * min(sizes)
    names = [name.split(": ")[1] for name in _tensors(tmp_path / "iter_0000004")]
    assert len(names) == len(set(names))


# --- which flags come from where ---


@pytest.fixture(scope="module")
def pretrained(pools: Pools, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a model that no default describes."""
    root = tmp_path_factory.mktemp("pretrained")
    outcome = _run(pools, Layout(2, tp=2), flags(corpus, MOE, UNUSUAL, f"--save {root}"))[0]
    assert outcome.error is None
    return root


UNUSUAL = (
    "--num-layers 3 --hidden-size 24 --swiglu --ffn-hidden-size 40 --normalization RMSNorm "
    "--untie-embeddings-and-output-weights --disable-bias-linear --tensor-model-parallel-size 2"
)


def test_a_pretrained_checkpoint_begins_a_run_that_resumes_from_its_own(
    pools: Pools, corpus: str, tmp_path: Path, pretrained: Path
) -> None:
    """The first start is that of --load with --finetune; the restart goes on from --save, moments and counters too."""
    argv = flags(corpus, MOE, UNUSUAL, "--tensor-model-parallel-size 1", "--lr 5e-3 --seed 9 --train-iters 4")
    finetuned = _run(pools, SINGLE, [*argv, "--load", str(pretrained), "--finetune"])[0]
    restart = [*argv, "--pretrained-checkpoint", str(pretrained), "--save", str(tmp_path), "--load", str(tmp_path)]
    first = _run(pools, SINGLE, [*restart, "--exit-interval", "2"])[0]
    second = _run(pools, SINGLE, restart)[0]
    assert finetuned.error is first.error is second.error is None
    assert first.figures() + second.figures() == finetuned.figures()
    assert "starting afresh" in first.said and str(pretrained) in first.said
    assert str(pretrained) not in second.said.split("loaded")[1].splitlines()[0]


def test_a_pretrained_checkpoint_that_is_not_there(pools: Pools, corpus: str, tmp_path: Path, pretrained: Path) -> None:
    """Neither a wrong path to it nor a wrong --load is passed over."""
    for more, told in (
        (f"--pretrained-checkpoint {tmp_path}/typo", "--pretrained-checkpoint"),
        (f"--pretrained-checkpoint {pretrained} --load {tmp_path}/typo", "--load"),
    ):
        error = _run(pools, SINGLE, flags(corpus, more))[0].error
        assert error is not None and error[:2] == ("ConfigError", 2)
        assert error[2].startswith(f"{told} {tmp_path}/typo: there is no checkpoint")


def _without(argv: list[str], *names: str) -> list[str]:
    kept = list(argv)
    for name in names:
        at = kept.index(name)
        del kept[at : at + 2]
    return kept


def test_flags_come_from_the_checkpoint_and_the_command_line_wins(pools: Pools, corpus: str, pretrained: Path) -> None:
    base = flags(corpus, "--finetune --use-checkpoint-args --load", str(pretrained))
    left_out = ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--vocab-size")
    argv = _without(base, *left_out, "--max-position-embeddings")
    whole = flags(corpus, MOE, UNUSUAL, "--tensor-model-parallel-size 1", "--finetune --load", str(pretrained))
    expected, outcome = (_run(pools, SINGLE, each)[0] for each in (whole, argv))
    assert expected.error is outcome.error is None
    # the capacity is no flag of the model: without one nothing is dropped either, by another order of sums
    assert outcome.column("lm_loss")[0] == pytest.approx(expected.column("lm_loss")[0], rel=1e-6)
    error = _run(pools, SINGLE, [*argv, "--num-layers", "2"])[0].error
    assert error is not None and "--num-layers: 2 here, 3 in the checkpoint" in error[2]
    sizes = [*argv, "--use-mp-args-from-checkpoint-args"]
    both = _run(pools, Layout(2, tp=2), sizes)[0]
    assert both.error is None and both.of("start")[0]["config"]["tensor_model_parallel_size"] == 2
    assert both.column("lm_loss")[0] == pytest.approx(expected.column("lm_loss")[0], rel=1e-5)


def test_use_checkpoint_args_reads_no_damaged_state(pools: Pools, corpus: str, tmp_path: Path) -> None:
    assert _run(pools, SINGLE, flags(corpus, f"--save {tmp_path}"))[0].error is None
    file = tmp_path / "iter_0000004" / "state.json"
    file.write_text(file.read_text().replace('"num_layers": 2', '"num_layers": 3'))
    argv = _without(flags(corpus, f"--load {tmp_path} --use-checkpoint-args"), "--num-layers")
    error = _run(pools, SINGLE, argv)[0].error
    assert error is not None and error[1] == 21 and "state.json is damaged" in error[2]
