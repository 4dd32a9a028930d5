"""Saves written beside training. Reference: a save of the same values that training waited for, bitwise."""

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron_parm.checkpoint import paths, save
from megatron_parm.checkpoint.background import BackgroundSave
from megatron_parm.checkpoint.manifest import FileEntry
from megatron_parm.checkpoint.storage import HostCopies, Stored, write_shard
from megatron_parm.errors import CheckpointStorageError
from megatron_parm.parallel.context import ParallelContext
from tests.checkpoint import example
from tests.harness.layouts import SINGLE, Layout
from tests.harness.pools import Pools

OLD, NEW = 3, 4


def _slow_save(ctx: ParallelContext, root: Path, take_copies: bool) -> list[str]:
    """Save values that change while the slow writers run; the names that a load finds changed."""
    released = threading.Event()

    def slow(path: Path, stored: dict[str, Stored]) -> FileEntry:
        assert released.wait(30)
        return write_shard(path, stored)

    tensors = example.tensors_of(ctx, NEW)
    with mock.patch.object(save, "write_shard", slow):
        begun = save.begin_save(root, 10, tensors, {}, {"seed": NEW}, ctx)
        with mock.patch.object(begun, "take_copies") if not take_copies else mock.MagicMock():
            background = BackgroundSave(begun, ctx, HostCopies())
        assert not background.is_written()
        assert not (root / "iter_0000010").exists()
        for local, _ in tensors.values():
            local.zero_()
        released.set()
        while not background.is_written():
            time.sleep(0.05)
        assert not (root / "iter_0000010").exists(), "renamed before all ranks had agreed"
        background.finish()
    return example.differing_after_load(ctx, root, NEW)


@pytest.mark.parametrize("layout", [SINGLE, Layout(4, tp=2, esp=2, ep=2)], ids=str)
def test_what_training_changes_meanwhile_is_not_in_the_file(pools: Pools, tmp_path: Path, layout: Layout) -> None:
    pools.run(layout, example.save, tmp_path, 5, OLD)
    assert pools.run(layout, _slow_save, tmp_path, True) == [[]] * layout.world
    assert paths.read_tracker(tmp_path) == "10"


def test_without_copies_it_would_be(tmp_path: Path) -> None:
    """Negative control."""
    assert "norm.weight" in _slow_save(ParallelContext.single(), tmp_path, False)


def _failing_writer(ctx: ParallelContext) -> Callable[..., FileEntry]:
    def write(path: Path, stored: dict[str, Stored]) -> FileEntry:
        if ctx.rank == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return write_shard(path, stored)

    return write


def _save_with_a_failing_writer(ctx: ParallelContext, root: Path) -> None:
    with mock.patch.object(save, "write_shard", _failing_writer(ctx)):
        begun = save.begin_save(root, 10, example.tensors_of(ctx, NEW), {}, {}, ctx)
        BackgroundSave(begun, ctx, HostCopies()).finish()


def test_a_writer_that_fails_on_one_rank_fails_the_save_on_all(pools: Pools, tmp_path: Path) -> None:
    pools.run(Layout(2), example.save, tmp_path, 5, OLD)
    answers = pools.run(Layout(2), example.error_of, _save_with_a_failing_writer, tmp_path)
    assert len(set(answers)) == 1
    assert answers[0][:2] == (CheckpointStorageError.__name__, 1)
    assert answers[0][2].startswith(f"rank 1: saving {tmp_path / 'iter_0000010'} failed: [Errno 5]")
    assert example.names_in(tmp_path) == ["iter_0000005", paths.TRACKER]
    assert pools.run(Layout(2), example.differing_after_load, tmp_path, OLD) == [[], []]


def test_the_copies_are_of_what_this_rank_writes_alone(pools: Pools, tmp_path: Path) -> None:
    """Replicas share the writing, so they share the memory of the copies, too."""
    copied = pools.run(Layout(4), _copied_bytes, tmp_path)
    whole = sum(value.nbytes for value in example.global_values(NEW).values())
    assert sum(copied) == whole
    assert max(copied) < 0.5 * whole


def _copied_bytes(ctx: ParallelContext, root: Path) -> int:
    begun = save.begin_save(root, 10, example.tensors_of(ctx, NEW), {}, {}, ctx)
    begun.take_copies(HostCopies())
    assert begun._stored is not None
    held = sum(one.values.nbytes for one in begun._stored.values())
    begun.write()
    begun.finish()
    assert torch.get_num_threads() == 1
    return held


def test_copies_are_made_in_the_same_memory_again() -> None:
    """Of every dtype and shape, bit for bit; larger values get new memory."""
    memory = HostCopies()
    stored = {
        name: Stored(tensor if tensor.dim() < 2 else tensor.transpose(0, 1), (0,) * tensor.dim())
        for name, tensor in example.global_values(NEW).items()
    }
    places = []
    for _ in range(2):
        copies = memory.of(stored)
        assert all(torch.equal(copies[name].values, one.values) for name, one in stored.items())
        assert all(copies[name].values.is_contiguous() for name in stored)
        places.append({name: one.values.data_ptr() for name, one in copies.items()})
    assert places[0] == places[1]
    assert not {one.values.data_ptr() for one in stored.values()} & set(places[0].values())
    larger = {"larger": Stored(torch.rand(100_000), (0,))}
    assert torch.equal(memory.of(larger)["larger"].values, larger["larger"].values)
