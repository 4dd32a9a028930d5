"""The stages of the paper's experiments, run small on two ranks, and what they leave. The launcher is stood in for by
processes that hold torch already; what these run is what real ranks run.

References: the results folder itself, for a second start must find everything done; the sizes that were asked for.
"""

import csv
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest

from megatron_parm.config.parser import parse_run_config
from megatron_parm.config.run import check_run
from megatron_parm.training.entrance import pretrain
from tests.examples.test_megatron_styles import assets  # noqa: F401 - a fixture
from tests.training.processes import ranks
from tools import bench_layer_grid
from tools.paper.whole_models import Corpus, ModelRun, ModelSizes, flags_of

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples/parm_paper"
SMALL = "--cluster torchrun --ranks-per-node 2 --trial --scale 64 --model-scale 32"
MAINS: dict[str, Callable[[list[str]], int]] = {
    "bench_layer_grid.py": bench_layer_grid.main,
    "pretrain_gpt.py": pretrain,
}


@pytest.fixture(scope="module")
def stages() -> ModuleType:
    """examples/parm_paper/stages.py as a module."""
    spec = importlib.util.spec_from_file_location("parm_paper_stages", FOLDER / "stages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _stand_in(folder: Path, started: list[str]) -> Callable[[Sequence[str], float], str | None]:
    def run(command: Sequence[str], seconds: float, shown: object = None) -> str | None:
        place = command.index("--no-python") + 2  # after the interpreter
        script, arguments = Path(command[place]).name, list(command[place + 1 :])
        started.append(script)
        with ranks(2, arguments, folder / str(len(started)), main=MAINS[script]) as running:
            codes = running.wait(seconds=200)
            return None if codes == [0, 0] else running.outputs[-2000:]

    return run


@pytest.mark.full
def test_every_stage_runs_small_and_once(
    stages: ModuleType,
    assets: dict[str, str],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    results, started = tmp_path / "results", []
    monkeypatch.setattr(stages, "run_quietly", _stand_in(tmp_path / "logs", started))
    words = ("--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", assets["VOCAB_FILE"])
    corpus = Corpus(Path(assets["DATA_PATH"]), (*words, "--merge-file", assets["MERGE_FILE"]))
    monkeypatch.setattr(stages.Experiment, "corpus", lambda self, kind: corpus)
    argv = [*SMALL.split(), "--results", str(results)]
    assert stages.main(argv) == 0, capsys.readouterr()
    assert started.count("bench_layer_grid.py") == 2 and started.count("pretrain_gpt.py") == 4
    printed = capsys.readouterr().out
    assert "== 6/6 report" in printed and "minutes left" in printed and "no peer was given a Python" in printed
    with (results / "predicted.csv").open() as file:
        sources = [row["source"] for row in csv.DictReader(file)]
    assert sources.count("published") == 1296 and sources.count("fitted") > 100
    rows = [json.loads(line) for line in (results / "models.jsonl").read_text().splitlines()]
    assert {(row["schedule"], row["purpose"]) for row in rows} == {
        (name, purpose) for name in ("baseline", "auto") for purpose in ("time", "curve")
    }
    curves = [row["losses"] for row in rows if row["purpose"] == "curve"]
    assert len(curves[0]) == 4 and curves[0] == pytest.approx(curves[1], rel=1e-4), "nothing is dropped"
    assert all(0 <= row["exposed_communication"] <= 1 for row in rows if row["purpose"] == "time")
    assert len((results / "layers.jsonl").read_text().splitlines()) == 2
    assert (results / "report.html").read_text().startswith("<!doctype html>")
    run = json.loads((results / "run.json").read_text())
    assert run["world"] == 2 and run["starts"][0]["facts"]["torch"] and not run["emulated"]

    started.clear()
    assert stages.main(argv) == 0
    assert started == [], "the second start finds everything done"
    assert stages.main([*argv, "--ranks-per-node", "4"]) == 2
    assert "holds another cluster's run" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["gpt", "bert"])
@pytest.mark.parametrize("schedule", ["baseline", "deepspeed", "s1", "s2", "auto"])
def test_the_whole_models_are_valid_runs(kind: str, schedule: str, tmp_path: Path) -> None:
    corpus = Corpus(
        tmp_path / "corpus", ("--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", "v", "--merge-file", "m")
    )
    if kind == "bert":
        corpus = Corpus(tmp_path / "corpus", ("--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", "v"))
    for world, scale, purpose in ((8, 4, "time"), (32, 1, "time"), (32, 4, "curve")):
        run = ModelRun(kind, schedule, 4, 4, purpose, 0)
        words = flags_of(run, ModelSizes().shrunk(scale), world, 20, corpus, tmp_path / "c.json", tmp_path / "l.jsonl")
        config, notes = parse_run_config(words, model="GPT" if kind == "gpt" else "BERT")
        check_run(config, world)
        assert notes == [] and config.moe is not None
        experts = config.moe.num_experts
        factor = config.moe.moe_expert_capacity_factor
        assert factor == (1.25 if purpose == "time" else experts / 2)


def test_wrong_flags_are_one_line(stages: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, message in (
        ("--stages layer", "--stages layer: use calibrate, layers"),
        ("--cluster cloud", "--cluster cloud: not known"),
        ("--scale -1", "--scale -1 must be at least 1"),
    ):
        assert stages.main(["--results", str(tmp_path / "r"), *flags.split()]) == 2
        text = capsys.readouterr().err
        assert message in text and text.count("\n") == 1


@pytest.mark.parametrize("script", sorted(path.name for path in FOLDER.glob("*.sh")))
def test_the_scripts_are_valid_and_name_flags_that_are_known(stages: ModuleType, script: str) -> None:
    path = FOLDER / script
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0
    known = {f"--{name.replace('_', '-')}" for name in vars(stages.parse([]))}
    text = path.read_text()
    handed_on = text[text.index("exec ") :] if script in ("server_8gpu.sh", "cluster_8x4.sh") else ""
    assert set(re.findall(r"--[a-z][a-z-]*", handed_on)) <= known
    assert (handed_on == "") == (script in ("run.sh", "slurm.sh"))


SRUN = '#!/usr/bin/env bash\nwhile [[ $1 == --* ]]; do shift; done\nSLURM_NODEID=0 exec "$@"\n'
SCONTROL = "#!/usr/bin/env bash\necho first\necho second\n"
LAST = '#!/usr/bin/env bash\necho "$NODE_RANK $@" > "$0.called"\n'


def test_under_slurm_every_node_meets_at_the_first(tmp_path: Path) -> None:
    """Slurm's own commands and run.sh are stood in for; the flags that reach run.sh are compared."""
    folder = tmp_path / "examples/parm_paper"
    folder.mkdir(parents=True)
    for name in ("slurm.sh", "cluster_8x4.sh"):
        (folder / name).write_text((FOLDER / name).read_text())
    for place, text in (("srun", SRUN), ("scontrol", SCONTROL), ("examples/parm_paper/run.sh", LAST)):
        (tmp_path / place).write_text(text)
        (tmp_path / place).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path)}
    environment |= {"SLURM_JOB_NODELIST": "x", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "4"}
    subprocess.run(["bash", folder / "slurm.sh", "--quick"], env=environment, check=True, timeout=60)
    called = (folder / "run.sh.called").read_text()
    assert called.startswith("0 --cluster torchrun --nodes 2 --ranks-per-node 4 --node-rank 0 --master-addr first ")
    assert called.endswith("--quick\n")
