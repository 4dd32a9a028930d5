"""The calibration tool. References: what training reads from the file, and the key of the layout that was asked for."""

from pathlib import Path

import pytest

from megatron_parm.moe.calibrate import COLLECTIVES, read_models
from tests.training.processes import ranks
from tools import calibrate

SIZES = "--hidden-size 16 --ffn-hidden-size 32 --num-experts 4 --seq-length 32"


def test_two_ranks_add_an_entry_that_training_can_read(tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    argv = f"{SIZES} --moe-cost-model {file} --tensor-model-parallel-size 2".split()
    with ranks(2, argv, tmp_path / "logs", main=calibrate.main) as run:
        assert run.wait() == [0, 0], run.outputs
        printed = run.output(0)
        assert run.output(1) == "", "one rank speaks"
    ((key, model),) = read_models(file).items()
    assert key == "cpu:2:tp2-ep1-esp2", "esp is tp where it is not given"
    names = [f"{collective}/{axis}" for collective, axis in COLLECTIVES]
    assert set(model.lines) == {*names, "experts", "experts_backward", "rest"}
    assert model.source == "measured on this cluster, 2 ranks (cluster.json)"
    for name in model.lines:
        assert any(line.startswith(f"{name} ") and " ms + " in line for line in printed.splitlines()), name
    assert "crossing nodes: no axis" in printed and f"kept in {file} under {key}" in printed


def test_one_rank_keeps_other_entries(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cluster.json"
    for more in ((), ("--swiglu", "--bf16")):
        assert calibrate.main([*SIZES.split(), "--moe-cost-model", str(file), *more]) == 0
    assert list(read_models(file)) == ["cpu:1:tp1-ep1-esp1"]
    assert capsys.readouterr().out.count("kept in") == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (f"{SIZES} --tensor-model-parallel-size 2", "--tensor-model-parallel-size 2"),
        (SIZES.replace("--num-experts 4", "--num-experts 0"), "num experts 0 must be at least 1"),
        (f"{SIZES} --topk 5", "--topk 5 must not exceed the 4 experts"),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_line(
    flags: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrate.main([*flags.split(), "--moe-cost-model", str(tmp_path / "cluster.json")]) == 2
    text = capsys.readouterr().err
    assert message in text and text.count("\n") == 1


def test_a_damaged_file_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cluster.json"
    file.write_text("{")
    assert calibrate.main([*SIZES.split(), "--moe-cost-model", str(file)]) == 2
    assert "delete it to measure anew" in capsys.readouterr().err
