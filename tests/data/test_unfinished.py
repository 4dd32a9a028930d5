"""Files that are not finished. References: which of their writers live, and what they wrote."""

import os
import signal

import numpy as np
import pytest

from megatron_parm.data.indexed_writer import IndexedWriter
from megatron_parm.data.unfinished import UnfinishedFile, remove_abandoned


def in_child(work) -> int:
    """A process that does `work` and then waits for its end; it is at that point when this returns."""
    ready, done = os.pipe()
    child = os.fork()
    if child == 0:
        kept = work()
        os.write(done, b"1" if kept else b"0")
        signal.pause()
    assert os.read(ready, 1) == b"1"
    return child


def kill(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_what_a_dead_writer_left_goes_and_what_a_living_one_writes_stays(tmp_path) -> None:
    children = [in_child(lambda: IndexedWriter(tmp_path / "x", np.dtype("u2"))) for _ in range(2)]
    other = in_child(lambda: IndexedWriter(tmp_path / "x_other", np.dtype("u2")))
    kill(children[0])
    with IndexedWriter(tmp_path / "x", np.dtype("u2")) as writer:
        writer.add_document(np.array([1]))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert writer.num_abandoned == 1
    assert names == ["x.bin", f"x.bin.unfinished-{children[1]}", "x.idx", f"x_other.bin.unfinished-{other}"]
    kill(children[1])
    kill(other)
    assert remove_abandoned(tmp_path / "x.bin") == 1 and remove_abandoned(tmp_path / "x.bin") == 0


def test_a_process_forked_by_a_dead_writer_does_not_keep_its_files(tmp_path) -> None:
    read, write = os.pipe()

    def work():
        kept = UnfinishedFile(tmp_path / "x")
        worker = os.fork()
        if worker == 0:
            signal.pause()
        os.write(write, f"{worker} ".encode())
        return kept

    kill(in_child(work))
    assert remove_abandoned(tmp_path / "x") == 1
    os.kill(int(os.read(read, 20)), signal.SIGKILL)


def test_a_name_with_special_letters_is_no_pattern(tmp_path) -> None:
    kill(in_child(lambda: UnfinishedFile(tmp_path / "x[1]")))
    kill(in_child(lambda: UnfinishedFile(tmp_path / "x1")))
    assert remove_abandoned(tmp_path / "x[1]") == 1
    assert [path.name.split(".")[0] for path in tmp_path.iterdir()] == ["x1"]


def test_a_file_taken_away_before_it_was_locked_is_made_again(tmp_path, monkeypatch) -> None:
    locks = []

    def lock_late(file, operation) -> None:
        if not locks:
            (tmp_path / f"x.unfinished-{os.getpid()}").unlink()
        locks.append(operation)

    monkeypatch.setattr("fcntl.lockf", lock_late)
    made = UnfinishedFile(tmp_path / "x")
    made.file.write(b"all")
    made.flush_to_disk()
    made.publish()
    assert len(locks) == 2 and (tmp_path / "x").read_bytes() == b"all"


def test_a_file_system_without_locks_keeps_all(tmp_path, monkeypatch) -> None:
    def no_locks(file, operation) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.lockf", no_locks)
    (tmp_path / "x.unfinished-1").write_bytes(b"whose?")
    UnfinishedFile(tmp_path / "x").discard()
    assert remove_abandoned(tmp_path / "x") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["x.unfinished-1"]


@pytest.mark.parametrize("fails_at", ["write", "fsync"])
def test_what_is_discarded_leaves_the_file_of_the_name(tmp_path, fails_at) -> None:
    (tmp_path / "x").write_bytes(b"old")
    made = UnfinishedFile(tmp_path / "x")
    made.file.write(b"new")
    if fails_at == "fsync":
        made.flush_to_disk()
    made.discard()
    assert [path.name for path in tmp_path.iterdir()] == ["x"] and (tmp_path / "x").read_bytes() == b"old"
