"""`--trace` in whole runs. References: the same run without it, bit for bit; the steps that the flags name."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_parm.config.logs import LoggingConfig
from megatron_parm.config.parser import parse_run_config
from megatron_parm.config.run import check_run
from megatron_parm.errors import ConfigError
from megatron_parm.observe.trace import COMPUTE
from tests.harness.layouts import Layout
from tests.harness.pools import Pools
from tests.training.runs import MOE, flags, run_training, same_bits
from tools.analyse_trace import analyse

LAYOUT = Layout(4, tp=2, ep=2)
SIZES = "--tensor-model-parallel-size 2 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1"


def _spans(path: Path, rank: int) -> list[dict[str, Any]]:
    found = json.loads(path.read_text())["traceEvents"]
    return [event for event in found if event["ph"] == "X" and event["pid"] == rank]


def test_the_steps_of_the_flags_and_nothing_else(pools: Pools, corpus: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    argv = flags(corpus, SIZES, MOE, "--moe-schedule s1 --moe-pipeline-chunks 2")
    plain = pools.run(LAYOUT, run_training, argv)
    traced = pools.run(
        LAYOUT, run_training, [*argv, *f"--trace {path} --profile-step-start 1 --profile-step-end 3".split()]
    )
    for one, other in zip(plain, traced, strict=True):
        assert one.error is None and other.error is None
        assert one.figures() == other.figures() and not same_bits(one.state, other.state)
    assert f"wrote {path}: iterations 2 to 3; ranks recorded: 4" in traced[0].said
    assert sorted(tmp_path.iterdir()) == [path], "the parts are gone"
    assert [one.rank for one in analyse(json.loads(path.read_text()))] == [0, 1, 2, 3]
    for rank in range(4):
        spans = _spans(path, rank)
        steps = [span["args"]["number"] for span in spans if span["name"] == "iteration"]
        assert steps == [2, 3]
        names = [span["name"] for span in spans if span["cat"] == "compute"]
        layers, micro_batches = 2, 2
        for name in ("forward", "backward"):
            numbers = [span["args"]["micro_batch"] for span in spans if span["name"] == name]
            assert numbers == [0, 1] * 2, name
        for name in ("gate", "gate backward", "dispatch", "combine backward", "MoE layer"):
            assert names.count(name) == 2 * layers * micro_batches, name
        assert names.count("experts") == names.count("experts backward") == 2 * layers * micro_batches * 2
        assert {"data", "reduce gradients", "clip", "optimizer"} < set(names)
        lanes = {span["args"].get("axis", COMPUTE) for span in spans}
        assert {COMPUTE, "tp", "ep_esp", "dp"} <= lanes


def test_ranks_of_the_flags_and_a_run_that_ends_early(pools: Pools, corpus: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    argv = flags(corpus, SIZES, MOE, f"--trace {path} --profile-ranks 1 3 --profile-step-start 3")
    outcomes = pools.run(LAYOUT, run_training, argv)
    assert all(one.error is None for one in outcomes)
    assert "iterations 4 to 4; ranks recorded: 2" in outcomes[0].said
    ranks = json.loads(path.read_text())["otherData"]["ranks"]
    assert [one["rank"] for one in ranks] == [1, 3]


def test_nothing_to_record_is_said(pools: Pools, corpus: str, tmp_path: Path) -> None:
    argv = flags(corpus, f"--trace {tmp_path / 'trace.json'}")
    (outcome,) = pools.run(Layout(1), run_training, argv)
    assert "--trace recorded nothing: no step of this run lies between --profile-step-start 10" in outcome.said
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_stops_every_rank(pools: Pools, corpus: str, tmp_path: Path) -> None:
    (tmp_path / "trace.json").mkdir()
    argv = flags(corpus, SIZES, MOE, f"--trace {tmp_path / 'trace.json'} --profile-step-start 0 --profile-step-end 1")
    for outcome in pools.run(LAYOUT, run_training, argv):
        assert outcome.error is not None and outcome.error[1] == 2 and "cannot be written" in outcome.error[2]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--profile-step-start 5 --profile-step-end 5", "--profile-step-end 7"),
        ("--profile-ranks one", "--profile-ranks one: expected ranks"),
    ],
)
def test_flags_that_record_nothing(corpus: str, given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_run(parse_run_config(flags(corpus, "--trace x.json", given))[0], 1)


def test_a_rank_that_there_is_not(pools: Pools, corpus: str) -> None:
    (outcome,) = pools.run(Layout(1), run_training, flags(corpus, "--trace x.json --profile-ranks 0 4"))
    assert outcome.error is not None and "ranks 0 to 0" in outcome.error[2]


def test_megatrons_switches_name_the_flag(corpus: str) -> None:
    config, notes = parse_run_config(flags(corpus, "--profile --profile-ranks 0 --profile-step-start 3"))
    assert any("--trace FILE" in note for note in notes)
    assert config.logging == LoggingConfig(
        log_interval=1, progress_bar="off", profile_step_start=3, profile_ranks=("0",)
    )
