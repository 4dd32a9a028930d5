"""The scripts for a server and a cluster run on a laptop: the same files, with small sizes by the environment.

Reference: what the scripts promise in their heads. Slurm's own commands are stood in for by two small ones.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_parm.config.megatron_flags import MEGATRON_FLAGS
from tests.examples.test_megatron_styles import assets, flags_given  # noqa: F401 - a fixture
from tests.training.processes import free_port, ranks

ROOT = Path(__file__).parents[2]
SMALL = {
    "LAYERS": "2", "HIDDEN": "32", "HEADS": "4", "SEQ": "32", "MICRO_BATCH": "2", "GLOBAL_BATCH": "8",
    "ITERATIONS": "4", "PRECISION": "fp32", "EVAL_INTERVAL": "4", "EVAL_ITERS": "1", "LOG_INTERVAL": "2",
    "SPLIT": "90,5,5",
}  # fmt: skip
DENSE = {"GPUS_PER_NODE": "2", "TP": "2"}
MOE = {"GPUS_PER_NODE": "4", "TP": "2", "EP": "2", "ESP": "2", "EXPERTS": "4"}


def _run(words: list[str], folder: Path, variables: dict[str, str], path: str = "") -> list[dict[str, object]]:
    """The events of its log."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "NNODES", "RENDEZVOUS"))},
        **SMALL,
        **variables,
        "PATH": f"{path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "CHECKPOINT_PATH": str(folder),
    }
    found = subprocess.run(
        ["bash", *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    return [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]


def _iterations(events: list[dict[str, object]]) -> list[object]:
    return [event["iteration"] for event in events if event["event"] == "train"]


def test_the_dense_script_trains_and_takes_further_flags(assets: dict[str, str], tmp_path: Path) -> None:  # noqa: F811
    """Torchrun itself runs in the test below."""
    variables = {**SMALL, **assets, **DENSE, "CHECKPOINT_PATH": str(tmp_path)}
    argv = flags_given("gpt_dense", tmp_path / "bin", variables, "--exit-interval", "2")
    with ranks(2, [*argv, "--num-workers", "0"], tmp_path / "logs") as running:
        assert running.wait(seconds=200) == [0, 0], running.outputs[-3000:]
    events = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert _iterations(events) == [1, 2]
    assert events[0]["layout"]["tp"] == 2


SRUN = '#!/usr/bin/env bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n'
SCONTROL = "#!/usr/bin/env bash\necho localhost\necho second\n"


def test_under_slurm_the_moe_script_meets_at_the_first_node(assets: dict[str, str], tmp_path: Path) -> None:  # noqa: F811
    """One node of the job, as Slurm would run it; the cost model of the links is measured and kept."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_ID": "7"}
    port = {"PORT": str(free_port()), "SLURM_SUBMIT_DIR": str(ROOT)}
    folder = tmp_path / "run"
    events = _run(["examples/slurm.sh", "gpt_moe.sh"], folder, {**assets, **MOE, **slurm, **port}, path=str(commands))
    assert _iterations(events) == [1, 2, 3, 4]
    layout = events[0]["layout"]
    assert (layout["tp"], layout["ep"], layout["esp"]) == (2, 2, 2)  # type: ignore[index]
    assert (folder / "cluster.json").is_file()


@pytest.mark.parametrize("script", ["gpt_dense", "gpt_moe", "slurm"])
def test_the_scripts_are_valid_and_use_no_flag_that_is_ignored(script: str) -> None:
    path = ROOT / "examples" / f"{script}.sh"
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0
    assert not set(re.findall(r"--[a-z-]+", path.read_text())) & set(MEGATRON_FLAGS)
