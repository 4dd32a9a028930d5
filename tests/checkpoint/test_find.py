"""Which checkpoint is chosen, for every state of the tracker file. Reference: Megatron's file; FC-14."""

from pathlib import Path

import pytest

from megatron_parm.checkpoint import paths
from megatron_parm.checkpoint.find import find_checkpoint, has_checkpoint
from megatron_parm.errors import CheckpointError
from megatron_parm.parallel.context import ParallelContext
from tests.checkpoint import example
from tests.harness.layouts import Layout
from tests.harness.pools import Pools

CTX = ParallelContext.single()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with iterations 5 and 10."""
    for iteration in (5, 10):
        example.save(CTX, tmp_path, iteration, iteration)
    return tmp_path


def _damage(root: Path, iteration: int) -> None:
    file = root / paths.folder_name(iteration) / "state.json"
    file.write_bytes(file.read_bytes()[:-1] + b" ")


def test_the_tracker_names_the_newest_save_in_megatrons_form(root: Path) -> None:
    assert (root / "latest_checkpointed_iteration.txt").read_text() == "10"
    found = find_checkpoint(root, CTX)
    assert (found.path, found.warnings) == (root / "iter_0000010", ())


def test_the_tracker_decides_not_the_newest_folder(root: Path) -> None:
    """A user goes back by editing the file, as with Megatron."""
    (root / paths.TRACKER).write_text("5\n")
    assert find_checkpoint(root, CTX).path.name == "iter_0000005"
    assert find_checkpoint(root, CTX, resume="auto").path.name == "iter_0000005"


@pytest.mark.parametrize("content", ["", "abc", "7", "-5", "5.0", "\u0665", "9" * 30, "release", "\x00"])
def test_a_bad_tracker_stops_strict_and_auto_falls_back_with_a_warning(root: Path, content: str) -> None:
    (root / paths.TRACKER).write_text(content)
    with pytest.raises(CheckpointError) as caught:
        find_checkpoint(root, CTX)
    assert str(root / paths.TRACKER) in str(caught.value)
    assert repr(content) in str(caught.value)
    found = find_checkpoint(root, CTX, resume="auto")
    assert found.path.name == "iter_0000010"
    assert repr(content) in found.warnings[0]


def _strict(ctx: ParallelContext, root: Path) -> str:
    return find_checkpoint(root, ctx).path.name


def _auto(ctx: ParallelContext, root: Path) -> str:
    return find_checkpoint(root, ctx, resume="auto").path.name


def test_all_ranks_stop_or_fall_back_together(pools: Pools, root: Path) -> None:
    (root / paths.TRACKER).write_text("abc")
    answers = pools.run(Layout(4), example.error_of, _strict, root)
    assert len(set(answers)) == 1
    assert answers[0][:2] == ("CheckpointError", 21)
    _damage(root, 10)
    assert pools.run(Layout(4), _auto, root) == ["iter_0000005"] * 4


def test_a_missing_tracker(root: Path) -> None:
    (root / paths.TRACKER).unlink()
    with pytest.raises(CheckpointError, match=r"does not exist, so no save finished .*\n.*iter_0000010, iter_0000005"):
        find_checkpoint(root, CTX)
    assert find_checkpoint(root, CTX, resume="auto").path.name == "iter_0000010"
    assert has_checkpoint(root, CTX)


def test_zero_and_release_are_valid_where_they_exist(tmp_path: Path) -> None:
    example.save(CTX, tmp_path, 0, 1)
    assert find_checkpoint(tmp_path, CTX).manifest.iteration == 0
    (tmp_path / "iter_0000000").rename(tmp_path / "release")
    (tmp_path / paths.TRACKER).write_text("release")
    assert find_checkpoint(tmp_path, CTX).path.name == "release"


def test_damage_stops_strict_and_auto_falls_back_one_step(root: Path) -> None:
    example.save(CTX, root, 15, 15)
    _damage(root, 15)
    with pytest.raises(CheckpointError, match=r"(?s)state\.json has the SHA-256.*--resume auto"):
        find_checkpoint(root, CTX)
    found = find_checkpoint(root, CTX, resume="auto")
    assert found.path.name == "iter_0000010"
    assert "iter_0000015 is damaged" in found.warnings[0]
    assert found.warnings[-1] == f"resuming from {found.path} instead"


def test_auto_prefers_the_next_older_to_a_newer_one(root: Path) -> None:
    """A user who went back to 10 does not want 15, but any whole one is better than none."""
    example.save(CTX, root, 15, 15)
    (root / paths.TRACKER).write_text("10")
    _damage(root, 10)
    assert find_checkpoint(root, CTX, resume="auto").path.name == "iter_0000005"
    _damage(root, 5)
    assert find_checkpoint(root, CTX, resume="auto").path.name == "iter_0000015"


def test_auto_with_nothing_whole_lists_every_problem(root: Path) -> None:
    for iteration in (5, 10):
        _damage(root, iteration)
    with pytest.raises(CheckpointError, match=r"(?s)iter_0000010 is damaged.*iter_0000005 is damaged") as caught:
        find_checkpoint(root, CTX, resume="auto")
    assert caught.value.exit_code == 21


def test_a_chosen_step_has_no_fall_back(root: Path) -> None:
    assert find_checkpoint(root, CTX, ckpt_step=5).path.name == "iter_0000005"
    with pytest.raises(CheckpointError, match=r"--ckpt-step 7\); it has: iter_0000010, iter_0000005"):
        find_checkpoint(root, CTX, ckpt_step=7, resume="auto")
    _damage(root, 5)
    with pytest.raises(CheckpointError, match="is damaged"):
        find_checkpoint(root, CTX, ckpt_step=5, resume="auto")


def test_a_new_or_empty_folder_has_no_checkpoint(tmp_path: Path) -> None:
    assert not has_checkpoint(tmp_path / "none", CTX)
    assert not has_checkpoint(tmp_path, CTX)
    (tmp_path / "iter_0000005.tmp-0123").mkdir()  # a first save that was killed
    assert not has_checkpoint(tmp_path, CTX)
    (tmp_path / paths.TRACKER).touch()  # something was here: never start afresh
    assert has_checkpoint(tmp_path, CTX)
    with pytest.raises(CheckpointError, match="does not exist or is not a folder; check --load"):
        find_checkpoint(tmp_path / "none", CTX)


def test_more_than_seven_digits_sort_as_numbers(tmp_path: Path) -> None:
    for iteration in (9_999_999, 10_000_000):
        example.save(CTX, tmp_path, iteration, 1)
    assert paths.finished_iterations(tmp_path) == [10_000_000, 9_999_999]
    _damage(tmp_path, 10_000_000)
    assert find_checkpoint(tmp_path, CTX, resume="auto").manifest.iteration == 9_999_999
