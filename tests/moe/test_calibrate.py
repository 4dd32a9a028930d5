"""The measured cost model. References: lines whose points are known, files written by hand, made-up node names.

No test looks at how long anything took, only at what a measurement must give on any machine.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_parm.errors import DataError
from megatron_parm.moe import calibrate
from megatron_parm.moe.calibrate import cluster_key, fit, from_json, keep_model, measure, read_models, to_json
from megatron_parm.moe.choose import predictions
from megatron_parm.moe.cost import PUBLISHED, CostModel, LayerShape, Line
from megatron_parm.moe.schedules import SCHEDULES
from megatron_parm.parallel.context import ParallelContext
from tests.harness.layouts import Layout
from tests.harness.pools import Pools

POOL = Layout(4, tp=2, ep=2, esp=2)
MODEL = CostModel(
    source="test",
    lines={**PUBLISHED.lines, "all_to_all/ep": Line(0.5, 1e-7, 0.75), "experts_backward": Line(0.25, 3e-11)},
    crossing=frozenset({"ep"}),
    links_hidden=0.5,
    processor_hidden=0.25,
    chunk_ms=0.125,
)


# --- the fit ---


def test_points_on_a_line_give_that_line() -> None:
    line = fit((1, 2, 4, 8), (5, 7, 11, 19))
    assert (line.alpha, line.beta, line.r2) == pytest.approx((3, 2, 1))


def test_scattered_points_give_the_least_squares() -> None:
    """By hand: means 1 and 2, slope (1 + 0 + 2) / 2; misses 1/4, 1, 1/4 of a spread of 6."""
    line = fit((0, 1, 2), (1, 1, 4))
    assert (line.alpha, line.beta, line.r2) == pytest.approx((0.5, 1.5, 0.75))


def test_equal_times_are_a_constant() -> None:
    assert fit((1, 2, 3), (4, 4, 4)) == Line(4, 0, 1)


def test_no_coefficient_is_below_zero() -> None:
    falling = fit((1, 2, 3), (9, 6, 3))
    assert (falling.alpha, falling.beta) == (6, 0), "the mean"
    assert falling.r2 == 0
    below = fit((2, 3, 4), (1, 3, 5))
    assert (below.alpha, below.beta) == (0, 2)


# --- values and files ---


def test_to_json_and_back() -> None:
    assert from_json(json.loads(json.dumps(to_json(MODEL)))) == MODEL
    assert from_json(to_json(PUBLISHED)) == PUBLISHED


def _without(name: str) -> dict[str, Any]:
    return {key: value for key, value in to_json(MODEL).items() if key != name}


@pytest.mark.parametrize(
    "values",
    [
        None,
        [],
        "text",
        _without("lines_ms"),
        _without("chunk_ms"),
        {**to_json(MODEL), "lines_ms": {}},
        {**to_json(MODEL), "lines_ms": {**to_json(MODEL)["lines_ms"], "experts": [1.0, "fast", 1.0]}},
        {**to_json(MODEL), "lines_ms": {**to_json(MODEL)["lines_ms"], "experts": [1.0, math.nan, 1.0]}},
        {**to_json(MODEL), "lines_ms": {**to_json(MODEL)["lines_ms"], "experts": [-1.0, 0.0, 1.0]}},
        {**to_json(MODEL), "lines_ms": {**to_json(MODEL)["lines_ms"], "experts": [1.0] * 4}},
        {**to_json(MODEL), "links_hidden": None},
        {**to_json(MODEL), "crossing": "ep"},
        {**to_json(MODEL), "crossing": [["ep"]]},
    ],
    ids=str,
)
def test_a_damaged_entry(values: Any, tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps({"here": values}))
    with pytest.raises(DataError, match=r"damaged .*; delete the file of --moe-cost-model to measure anew"):
        read_models(file)


@pytest.mark.parametrize("content", [b"", b"{", b'{"a": ', b"\xff\xfe", b"[]", b"3"])
def test_a_damaged_file(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"--moe-cost-model .*cluster\.json .*; delete it to measure anew"):
        read_models(file)
    with pytest.raises(DataError):
        keep_model(file, "here", MODEL)
    assert file.read_bytes() == content, "what cannot be read is not overwritten"


def test_a_file_keeps_its_other_entries(tmp_path: Path) -> None:
    file = tmp_path / "new" / "cluster.json"
    assert read_models(file) == {}
    keep_model(file, "one", MODEL)
    keep_model(file, "two", PUBLISHED)
    keep_model(file, "one", replace(MODEL, chunk_ms=8.0))
    kept = read_models(file)
    assert kept == {
        "one": replace(MODEL, chunk_ms=8.0, source="test (cluster.json)"),
        "two": replace(PUBLISHED, source=f"{PUBLISHED.source} (cluster.json)"),
    }
    assert [path.name for path in file.parent.iterdir()] == ["cluster.json"], "no draft is left"


def test_a_file_is_replaced_in_one_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cluster.json"
    keep_model(file, "one", MODEL)
    before = file.read_text()

    def fails(draft: Path, target: Path) -> None:
        assert draft.parent == target.parent and set(json.loads(draft.read_text())) == {"one", "two"}
        raise OSError("no space")

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(DataError, match=r"--moe-cost-model .*cannot be written: no space"):
        keep_model(file, "two", MODEL)
    assert file.read_text() == before


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"--moe-cost-model .* cannot be"):
        keep_model(tmp_path / "file" / "cluster.json", "one", MODEL)


# --- nodes ---


def _nodes(ctx: ParallelContext, nodes: tuple[str, ...]) -> tuple[str, list[str]]:
    placed = replace(ctx, node=nodes[ctx.rank])
    return cluster_key(placed), calibrate._crossing(placed)


@pytest.mark.parametrize(
    ("layout", "nodes", "key", "crossing"),
    [
        (POOL, "aaaa", "cpu:4:tp2-ep2-esp2", []),
        (POOL, "aabb", "cpu:2+2:tp2-ep2-esp2", ["ep", "ep_esp", "between"]),
        (POOL, "abab", "cpu:2+2:tp2-ep2-esp2", ["ep_esp", "tp", "esp", "inside"]),
        (POOL, "abbb", "cpu:1+3:tp2-ep2-esp2", ["ep", "ep_esp", "tp", "esp", "inside"]),
        (POOL, "abcd", "cpu:1+1+1+1:tp2-ep2-esp2", ["ep", "ep_esp", "tp", "esp", "inside"]),
        (Layout(4, tp=4), "aabb", "cpu:2+2:tp4-ep1-esp1", ["tp"]),
        (Layout(4, tp=2, esp=2), "aabb", "cpu:2+2:tp2-ep1-esp2", []),
    ],
)
def test_axes_that_span_nodes(pools: Pools, layout: Layout, nodes: str, key: str, crossing: list[str]) -> None:
    """Ranks are (ep, esp) and (dp, tp), the last fastest. A rank whose own groups stay inside says the same."""
    assert pools.run(layout, _nodes, tuple(nodes)) == [(key, crossing)] * layout.world


def test_the_key_does_not_hold_names(pools: Pools) -> None:
    assert pools.run(POOL, _nodes, tuple("aabb")) == pools.run(POOL, _nodes, tuple("yyxx"))


# --- a measurement ---


def _shape(layout: Layout) -> LayerShape:
    return LayerShape(
        num_tokens=64,
        hidden_size=16,
        ffn_hidden_size=32,
        num_experts=4,
        topk=2,
        capacity_factor=1.5,
        min_capacity=1,
        has_slots=True,
        pads=False,
        matrices=2,
        bytes_per_element=4,
        tp=layout.tp,
        ep=layout.ep,
        esp=layout.esp,
    )


def _measure(ctx: ParallelContext, shape: LayerShape) -> CostModel:
    return measure(shape, replace(ctx, node="ab"[ctx.rank // 2]), torch.float32, lambda: None)


@pytest.mark.parametrize("dropless", [False, True])
def test_a_measurement(pools: Pools, dropless: bool) -> None:
    shape = _shape(POOL)
    if dropless:
        shape = replace(shape, capacity_factor=None, has_slots=False)
    model, *others = pools.run(POOL, _measure, shape)
    assert others == [model] * 3
    collectives = {f"{name}/{axis}" for name, axis in calibrate.COLLECTIVES}
    assert set(model.lines) == {*collectives, "experts", "experts_backward", "rest"}
    for name, line in model.lines.items():
        assert all(map(math.isfinite, (line.alpha, line.beta, line.r2))), name
        assert line.alpha >= 0 and line.beta >= 0 and line.r2 <= 1, name
    assert 0 <= model.links_hidden <= 1 and 0 <= model.processor_hidden <= 1 and model.chunk_ms >= 0
    assert model.crossing == {"ep", "ep_esp", "between"} and "4 ranks" in model.source
    times = predictions(shape, model)
    assert {name for name, _ in times} == ({"baseline", "s1", "s1h", "s1n"} if dropless else set(SCHEDULES))
    assert all(math.isfinite(time) and time > 0 for time in times.values())
