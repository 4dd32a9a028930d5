"""The index cache among processes that race, die or cannot write. Reference: the arrays as built without a cache."""

import multiprocessing
import os
import signal
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from megatron_parm.data import index_cache
from megatron_parm.data.index_cache import IndexCache, default_cache_folder, file_facts
from tests.data.corpora import write_documents

fork = multiprocessing.get_context("fork")


def arrays(value: int = 3):
    return {"a": np.arange(value, dtype=np.int32), "b": np.array([[value, 1]], dtype=np.int64), "c": np.zeros(0, int)}


def equal(first, second) -> bool:
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)


def refuse():
    raise AssertionError("must be read, not built")


def test_built_once_then_read(tmp_path) -> None:
    cache = IndexCache(tmp_path / "deep" / "cache")
    assert equal(cache.get_or_build("k", {"seed": 1}, arrays), arrays())
    again = cache.get_or_build("k", {"seed": 1}, refuse)
    assert equal(again, arrays())
    assert isinstance(again["a"], np.memmap) and not again["a"].flags.writeable


def test_other_facts_or_kind_build_anew(tmp_path) -> None:
    cache = IndexCache(tmp_path)
    cache.get_or_build("k", {"seed": 1}, arrays)
    assert equal(cache.get_or_build("k", {"seed": 2}, lambda: arrays(4)), arrays(4))
    assert equal(cache.get_or_build("m", {"seed": 1}, lambda: arrays(5)), arrays(5))
    assert equal(cache.get_or_build("k", {"seed": 1}, refuse), arrays())


def test_no_folder_builds_each_time() -> None:
    assert equal(IndexCache(None).get_or_build("k", {}, arrays), arrays())


def build_slowly(folder: Path, results, number: int) -> None:
    def build():
        (folder / f"built-by-{number}").write_text("")
        time.sleep(0.3)
        return arrays(6)

    found = IndexCache(folder / "cache").get_or_build("k", {"seed": 1}, build)
    results.put(equal(found, arrays(6)))


def test_of_six_processes_one_builds_and_all_read_the_same(tmp_path) -> None:  # FC-08
    results = fork.Queue()
    processes = [fork.Process(target=build_slowly, args=(tmp_path, results, number)) for number in range(6)]
    for process in processes:
        process.start()
    assert all(results.get(timeout=30) for _ in processes)
    for process in processes:
        process.join()
    assert len(list(tmp_path.glob("built-by-*"))) == 1


def build_without_locks(folder: Path, ready, results) -> None:
    """A process of another node: the file system is shared or not, its locks do not reach across nodes."""

    def no_lock(*_):
        raise OSError(37, "No locks available")

    def build():
        ready.wait(30)  # every node has seen no entry, and builds
        return arrays(6)

    index_cache.fcntl.flock = no_lock
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results.put(equal(IndexCache(folder).get_or_build("k", {"seed": 1}, build), arrays(6)))


@pytest.mark.parametrize("is_shared", [True, False])
def test_nodes_that_see_no_lock_of_each_other_build_the_same(tmp_path, is_shared) -> None:
    """On one folder the first entry stays; on folders of their own each node keeps one. Nobody waits for another."""
    results, ready = fork.Queue(), fork.Barrier(4)
    folders = [tmp_path / ("all" if is_shared else str(number)) for number in range(4)]
    nodes = [fork.Process(target=build_without_locks, args=(folder, ready, results)) for folder in folders]
    for node in nodes:
        node.start()
    assert all(results.get(timeout=30) for _ in nodes)
    for node in nodes:
        node.join()
    for folder in folders:
        assert [path.name[0] for path in folder.iterdir() if path.is_dir()] == [next(folder.glob("*-k")).name[0]]
        assert equal(IndexCache(folder).get_or_build("k", {"seed": 1}, refuse), arrays(6))


def build_and_hang(folder: Path, started) -> None:
    def build():
        partial = folder / next(iter(folder.glob(".*.lock"))).name.removesuffix(".lock")
        (partial.parent / f"{partial.name}.half").mkdir()
        started.set()
        time.sleep(60)
        return arrays()

    IndexCache(folder).get_or_build("k", {"seed": 1}, build)


def test_a_killed_builder_leaves_no_lock_and_no_half_entry(tmp_path) -> None:
    started = fork.Event()
    builder = fork.Process(target=build_and_hang, args=(tmp_path, started))
    builder.start()
    assert started.wait(30)
    os.kill(builder.pid, signal.SIGKILL)
    builder.join()
    start = time.monotonic()
    assert equal(IndexCache(tmp_path).get_or_build("k", {"seed": 1}, arrays), arrays())
    assert time.monotonic() - start < 5
    assert not list(tmp_path.glob(".*.half"))


def test_impatience_builds_its_own(tmp_path) -> None:
    started = fork.Event()
    builder = fork.Process(target=build_and_hang, args=(tmp_path, started))
    builder.start()
    try:
        assert started.wait(30)
        found = IndexCache(tmp_path, patience_s=0.2).get_or_build("k", {"seed": 1}, arrays)
        assert equal(found, arrays())
    finally:
        builder.kill()
        builder.join()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.npy", b""),
        ("a.npy", b"\x93NUMPY junk"),
        ("b.npy", None),
        ("description.json", b"{"),
        ("description.json", b"[]"),
    ],
)
def test_a_damaged_entry_is_built_again(tmp_path, name, content) -> None:
    cache = IndexCache(tmp_path)
    cache.get_or_build("k", {"seed": 1}, arrays)
    (entry,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    if content is None:
        (entry / name).unlink()
    else:
        (entry / name).write_bytes(content)
    assert equal(cache.get_or_build("k", {"seed": 1}, arrays), arrays())
    assert equal(cache.get_or_build("k", {"seed": 1}, refuse), arrays())


def test_an_entry_with_objects_is_never_unpickled(tmp_path) -> None:
    cache = IndexCache(tmp_path)
    cache.get_or_build("k", {"seed": 1}, arrays)
    (entry,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    np.save(entry / "a.npy", np.array([{"x": 1}], dtype=object), allow_pickle=True)
    assert equal(cache.get_or_build("k", {"seed": 1}, arrays), arrays())


def test_a_folder_that_cannot_be_used_warns_and_builds(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match=r"index cache .*file/cache cannot be written"):
        found = IndexCache(tmp_path / "file" / "cache").get_or_build("k", {}, arrays)
    assert equal(found, arrays())


def test_files_of_the_same_name_are_told_apart(tmp_path) -> None:  # FC-08
    prefix = write_documents(tmp_path / "x", [[1, 2], [3]])
    first = file_facts(prefix)
    assert file_facts(prefix) == first
    write_documents(prefix, [[1], [2, 3]])
    assert file_facts(prefix) != first
    assert default_cache_folder(prefix) == tmp_path / "cache" / "GPTDataset_indices"
