"""Megatron's own commands run unchanged: that of March 2021 through torch.distributed.launch, today's through torchrun.

Reference: the two describe one dense model when the experts are left out, so they print the same losses.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers.pre_tokenizers import ByteLevel

from megatron_parm.data.indexed_writer import IndexedWriter
from tests.training.processes import free_port, ranks

ROOT = Path(__file__).parents[2]
LOSSES = re.compile(r"^ iteration +(\d+)/ +20 .* lm loss: (\S+) ", re.MULTILINE)


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables of the scripts: a vocabulary of the 256 bytes and random text in it."""
    folder = tmp_path_factory.mktemp("assets")
    words = [*sorted(ByteLevel.alphabet()), "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    random = np.random.RandomState(1)
    with IndexedWriter(folder / "text_document", np.dtype("u2")) as writer:
        for _ in range(300):
            writer.add_document(np.append(random.randint(0, 256, 130), 256))
    files = {"DATA_PATH": "text_document", "VOCAB_FILE": "vocab.json", "MERGE_FILE": "merges.txt"}
    return {name: str(folder / file) for name, file in files.items()}


def _run(script: str, folder: Path, variables: dict[str, str]) -> str:
    """Run a script of examples/ as a user does; returns what it printed."""
    environment = {
        **os.environ,
        **variables,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "MASTER_PORT": str(free_port()),
        "CHECKPOINT_PATH": str(folder),
    }
    for name in ("RANK", "TP", "NNODES", "GPUS_PER_NODE", "MASTER_ADDR"):
        environment.pop(name, None)
    found = subprocess.run(
        ["bash", f"examples/{script}.sh"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    assert (folder / "latest_checkpointed_iteration.txt").read_text().strip() == "20"
    return found.stdout + found.stderr


TORCHRUN = '#!/usr/bin/env bash\nprintf "%s\\n" "$@" > "$0.called"\n'


def flags_given(script: str, folder: Path, variables: dict[str, str], *more: str) -> list[str]:
    """The flags with which a script of examples/ would start pretrain_gpt.py under torchrun, which is stood in for."""
    folder.mkdir(parents=True, exist_ok=True)
    torchrun = folder / "torchrun"
    torchrun.write_text(TORCHRUN)
    torchrun.chmod(0o755)
    environment = {**os.environ, **variables, "PATH": f"{folder}:{os.environ['PATH']}"}
    subprocess.run(["bash", f"examples/{script}.sh", *more], cwd=ROOT, env=environment, check=True, timeout=60)
    words = (folder / "torchrun.called").read_text().splitlines()
    return words[words.index("pretrain_gpt.py") + 1 :]


@pytest.fixture(scope="module")
def of_2021(assets: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the command of 2021 printed."""
    return _run("megatron_2021_style", tmp_path_factory.mktemp("of_2021"), assets)


def test_the_command_of_2021_trains_evaluates_and_saves(of_2021: str) -> None:
    assert [iteration for iteration, _ in LOSSES.findall(of_2021)] == ["5", "10", "15", "20"]
    assert "validation loss at iteration 10 |" in of_2021 and "on test set" in of_2021
    for name in ("--DDP-impl",):
        assert of_2021.count(f"{name} is accepted and ignored") == 1  # one warning, from one rank


def test_todays_command_trains_experts(assets: dict[str, str], tmp_path: Path) -> None:
    said = _run("megatron_current_style", tmp_path, assets)
    assert len(LOSSES.findall(said)) == 4 and "load_balancing_loss" in said
    assert any((tmp_path / "tensorboard").iterdir())
    state = json.loads((tmp_path / "iter_0000020" / "state.json").read_text())
    assert state["config"]["num_experts"] == 4 and state["config"]["expert_model_parallel_size"] == 2


def test_both_describe_one_model(assets: dict[str, str], tmp_path: Path, of_2021: str) -> None:
    variables = {**assets, "NUM_EXPERTS": "0", "EP": "1", "CHECKPOINT_PATH": str(tmp_path)}
    argv = flags_given("megatron_current_style", tmp_path / "bin", variables)
    with ranks(2, [*argv, "--num-workers", "0"], tmp_path / "logs") as running:
        assert running.wait(seconds=200) == [0, 0], running.outputs[-3000:]
        assert LOSSES.findall(running.outputs) == LOSSES.findall(of_2021), running.outputs[-3000:]


def test_the_default_data_are_the_quickstarts() -> None:
    for script in ("megatron_2021_style", "megatron_current_style"):
        text = (ROOT / "examples" / f"{script}.sh").read_text()
        for name in ("corpus_text_document", "vocab.json", "merges.txt"):
            assert f"runs/quickstart/data/{name}" in text
    assert "folder=${1:-runs/quickstart}" in (ROOT / "examples" / "quickstart.sh").read_text()
    assert shutil.which("bash")
