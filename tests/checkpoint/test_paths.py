"""Names, and what a save leaves that was killed between two renames. Kills themselves are in test_save.py."""

from pathlib import Path

import pytest

from megatron_parm.checkpoint import paths


def test_folder_names() -> None:
    assert paths.folder_name(123) == "iter_0000123"
    assert paths.folder_name(12_345_678) == "iter_12345678"
    for name in (
        "iter_123",
        "iter_0000123.tmp-ab",
        "iter_00000123",
        ".replaced-iter_0000123-ab",
        "iter_0000123\n",
        "x",
    ):
        assert paths.iteration_of(name) is None
    assert paths.iteration_of("iter_0000123") == 123


@pytest.mark.parametrize("name", ["..", ".x", "a/b", "", "a b", "é", "a" * 300, "x\n"])
def test_names_that_are_not_plain(name: str) -> None:
    assert not paths.is_plain(name)


def test_shard_names_are_plain() -> None:
    assert paths.is_plain(paths.shard_name(0))
    assert paths.is_plain(paths.shard_name(123_456))


def test_repair_puts_a_replaced_folder_back_only_where_the_name_is_free(tmp_path: Path) -> None:
    (tmp_path / ".replaced-iter_0000005-ab").mkdir()
    (tmp_path / ".replaced-iter_0000006-ab").mkdir()
    (tmp_path / "iter_0000006").mkdir()
    assert len(paths.repair(tmp_path)) == 1
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        ".replaced-iter_0000006-ab",
        "iter_0000005",
        "iter_0000006",
    ]


def test_leftovers_are_removed_and_foreign_names_kept(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    root = tmp_path / "root"
    root.mkdir()
    for name in (
        "iter_0000005.tmp-ab",
        ".replaced-iter_0000004-ab",
        ".trash-iter_0000003-ab",
        "iter_0000002",
        "mine.tmp",
    ):
        (root / name).mkdir()
    (root / "iter_0000001.tmp-cd").symlink_to(outside)
    assert len(paths.remove_leftovers(root)) == 4
    assert sorted(entry.name for entry in root.iterdir()) == ["iter_0000002", "mine.tmp"]
    assert (outside / "precious").exists()


@pytest.mark.parametrize("content", ["", "5", "5 0123456789abcdeg", "6 0123456789abcdef", "5 ffffffffffffffff", "\x00"])
def test_an_intent_that_names_no_finished_save_moves_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / "iter_0000005").mkdir()
    (tmp_path / "iter_0000005" / paths.MANIFEST).write_text('{"save_id": "0123456789abcdef"}')
    (tmp_path / paths.PENDING_TRACKER).write_text(content)
    assert paths.repair(tmp_path) == []
    assert not (tmp_path / paths.TRACKER).exists()
    (tmp_path / paths.PENDING_TRACKER).write_text("5 0123456789abcdef")
    assert len(paths.repair(tmp_path)) == 1
    assert paths.read_tracker(tmp_path) == "5"
