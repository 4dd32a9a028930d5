"""tools/convert_checkpoint.py as a command: what it prints, its exit codes, formats without ours between them.

References: the conversion in two steps, a Megatron checkpoint by a writer of the tests (`megatron_files.py`).
"""

import os
from pathlib import Path

import pytest
import torch

from megatron_parm.checkpoint.verify import read_manifest_file
from megatron_parm.errors import CheckpointError
from tests.training import megatron_files
from tests.training.test_convert import assert_equal_bits, tensors_of
from tools.convert_checkpoint import main

TRUST = "--trust-checkpoint"


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT of Megatron of two slices and two stages."""
    root = tmp_path_factory.mktemp("megatron")
    megatron_files.write_classic(root, megatron_files.weights(), tp=2, pp=2)
    return root


def _words(source: str, load: Path, target: str, save: Path, *more: str) -> list[str]:
    return ["--from", source, "--load", str(load), "--to", target, "--save", str(save), *more]


def test_megatron_to_hugging_face_is_the_way_through_ours(theirs: Path, tmp_path: Path) -> None:
    assert main(_words("megatron", theirs, "hf", tmp_path / "straight", TRUST)) == 0
    assert main(_words("megatron", theirs, "megatron_parm", tmp_path / "ours", TRUST)) == 0
    assert main(_words("megatron_parm", tmp_path / "ours", "hf", tmp_path / "two_steps")) == 0
    assert_equal_bits(tensors_of(tmp_path / "straight"), tensors_of(tmp_path / "two_steps"))
    configs = [(tmp_path / name / "config.json").read_text() for name in ("straight", "two_steps")]
    assert configs[0] == configs[1]


def test_hugging_face_to_megatron_and_back(theirs: Path, tmp_path: Path) -> None:
    """Slices and stages of another number on the way."""
    assert main(_words("megatron", theirs, "hf", tmp_path / "hf", TRUST)) == 0
    sizes = ("--target-tensor-parallel-size", "1", "--target-pipeline-parallel-size", "2")
    assert main(_words("hf", tmp_path / "hf", "megatron", tmp_path / "again", *sizes)) == 0
    assert len(list((tmp_path / "again" / "release").iterdir())) == 2
    assert main(_words("megatron", tmp_path / "again", "hf", tmp_path / "back", TRUST)) == 0
    assert_equal_bits(tensors_of(tmp_path / "back"), tensors_of(tmp_path / "hf"))


class _Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.marker),)


def test_what_is_not_to_be_trusted_is_code_21_and_runs_nothing(
    theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(_words("megatron", theirs, "megatron_parm", tmp_path / "ours")) == 21
    assert TRUST in capsys.readouterr().err
    root = tmp_path / "hostile"
    file = megatron_files.write_classic(root, megatron_files.weights()) / "mp_rank_00/model_optim_rng.pt"
    torch.save(torch.load(file, weights_only=False) | {"opt": _Payload(tmp_path / "marker")}, file)
    assert main(_words("megatron", root, "megatron_parm", tmp_path / "ours", TRUST)) == 21
    said = capsys.readouterr().err
    assert f"{file}" in said and "mkdir" in said and "Traceback" not in said
    assert not (tmp_path / "marker").exists() and not (tmp_path / "ours").exists()
    torch.load(file, weights_only=False)  # the negative control: Python's own unpickler does run it
    assert (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    ("source", "more", "said"),
    [
        ("megatron", ("--target-tensor-parallel-size", "2"), "only with --to megatron"),
        ("hf", (TRUST,), "only with --from megatron"),
        ("hf", ("--max-file-size", "0"), "must be above 0"),
    ],
)
def test_flags_that_cannot_be_meant_are_code_2(
    theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, more: tuple[str, ...], said: str
) -> None:
    assert main(_words(source, theirs, "megatron_parm", tmp_path / "ours", *more)) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "ours").exists()


def test_a_run_that_is_to_load_it_is_told_the_converter(theirs: Path) -> None:
    (checkpoint,) = theirs.glob("iter_*")
    with pytest.raises(CheckpointError, match=r"convert it once: tools/convert_checkpoint\.py --from megatron"):
        read_manifest_file(checkpoint)
