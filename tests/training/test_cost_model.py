"""Where a run's cost model comes from. References: entries written by hand, and a stand-in for the measurement."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megatron_parm.config.parser import parse_run_config
from megatron_parm.config.run import check_run, resolve
from megatron_parm.errors import DataError
from megatron_parm.moe.calibrate import keep_model, read_models
from megatron_parm.moe.cost import PUBLISHED, CostModel
from megatron_parm.observe.log import Log
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.training import cost_model
from tests.harness.layouts import Layout
from tests.harness.pools import Pools
from tests.training.runs import MOE, Text, flags

LAYOUT = Layout(2, tp=2, esp=2)
KEY = "cpu:2:tp2-ep1-esp2"
SIZES = "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 2"
KEPT = replace(PUBLISHED, source="kept", chunk_ms=3.0)
POOR = {"all_gather": replace(PUBLISHED.lines["all_gather"], r2=0.31)}
MEASURED = replace(PUBLISHED, source="measured", chunk_ms=5.0, lines={**PUBLISHED.lines, **POOR})


def _look_up(ctx: ParallelContext, argv: list[str], measured: bool = False) -> dict[str, Any]:
    """What this rank got or met; `measured`: what measuring gives, else it fails. Files are written as rank 0 only."""
    config, _ = parse_run_config(argv)
    check_run(config, ctx.world.size)
    said, writers = Text(), []

    def writes(path: Path, key: str, model: CostModel) -> None:
        writers.append(ctx.rank)
        keep_model(path, key, model)

    with (
        patch.object(cost_model, "measure", (lambda *_: MEASURED) if measured else None),
        patch.object(cost_model, "keep_model", writes),
    ):
        try:
            model = cost_model.cost_model_for(
                resolve(config, ctx.world.size),
                ctx,
                Log(ctx.rank, out=said, err=said),  # type: ignore[arg-type]
            )
        except DataError as error:
            return {"error": str(error), "wrote": bool(writers)}
    return {"model": model, "said": said.text, "wrote": bool(writers)}


def _run(pools: Pools, *more: str, measured: bool = False) -> list[dict[str, Any]]:
    return pools.run(LAYOUT, _look_up, flags("nowhere", SIZES, *more), measured)


@pytest.mark.parametrize(
    "given",
    [
        f"{MOE} --moe-schedule auto",
        f"{MOE} --moe-schedule s1 --moe-cost-model FILE",
        "",
    ],
    ids=["without the flag", "a schedule was given", "a dense model"],
)
def test_the_published_constants(pools: Pools, tmp_path: Path, given: str) -> None:
    file = tmp_path / "cluster.json"
    for found in _run(pools, given.replace("FILE", str(file))):
        assert found == {"model": PUBLISHED, "said": "", "wrote": False}
    assert not file.exists()


def test_one_rank_has_no_links_to_measure(pools: Pools, tmp_path: Path) -> None:
    argv = flags("nowhere", MOE, f"--moe-schedule auto --moe-cost-model {tmp_path / 'cluster.json'}")
    (found,) = pools.run(Layout(1), _look_up, argv)
    assert found["model"] == PUBLISHED and not found["wrote"]


def test_a_kept_entry_is_used_without_measuring(pools: Pools, tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    keep_model(file, "cpu:8:tp2-ep1-esp2", MEASURED)
    keep_model(file, KEY, KEPT)
    before = file.read_bytes()
    for found in _run(pools, MOE, f"--moe-schedule auto --moe-cost-model {file}"):
        assert found == {"model": replace(KEPT, source="kept (cluster.json)"), "said": "", "wrote": False}
    assert file.read_bytes() == before


def test_a_missing_entry_is_measured_and_added_by_rank_0(pools: Pools, tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    keep_model(file, "cpu:8:tp2-ep1-esp2", KEPT)
    found = _run(pools, MOE, f"--moe-schedule auto --moe-cost-model {file}", measured=True)
    assert [one["model"] for one in found] == [MEASURED] * 2
    assert [one["wrote"] for one in found] == [True, False]
    assert f"{file} has no cost model for {KEY}: measuring" in found[0]["said"] and found[1]["said"] == ""
    assert "all_to_all: 0.175 ms + 0.306 ms per million, r2 1.0000" in found[0]["said"]
    assert "experts: 0.092 ms + 4.42e-05 ms per million" in found[0]["said"]
    assert "the measured times of all_gather (r2 0.31) do not lie on a line" in found[0]["said"]
    kept = read_models(file)
    assert kept.keys() == {"cpu:8:tp2-ep1-esp2", KEY} and kept[KEY].chunk_ms == 5.0


def test_chunks_of_a_fixed_schedule_are_chosen_by_the_file(pools: Pools, tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    keep_model(file, KEY, KEPT)
    for found in _run(pools, MOE, f"--moe-schedule s1 --moe-pipeline-chunks auto --moe-cost-model {file}"):
        assert found["model"] == replace(KEPT, source="kept (cluster.json)")


def test_a_damaged_file_stops_every_rank(pools: Pools, tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    for content in ("{", json.dumps({KEY: {"lines_ms": {}}})):
        file.write_text(content)
        first, second = _run(pools, MOE, f"--moe-schedule auto --moe-cost-model {file}", measured=True)
        assert first == second and "--moe-cost-model" in first["error"] and "rank 0" in first["error"]
        assert file.read_text() == content


def test_a_file_that_cannot_be_written_stops_every_rank(pools: Pools, tmp_path: Path) -> None:
    """Rank 0 alone knows; the other would wait for it."""
    file = tmp_path / "cluster.json"
    (tmp_path / "cluster.json.tmp").mkdir()
    first, second = _run(pools, MOE, f"--moe-schedule auto --moe-cost-model {file}", measured=True)
    assert first["error"] == second["error"] and "cannot be written" in first["error"]
