"""Damage to a checkpoint, class by class: bit flips, lengths, missing, extra and foreign files, links, pickles."""

import random
import shutil
from pathlib import Path

import pytest
import torch

from megatron_parm.checkpoint.find import find_checkpoint
from megatron_parm.checkpoint.load import load_tensors
from megatron_parm.checkpoint.verify import VerifyLevel, verify_checkpoint
from megatron_parm.errors import CheckpointError, UntrustedCheckpointError
from megatron_parm.parallel.context import ParallelContext
from tests.checkpoint import example
from tests.harness.layouts import Layout
from tests.harness.pools import Pools

CTX = ParallelContext.single()
SHARD = "shard-00001-model-00001-of-00001.safetensors"
EVERY_FILE = (SHARD, "state.json", "manifest.json")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return example.save(CTX, tmp_path, 7, 3).path


def _flip_a_bit(file: Path, place: int) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("name", EVERY_FILE)
def test_a_flipped_bit_anywhere_is_found(saved: Path, name: str) -> None:
    size = (saved / name).stat().st_size
    for place in (0, size // 3, size // 2, size - 2):
        _flip_a_bit(saved / name, place)
        with pytest.raises(CheckpointError) as caught:
            verify_checkpoint(saved, "full", CTX)
        assert name in str(caught.value)
        if name != "manifest.json":
            assert "has the SHA-256" in str(caught.value)
            assert "expected" in str(caught.value)
        _flip_a_bit(saved / name, place)
    verify_checkpoint(saved, "full", CTX)


@pytest.mark.parametrize("level", ["size", "full"])
@pytest.mark.parametrize("name", EVERY_FILE)
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_truncated_file_is_found_by_its_size(saved: Path, name: str, share: float, level: VerifyLevel) -> None:
    data = (saved / name).read_bytes()
    (saved / name).write_bytes(data[: int(len(data) * share)])
    with pytest.raises(CheckpointError, match=name):
        verify_checkpoint(saved, level, CTX)


def _verify(ctx: ParallelContext, path: Path) -> tuple[str, ...]:
    return verify_checkpoint(path, "full", ctx).warnings


def test_missing_and_foreign_shards_are_listed_on_all_ranks(pools: Pools, tmp_path: Path) -> None:
    """The middle shard of a DCP folder can go missing without an error of DCP's own."""
    layout = Layout(4, tp=2, ep=2)
    path = pools.run(layout, example.save, tmp_path, 7, 3)[0].path
    other = pools.run(layout, example.save, tmp_path / "other", 7, 4)[0].path
    gone, foreign = (f"shard-0000{place}-model-00001-of-00001.safetensors" for place in (2, 3))
    (path / gone).unlink()
    shutil.copy(other / foreign, path / foreign)
    answers = pools.run(Layout(2), example.error_of, _verify, path)
    assert answers[0] == answers[1]
    kind, code, message = answers[0]
    assert (kind, code) == ("CheckpointError", 21)
    assert f"{gone} is missing" in message
    assert f"{foreign} has the SHA-256" in message


def test_an_extra_shard_is_warned_about_and_never_read(pools: Pools, tmp_path: Path) -> None:
    """Reference: the checkpoint without it. DCP's reader would take every safetensors file of the folder."""
    four = pools.run(Layout(4, tp=4), example.save, tmp_path / "four", 7, 4)[0].path
    one = example.save(CTX, tmp_path / "one", 7, 3).path
    extra = "shard-00004-model-00001-of-00001.safetensors"
    shutil.copy(four / extra, one / extra)
    (one / "garbage.safetensors").write_bytes(b"not one")
    assert extra in " ".join(_verify(CTX, one))
    assert example.differing_after_load(CTX, tmp_path / "one", 3) == []


def test_a_link_out_of_the_folder_is_untrusted(saved: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    for name in EVERY_FILE:
        (saved / name).rename(outside)
        (saved / name).symlink_to(outside)
        with pytest.raises(UntrustedCheckpointError, match=f"{name} is a symbolic link to"):
            verify_checkpoint(saved, "size", CTX)
        (saved / name).unlink()
        outside.rename(saved / name)
    verify_checkpoint(saved, "size", CTX)


def test_a_folder_in_place_of_a_file_and_a_folder_without_manifest(saved: Path) -> None:
    (saved / "state.json").unlink()
    (saved / "state.json").mkdir()
    with pytest.raises(CheckpointError, match=r"state\.json is not a regular file"):
        verify_checkpoint(saved, "full", CTX)
    (saved / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no manifest\.json: its save did not finish"):
        verify_checkpoint(saved, "full", CTX)


def test_a_renamed_folder_is_refused(saved: Path) -> None:
    moved = saved.rename(saved.with_name("iter_0000009"))
    with pytest.raises(CheckpointError, match="holds iteration 7"):
        verify_checkpoint(moved, "full", CTX)


def test_a_changed_shard_header_never_ends_in_a_foreign_error(saved: Path) -> None:
    """With sizes alone checked: the shard's header is mutated, its length kept."""
    original = (saved / SHARD).read_bytes()
    header = int.from_bytes(original[:8], "little") + 8
    draw = random.Random(6)
    refused = 0
    for _ in range(150):
        data = bytearray(original)
        data[draw.randrange(header)] = draw.randrange(256)
        (saved / SHARD).write_bytes(data)
        try:
            load_tensors(find_checkpoint(saved.parent, CTX, verify="size"), example.tensors_of(CTX, 3), CTX)
        except CheckpointError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize("level", ["size", "full"])
def test_nothing_is_unpickled(saved: Path, level: VerifyLevel) -> None:
    """A pickle beside a shard, and one of the right size in its place."""
    marker = saved.parent / "marker"

    class Payload:
        def __reduce__(self) -> tuple[object, tuple[object, ...]]:
            return Path.touch, (marker,)

    size = (saved / SHARD).stat().st_size
    torch.save(Payload(), saved / SHARD, _use_new_zipfile_serialization=False)
    pickled = (saved / SHARD).read_bytes()
    assert len(pickled) < size
    (saved / SHARD).write_bytes(pickled.ljust(size, b"\0"))
    (saved / ".metadata").write_bytes(pickled)
    with pytest.raises(CheckpointError):
        load_tensors(find_checkpoint(saved.parent, CTX, verify=level), example.tensors_of(CTX, 3), CTX)
    assert not marker.exists()
