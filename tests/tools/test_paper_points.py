"""The reconstructed grid, its sample and the growth of clusters. References: counts and bytes worked by hand."""

from collections import Counter
from dataclasses import replace

import pytest

from megatron_parm.errors import ConfigError
from megatron_parm.moe.cost import PUBLISHED, CostModel, Line, plan
from tools.measure.layer_grid import GridPoint
from tools.paper.growth import KINDS, communication_ms, enlarged, grown, on
from tools.paper.points import fits, reconstructed, scaled, stratified
from tools.paper.predicted import Cluster, check_rows, predicted_rows
from tools.paper.whole_models import ModelRun, ModelSizes, largest_spread

POINT = GridPoint(tp=4, esp=4, factor=1.25, batch=1, seq=512, hidden=256, ffn=512)


def test_the_grid_has_1296_points() -> None:
    points = reconstructed()
    assert len(points) == len({point.key for point in points}) == 1296
    assert Counter((point.tp, point.esp) for point in points) == {
        (tp, esp): 144 for tp in (1, 2, 4) for esp in (1, 2, 4)
    }
    assert all(fits(point, 8) and point.shape(8, 2).num_experts == 8 // point.esp for point in points)


def test_a_sample_is_spread_evenly() -> None:
    points = reconstructed()
    sample = stratified(points, 96)
    assert len(set(sample)) == 96 and set(sample) <= set(points)
    assert set(Counter((point.tp, point.esp) for point in sample).values()) == {10, 11}
    work = [point.batch * point.seq * point.hidden * (point.hidden + point.ffn) for point in sample]
    assert max(work) > 100 * min(work), "small layers and large ones"
    assert stratified(points, 96) == sample and stratified(points, 96, seed=1) != sample
    assert stratified(points[:3], 96) == sorted(points[:3], key=lambda point: point.hidden * (point.hidden + point.ffn))


def test_scaled_layers_keep_their_order() -> None:
    small = [scaled(point, 16) for point in reconstructed()]
    assert {point.hidden for point in small} == {64, 128, 256, 512} and {point.seq for point in small} == {32, 64, 128}
    assert {point.batch for point in small} == {1, 2, 4}
    assert scaled(POINT, 1) == POINT
    with pytest.raises(ConfigError, match="--scale 0"):
        scaled(POINT, 0)


def test_models_are_those_of_the_paper_unless_shrunk() -> None:
    assert ModelSizes().shrunk(1) == ModelSizes(12, 768, 12, 1024, 4)
    assert ModelSizes().shrunk(4) == ModelSizes(3, 192, 4, 256, 1)
    assert ModelRun("bert", "s1", 4, 2, "time", 0).script == "pretrain_bert.py"
    assert largest_spread([[2.0, 1.0], [2.0, 1.1], [2.0, 0.95]]) == pytest.approx(0.1)
    assert largest_spread([]) == 0.0


def test_every_layer_is_predicted_by_both_models() -> None:
    rows = list(predicted_rows({(4, 4): PUBLISHED}, 16, 8, 2))
    count = Counter(row["source"] for row in rows)
    assert count == {"published": 1296, "fitted": 144}
    for row in rows[:40]:
        assert row["auto_ms"] <= row["s1_or_s2_ms"] and row["auto_ms"] <= row["baseline_ms"]
    speedups = [row["baseline_ms"] / row["s1_or_s2_ms"] for row in rows if row["source"] == "published"]  # type: ignore[operator]
    assert min(speedups) > 0.99 and 4 < max(speedups) < 8


def test_a_larger_cluster_sends_more_of_a_buffer_between_nodes() -> None:
    """From 2 nodes to 8 the crossing part of an AlltoAll grows from 1/2 to 7/8; its peers from 1 to 7."""
    small, large = POINT.shape(8, 2), POINT.shape(32, 8)
    line = Line(2.0, 1e-6)
    fitted = CostModel("here", {**PUBLISHED.lines, "all_to_all/ep": line})
    found = enlarged(fitted, small, large)
    assert found.line("all_to_all", "ep") == Line(14.0, pytest.approx(1.75e-6))
    assert found.line("all_gather", "esp") == PUBLISHED.line("all_gather", "esp")
    amounts = [stage.amount for stage in plan("s1h", large).chunked if stage.operation == "all_to_all"]
    exchanges = sum(14.0 + 1.75e-6 * amount for amount in amounts)
    others = [stage for stage in plan("s1h", large).chunked if stage.operation in ("all_gather", "reduce_scatter")]
    inside = sum(PUBLISHED.line(stage.operation, stage.axis)(stage.amount) for stage in others)
    joined = sum(PUBLISHED.line(stage.operation, "tp")(stage.amount) for stage in plan("s1h", large).once)
    assert communication_ms("s1h", large, found) == pytest.approx(2 * (exchanges + inside + joined))


def test_the_check_of_growth_compares_collectives_alone() -> None:
    model = CostModel("here", {**PUBLISHED.lines, "all_to_all/ep_esp": Line(1.0, 1e-6)})
    here, there = Cluster(8, 2, {(4, 4): model}), Cluster(32, 8, {(4, 4): PUBLISHED})
    row = {"schedule": "s1", "chunks": 1, "median_ms": 100.0, "processor_ms": 50.0}
    result = {"results": [row, {**row, "chunks": 2}, {**row, "schedule": "auto"}]}
    (found,) = check_rows(POINT, result, here, there)
    links = communication_ms("s1", POINT.shape(32, 8), PUBLISHED)
    assert found["communication_measured_ms"] == links and found["beyond_communication_ms"] == 100.0 - links
    assert found["communication_predicted_ms"] > links, "nothing was fitted for more nodes"
    assert list(check_rows(replace(POINT, tp=2), result, here, there)) == []


def test_growth_is_predicted_for_every_kind() -> None:
    shape = GridPoint(4, 4, 1.2, 4, 1024, 2048, 8192, 8).shape(8, 1, 2)
    rows = list(grown(shape))
    assert {row.kind for row in rows} == {kind.name for kind in KINDS}
    assert {row.ranks for row in rows} == {8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096}
    assert all(0 < row.auto_ms <= min(row.baseline_ms, row.deepspeed_ms or row.baseline_ms) for row in rows)
    slow = {row.ranks: row.auto_ms for row in rows if row.kind == "Ethernet 10 Gb/s"}
    fast = {row.ranks: row.auto_ms for row in rows if row.kind == "NVLink + 400 Gb/s"}
    assert slow[8] > fast[8] and slow[64] > 5 * fast[64] and slow[64] > slow[8]
    larger, nodes = on(64, 8, shape)
    assert (larger.ep, larger.num_experts, nodes) == (16, 64, 8)
