"""Which checkpoints go. Reference: lists worked by hand."""

import os
import signal
from pathlib import Path
from unittest import mock

import pytest

from megatron_parm.checkpoint import paths
from megatron_parm.checkpoint.find import find_checkpoint
from megatron_parm.checkpoint.retention import Retention, remove_superfluous, superfluous
from megatron_parm.parallel.context import ParallelContext
from tests.checkpoint import example
from tests.harness.layouts import Layout
from tests.harness.pools import Pools

CTX = ParallelContext.single()


@pytest.fixture
def seven(tmp_path: Path) -> Path:
    """Iterations 10 to 70."""
    for iteration in range(10, 80, 10):
        example.save(CTX, tmp_path, iteration, iteration)
    return tmp_path


@pytest.mark.parametrize(
    ("retention", "gone"),
    [
        (Retention(), []),
        (Retention(keep_last=3), [10, 20, 30, 40]),
        (Retention(interval=20), [10, 30, 50]),
        (Retention(keep_last=4, interval=30), [10, 20]),
        (Retention(keep_last=7), []),
    ],
)
def test_the_newest_and_the_multiples_stay(seven: Path, retention: Retention, gone: list[int]) -> None:
    assert superfluous(seven, 70, retention) == gone


def test_a_damaged_one_does_not_count_and_is_left(seven: Path) -> None:
    (seven / "iter_0000060" / "manifest.json").write_text("{}")
    (seven / "iter_0000070" / paths.shard_name(0)).write_bytes(b"")
    assert superfluous(seven, 70, Retention(keep_last=2)) == [10, 20, 30]


def test_what_is_newer_than_the_save_is_left(seven: Path) -> None:
    """After --ckpt-step 30 the run saves 40 again; 50 to 70 are of another branch."""
    assert superfluous(seven, 40, Retention(keep_last=2)) == [10, 20]


def test_folders_are_deleted_and_told(pools: Pools, seven: Path) -> None:
    notes = pools.run(Layout(2), _remove, seven)
    assert notes[0] == notes[1] and len(notes[0]) == 5
    assert example.names_in(seven) == ["iter_0000060", "iter_0000070", paths.TRACKER]
    assert example.differing_after_load(CTX, seven, 70) == []


def _remove(ctx: ParallelContext, root: Path) -> list[str]:
    return remove_superfluous(root, 70, Retention(keep_last=2), ctx)


def test_killed_while_deleting(seven: Path) -> None:
    """The newest still load; the next save finishes the cleaning."""
    child = os.fork()
    if child == 0:
        with mock.patch("shutil.rmtree", lambda _: os.kill(os.getpid(), signal.SIGKILL)):
            remove_superfluous(seven, 70, Retention(keep_last=2), CTX)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert ".trash-iter_0000010" in example.names_in(seven)
    assert find_checkpoint(seven, CTX).manifest.iteration == 70
    example.save(CTX, seven, 80, 80)
    assert not any(name.startswith(".trash") for name in example.names_in(seven))
