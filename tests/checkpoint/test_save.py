"""Saving: killed at every point, on full and failing disks, with ranks that disagree. Nothing half-done may load.

References: the values of the save that should be found, bitwise; for faults the folder's content.
"""

import errno
import multiprocessing
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from megatron_parm.checkpoint import paths, save, storage
from megatron_parm.checkpoint.find import find_checkpoint
from megatron_parm.checkpoint.save import save_checkpoint
from megatron_parm.checkpoint.verify import verify_checkpoint
from megatron_parm.errors import CheckpointStorageError
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.sharding import ShardSpec
from tests.checkpoint import example
from tests.harness.layouts import Layout
from tests.harness.pools import Pool, Pools, WorkerError

CTX = ParallelContext.single()
EIO = OSError(errno.EIO, os.strerror(errno.EIO))
OLD, NEW = 3, 4  # seeds of the values


def _die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _write_half_and_die(file: Any, data: memoryview) -> None:
    file.write(data[: len(data) // 2])
    _die()


def _once_then_die(real: Callable[..., Any]) -> Callable[..., Any]:
    calls = []

    def call(*args: Any) -> Any:
        if calls:
            _die()
        calls.append(args)
        return real(*args)

    return call


# where the process dies: the patch that kills it there, and whether the new save counts as finished then
KILL_POINTS: dict[str, tuple[Callable[[], Any], bool]] = {
    "before the shard": (lambda: mock.patch.object(save, "write_shard", _die), False),
    "in the shard": (lambda: mock.patch.object(storage, "write_all", _write_half_and_die), False),
    "after the shards": (lambda: mock.patch.object(save, "_write_state", _die), False),
    "before the manifest": (lambda: mock.patch.object(save, "_write_manifest", _die), False),
    "after the manifest": (lambda: mock.patch.object(paths, "publish", _die), False),
    "before the first rename": (lambda: mock.patch.object(Path, "rename", _die), False),
    "after the last rename": (lambda: mock.patch.object(paths, "write_tracker", _die), True),
    "after the tracker": (lambda: mock.patch.object(paths, "delete", _die), True),
}


def _save_and_die(point: str, root: Path, iteration: int) -> None:
    torch.set_num_threads(1)
    with KILL_POINTS[point][0]():
        example.save(CTX, root, iteration, NEW)


def _run_in_a_process(function: Callable[..., None], *args: Any) -> int | None:
    process = multiprocessing.get_context("forkserver").Process(target=function, args=args)
    process.start()
    process.join(60)
    assert process.exitcode is not None
    return process.exitcode


@pytest.mark.parametrize(
    ("point", "iteration"),
    [(point, 5) for point in KILL_POINTS] + [(point, 10) for point in KILL_POINTS if point != "after the tracker"],
)
def test_a_save_killed_anywhere_leaves_one_whole_state(tmp_path: Path, point: str, iteration: int) -> None:
    """The first state or the second, bitwise, never a mix; the next save tidies up and says so."""
    example.save(CTX, tmp_path, 5, OLD)
    assert _run_in_a_process(_save_and_die, point, tmp_path, iteration) == -signal.SIGKILL
    left = example.names_in(tmp_path)
    finished = KILL_POINTS[point][1]
    assert any(".tmp-" in name for name in left) is not finished
    assert example.differing_after_load(CTX, tmp_path, NEW if finished else OLD) == []
    assert find_checkpoint(tmp_path, CTX).manifest.iteration == (iteration if finished else 5)
    notes = example.save(CTX, tmp_path, 15, OLD).notes
    expected = {"iter_0000005", "iter_0000015", paths.TRACKER} | ({f"iter_{iteration:07d}"} if finished else set())
    assert set(example.names_in(tmp_path)) == expected
    assert len(notes) == sum(".tmp-" in name or name.startswith(".replaced-") for name in left)
    assert all("removed" in note for note in notes)


def _save_and_die_between_the_renames(root: Path) -> None:
    torch.set_num_threads(1)
    with mock.patch.object(Path, "rename", _once_then_die(Path.rename)):
        example.save(CTX, root, 5, NEW)


def test_a_save_killed_between_its_two_renames_is_undone(tmp_path: Path) -> None:
    """The one moment at which the step has no folder under its name."""
    example.save(CTX, tmp_path, 5, OLD)
    assert _run_in_a_process(_save_and_die_between_the_renames, tmp_path) == -signal.SIGKILL
    assert "iter_0000005" not in example.names_in(tmp_path)
    found = find_checkpoint(tmp_path, CTX)
    assert "put back" in found.warnings[0]
    assert example.differing_after_load(CTX, tmp_path, OLD) == []


def test_a_first_save_killed_just_before_its_tracker_counts(tmp_path: Path) -> None:
    assert _run_in_a_process(_save_and_die, "after the last rename", tmp_path, 10) == -signal.SIGKILL
    assert paths.TRACKER not in example.names_in(tmp_path)
    assert "now names iteration 10" in find_checkpoint(tmp_path, CTX).warnings[0]
    assert paths.read_tracker(tmp_path) == "10"


@pytest.fixture
def own_pool() -> Iterator[Pool]:
    """Workers that a test may kill."""
    pool = Pool(2)
    yield pool
    pool.kill()


def _save_with_a_dying_rank(ctx: ParallelContext, root: Path) -> None:
    patch = mock.patch.object(storage, "write_all", _write_half_and_die)
    with patch if ctx.rank == 1 else nullcontext():
        example.save(ctx, root, 10, NEW)


def test_a_rank_killed_in_its_shard_leaves_the_older_checkpoint(own_pool: Pool, tmp_path: Path) -> None:
    own_pool.run(example.save, tmp_path, 5, OLD)
    with pytest.raises(WorkerError):
        own_pool.run(_save_with_a_dying_rank, tmp_path)
    assert own_pool.run(example.differing_after_load, tmp_path, OLD) == [[], []]
    notes = own_pool.run(example.save, tmp_path, 10, NEW)[0].notes
    assert len(notes) == 1
    assert "removed" in notes[0]
    assert "iter_0000010.tmp-" in notes[0]
    assert example.names_in(tmp_path) == ["iter_0000005", "iter_0000010", paths.TRACKER]


def test_saving_a_step_again_replaces_it_also_from_fewer_ranks(pools: Pools, tmp_path: Path) -> None:
    """DCP alone would leave the shards of the ranks that are gone."""
    pools.run(Layout(4, tp=4), example.save, tmp_path, 5, OLD)
    assert len(list((tmp_path / "iter_0000005").iterdir())) == 6
    pools.run(Layout(2, tp=2), example.save, tmp_path, 5, NEW)
    assert len(list((tmp_path / "iter_0000005").iterdir())) == 4
    assert example.differing_after_load(CTX, tmp_path, NEW) == []
    assert example.names_in(tmp_path) == ["iter_0000005", paths.TRACKER]


def _save_with_a_file_limit(ctx: ParallelContext, root: Path) -> None:
    """Rank 1 may write 2 kB a file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if ctx.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, limits[1]))
    try:
        example.save(ctx, root, 10, NEW)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def _save_with_failing_fsync(ctx: ParallelContext, root: Path, failing: int) -> None:
    with mock.patch("os.fsync", side_effect=EIO if ctx.rank == failing else None):
        example.save(ctx, root, 10, NEW)


def _save_with_little_room(ctx: ParallelContext, root: Path) -> None:
    with mock.patch.object(save, "_free_bytes", return_value=70_000 if ctx.rank == 1 else 10**9):
        example.save(ctx, root, 10, NEW)


def _expect_the_same_failure(answers: list[tuple[str, int, str]], root: Path) -> str:
    """All ranks say the same, no temporary folder is left, the older checkpoint loads."""
    assert len(set(answers)) == 1
    kind, code, message = answers[0]
    assert (kind, code) == ("CheckpointStorageError", 1)
    assert example.names_in(root) == ["iter_0000005", paths.TRACKER]
    assert example.differing_after_load(CTX, root, OLD) == []
    return message


def test_a_full_disk_on_one_rank_stops_all_with_the_numbers(pools: Pools, tmp_path: Path) -> None:
    """By a limit on the file size of rank 1."""
    pools.run(Layout(2), example.save, tmp_path, 5, OLD)
    answers = pools.run(Layout(2), example.error_of, _save_with_a_file_limit, tmp_path)
    message = _expect_the_same_failure(answers, tmp_path)
    assert "rank 1" in message
    assert "No space left" in message
    assert "shard-00002" in message
    needed = sum(value.nbytes for value in example.global_values(NEW).values()) + 2 * 6 + save.OVERHEAD_BYTES
    assert f"the checkpoint needs {needed} bytes" in message
    assert "are free in" in message


def test_too_little_room_is_seen_before_a_byte_is_written(pools: Pools, tmp_path: Path) -> None:
    pools.run(Layout(2), example.save, tmp_path, 5, OLD)
    answers = pools.run(Layout(2), example.error_of, _save_with_little_room, tmp_path)
    message = _expect_the_same_failure(answers, tmp_path)
    assert "rank 1 sees 70000 free" in message
    assert "Nothing was written" in message


@pytest.mark.parametrize("failing", [0, 1])
def test_an_io_error_on_one_rank_reaches_all(pools: Pools, tmp_path: Path, failing: int) -> None:
    """EIO from fsync, whichever rank meets it: one error on all, with that rank's name."""
    pools.run(Layout(2), example.save, tmp_path, 5, OLD)
    answers = pools.run(Layout(2), example.error_of, _save_with_failing_fsync, tmp_path, failing)
    message = _expect_the_same_failure(answers, tmp_path)
    assert message.startswith(f"rank {failing}: saving {tmp_path / 'iter_0000010'} failed: [Errno 5]")
    assert "shard-0000" in message


@pytest.mark.parametrize("call", ["_write_state", "_write_manifest"])
def test_an_io_error_after_the_shards_leaves_nothing(tmp_path: Path, call: str) -> None:
    example.save(CTX, tmp_path, 5, OLD)
    with mock.patch.object(save, call, side_effect=EIO), pytest.raises(CheckpointStorageError, match="Errno 5"):
        example.save(CTX, tmp_path, 10, NEW)
    assert example.names_in(tmp_path) == ["iter_0000005", paths.TRACKER]


def test_an_io_error_at_the_tracker_is_told_and_the_save_still_counts(tmp_path: Path) -> None:
    """The folder has its name and is whole; the next start finishes the tracker."""
    example.save(CTX, tmp_path, 5, OLD)
    with mock.patch.object(paths, "write_tracker", side_effect=EIO), pytest.raises(CheckpointStorageError):
        example.save(CTX, tmp_path, 10, NEW)
    assert find_checkpoint(tmp_path, CTX).manifest.iteration == 10
    assert example.differing_after_load(CTX, tmp_path, NEW) == []


def test_a_read_only_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    user = os.geteuid()
    if user == 0:  # root may write everywhere
        os.seteuid(65534)
    try:
        with pytest.raises(CheckpointStorageError, match="Permission denied"):
            example.save(CTX, tmp_path / "out", 5, OLD)
    finally:
        os.seteuid(user)
    assert example.names_in(tmp_path) == []


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(CheckpointStorageError, match="File exists"):
        example.save(CTX, tmp_path / "out", 5, OLD)
    assert example.names_in(tmp_path) == ["out"]


def _save_differently(ctx: ParallelContext, root: Path, what: str) -> None:
    iteration = ctx.rank if what == "iteration" else 1
    state: dict[str, Any] = {"samples": ctx.rank if what == "state" else 1, "seed": 1}
    size = ctx.rank + 1 if what == "shape" else 2
    tensor = torch.zeros(size)
    save_checkpoint(root, iteration, {"w": (tensor, ShardSpec((size,), (), "dense", True))}, {}, state, ctx)


@pytest.mark.parametrize(
    ("what", "told"),
    [("iteration", "iteration 1, rank 0 iteration 0"), ("state", "rank 0: samples"), ("shape", "ranks 0 and 1")],
)
def test_ranks_that_disagree_stop_together(pools: Pools, tmp_path: Path, what: str, told: str) -> None:
    answers = pools.run(Layout(2), example.error_of, _save_differently, tmp_path, what)
    assert len(set(answers)) == 1
    assert answers[0][:2] == ("CheckpointStorageError", 1)
    assert told in answers[0][2]
    assert not tmp_path.exists() or example.names_in(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "tensor", "shape", "told"),
    [
        ("rank_x", torch.zeros(2), (2,), "kept for rank-local"),
        ("w", torch.zeros(2), (3,), "its spec says"),
        ("w", torch.zeros(2, dtype=torch.complex64), (2,), "complex64"),
    ],
)
def test_what_cannot_be_saved_is_named(
    tmp_path: Path, name: str, tensor: torch.Tensor, shape: tuple[int, ...], told: str
) -> None:
    with pytest.raises(CheckpointStorageError, match=told):
        save_checkpoint(tmp_path, 1, {name: (tensor, ShardSpec(shape, (), "dense", True))}, {}, {}, CTX)
    assert example.names_in(tmp_path) == []


def test_one_memory_under_two_names_and_strided_tensors(tmp_path: Path) -> None:
    """safetensors refuses both on its own."""
    tensor = torch.randn(3, 5)
    spec, turned = ShardSpec((3, 5), (), "dense", True), ShardSpec((5, 3), (), "dense", True)
    tensors = {"a": (tensor, spec), "b": (tensor, spec), "t": (tensor.t(), turned)}
    path = save_checkpoint(tmp_path, 1, tensors, {}, {}, CTX).path
    assert set(verify_checkpoint(path, "full", CTX).manifest.tensors) == {"a", "b", "t"}


def test_shards_are_plain_safetensors(tmp_path: Path) -> None:
    """Reference: the safetensors library reads them without torch DCP."""
    path = example.save(CTX, tmp_path, 1, OLD).path
    loaded = load_file(path / paths.shard_name(0))
    for name, value in example.global_values(OLD).items():
        assert torch.equal(loaded[name], value)


def test_torchs_own_reader_reads_the_shards(pools: Pools, tmp_path: Path) -> None:
    """The files are those of torch's distributed checkpointing: it finds the whole tensors in the shards of 4 ranks."""
    path = pools.run(Layout(4, tp=2, esp=2, ep=2), example.save, tmp_path, 1, OLD)[0].path
    expected = example.global_values(OLD)
    loaded = {name: torch.empty_like(value) for name, value in expected.items()}
    dcp.load(loaded, storage_reader=dcp.HuggingFaceStorageReader(str(path)), no_dist=True)
    assert [name for name in expected if not torch.equal(loaded[name], expected[name])] == []
