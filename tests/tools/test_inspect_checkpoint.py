"""The tool that looks into checkpoints. Reference: what was saved."""

from pathlib import Path

import pytest
import torch

from megatron_parm.checkpoint.save import save_checkpoint
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.sharding import ShardSpec
from tests.checkpoint import example
from tests.harness.layouts import Layout
from tests.harness.pools import Pools
from tools.inspect_checkpoint import main


@pytest.fixture
def two(pools: Pools, tmp_path: Path) -> tuple[Path, Path]:
    """The same values saved on 4 ranks and on 1."""
    pools.run(Layout(4, tp=2, esp=2, ep=2), example.save, tmp_path / "a", 7, 3)
    pools.run(Layout(1), example.save, tmp_path / "b", 7, 3)
    return tmp_path / "a", tmp_path / "b"


def test_contents_layout_and_hashes(two: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(two[0]), "--files", "--tensors", "experts.weight1"]) == 0
    said = capsys.readouterr().out
    assert "iteration 7" in said and "world 4, pp 1, dp 2, tp 2, edp 1, ep 2, esp 2" in said
    numbers = sum(value.numel() for name, value in example.global_values(3).items() if name.startswith("layers"))
    assert f"layers: 20 tensors, {numbers:,} numbers" in said
    assert "layers.2.experts.weight1  [4, 8, 16] float32  in 4 files" in said
    assert said.count(".safetensors") == 4 and "every hash is that of the manifest" in said


def test_two_layouts_of_the_same_values_are_equal(two: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(two[0]), "--compare", str(two[1] / "iter_0000007")]) == 0
    assert "all tensors are equal, bit by bit" in capsys.readouterr().out


def test_what_differs_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ctx = ParallelContext.single()
    first = example.tensors_of(ctx, 3)
    second = {name: (local.clone(), spec) for name, (local, spec) in first.items() if name != "mask"}
    second["norm.weight"][0][2] += 0.5
    second["layers.0.row.weight"] = (first["layers.0.row.weight"][0].double(), first["layers.0.row.weight"][1])
    save_checkpoint(tmp_path / "a", 1, first, {}, {"config": {"lr": 1.0}}, ctx)
    save_checkpoint(tmp_path / "b", 1, second, {}, {"config": {"lr": 2.0}}, ctx)
    assert main([str(tmp_path / "a"), "--compare", str(tmp_path / "b")]) == 1
    said = capsys.readouterr().out
    assert "only in the first (1):\n  mask" in said
    assert "layers.0.row.weight: [8, 16] float32 and [8, 16] float64" in said
    assert "norm.weight: 1 of 8 numbers differ, by 0.5 at most" in said
    assert "lr: 1.0 and 2.0" in said and "all tensors are equal" not in said


def test_a_sign_of_zero_is_a_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bit by bit: 0.0 == -0.0 would hide it."""
    ctx = ParallelContext.single()
    spec = ShardSpec((2,), (), "dense", True)
    for name, value in (("a", 0.0), ("b", -0.0)):
        save_checkpoint(tmp_path / name, 1, {"w": (torch.full((2,), value), spec)}, {}, {}, ctx)
    assert main([str(tmp_path / "a"), "--compare", str(tmp_path / "b")]) == 1
    assert "w: 0 of 2 numbers differ" in capsys.readouterr().out


def test_damage_is_an_error_with_code_21(two: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    file = next((two[0] / "iter_0000007").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert main([str(two[0])]) == 21
    assert file.name in capsys.readouterr().err
    assert main([str(two[0]), "--verify-checkpoint", "size"]) == 0
    assert "hashes not compared" in capsys.readouterr().out
