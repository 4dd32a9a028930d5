"""The record. Reference: means and rates worked out by hand from the figures given."""

import math
from dataclasses import asdict

import pytest
import torch

from megatron_parm.moe.record import MicroBatchFigures, RoutingRecord, RoutingSummary
from megatron_parm.parallel.context import ParallelContext
from tests.harness.layouts import Layout
from tests.harness.pools import Pools


def _figures(balance: float, z: float, entropy: float, kept: int, counts: list[int]) -> MicroBatchFigures:
    scalar = torch.tensor
    return MicroBatchFigures(scalar(balance), scalar(z), scalar(entropy), scalar(kept), torch.tensor(counts))


def test_means_over_layers_and_micro_batches() -> None:
    """Two layers, two micro-batches of 4 tokens, top-2, 4 experts."""
    record = RoutingRecord()
    record.add(3, _figures(1.0, 2.0, 4.0, 8, [2, 2, 2, 2]), copies=1, parts=1)
    record.add(3, _figures(2.0, 4.0, 6.0, 7, [4, 2, 1, 1]), copies=1, parts=1)
    record.add(1, _figures(3.0, 0.0, 2.0, 4, [4, 4, 0, 0]), copies=1, parts=1)
    record.add(1, _figures(1.0, 0.0, 4.0, 5, [4, 2, 2, 0]), copies=1, parts=1)
    found = record.summarise(ParallelContext.single(), 2)
    assert found is not None
    assert found.load_balancing_loss == pytest.approx((1 + 2 + 3 + 1) / 4)
    assert found.z_loss == pytest.approx((2 + 4 + 0 + 0) / 4)
    assert found.drop_rate == pytest.approx(8 / 32)
    assert found.max_load == pytest.approx((8 / 4 + 6 / 4) / 2)
    assert found.router_entropy == pytest.approx(16 / 16)
    assert found.counts.tolist() == [[8, 6, 2, 0], [6, 4, 3, 3]], "layers in order of their number"


def test_clear_forgets_and_an_empty_record_says_so() -> None:
    record = RoutingRecord()
    assert record.summarise(ParallelContext.single(), 2) is None
    record.add(0, _figures(1.0, 0.0, 0.0, 2, [1, 1]), copies=1, parts=1)
    record.clear()
    assert record.summarise(ParallelContext.single(), 2) is None


def test_asking_changes_nothing() -> None:
    record = RoutingRecord()
    record.add(0, _figures(1.0, 0.0, 0.0, 2, [1, 1]), copies=1, parts=1)
    ctx = ParallelContext.single()
    assert str(record.summarise(ctx, 1)) == str(record.summarise(ctx, 1))


def test_each_layer_has_figures_of_its_own() -> None:
    """The layers of `test_means_over_layers_and_micro_batches`, each by hand."""
    record = RoutingRecord()
    record.add(3, _figures(1.0, 2.0, 4.0, 8, [2, 2, 2, 2]), copies=1, parts=1)
    record.add(3, _figures(2.0, 4.0, 6.0, 7, [4, 2, 1, 1]), copies=1, parts=1)
    record.add(1, _figures(3.0, 0.0, 2.0, 4, [4, 4, 0, 0]), copies=1, parts=1)
    found = record.summarise(ParallelContext.single(), 2)
    assert found is not None
    assert [asdict(layer) for layer in found.layers] == [
        pytest.approx(
            {
                "layer": 1,
                "load_balancing_loss": 3.0,
                "z_loss": 0.0,
                "drop_rate": 0.5,
                "max_load": 2.0,
                "router_entropy": 0.5,
            }
        ),
        pytest.approx(
            {
                "layer": 3,
                "load_balancing_loss": 1.5,
                "z_loss": 3.0,
                "drop_rate": 1 / 16,
                "max_load": 1.5,
                "router_entropy": 10 / 8,
            }
        ),
    ]
    assert found.counts_of(3).tolist() == [6, 4, 3, 3]


def test_a_repeated_forward_pass_adds_nothing() -> None:
    """FC-22. Recomputation runs the same micro-batch again; nested pauses end with the outer one."""
    record = RoutingRecord()
    figures = _figures(1.0, 0.0, 0.0, 2, [1, 1])
    record.add(0, figures, copies=1, parts=1)
    with record.paused():
        with record.paused():
            record.add(0, figures, copies=1, parts=1)
        record.add(0, figures, copies=1, parts=1)
    found = record.summarise(ParallelContext.single(), 1)
    assert found is not None and found.counts.tolist() == [[1, 1]]
    record.add(0, figures, copies=1, parts=1)
    again = record.summarise(ParallelContext.single(), 1)
    assert again is not None and again.counts.tolist() == [[2, 2]]


def _over_stages(ctx: ParallelContext) -> RoutingSummary | None:
    """MoE layers 1 and 2 of a model: stage 0 holds the first, stage 1 the second; a third stage may hold none."""
    record = RoutingRecord((1, 2), 2)
    if ctx.pp.rank < 2:
        scale = ctx.pp.rank + 1
        record.add(scale, _figures(1.0 * scale, 0.0, 2.0, 4, [3, 1]), copies=ctx.tp.size, parts=1)
    return record.summarise(ctx, 1)


@pytest.mark.parametrize("layout", [Layout(2, pp=2), Layout(4, pp=2, tp=2), Layout(4, pp=4)], ids=str)
def test_stages_that_hold_other_layers_agree_on_all(pools: Pools, layout: Layout) -> None:
    """FC-28: means over the layers of every stage, whatever the number of stages, one of them without experts."""
    for found in pools.run(layout, _over_stages):
        assert found.load_balancing_loss == pytest.approx(1.5)
        assert [one.layer for one in found.layers] == [1, 2]
        assert found.layers[1].load_balancing_loss == pytest.approx(2.0)
        assert found.counts.tolist() == [[3 * layout.grid.dp, layout.grid.dp]] * 2


def test_it_holds_no_graph() -> None:
    record = RoutingRecord()
    loss = torch.tensor(1.0, requires_grad=True) * 2
    record.add(0, MicroBatchFigures(loss, loss, loss, loss, torch.tensor([1])), copies=1, parts=1)
    assert not record._rows[0].requires_grad


def test_long_sums_lose_no_choice() -> None:
    """2^24 + 1 is no float32: counts of a long interval are kept in float64."""
    record = RoutingRecord()
    for _ in range(3):
        record.add(0, _figures(1.0, 0.0, 0.0, 2**24 + 1, [2**24 + 1, 0]), copies=1, parts=1)
    found = record.summarise(ParallelContext.single(), 1)
    assert found is not None and found.counts[0, 0].item() == 3 * (2**24 + 1) and found.drop_rate == 0


def _over_ranks(ctx: ParallelContext, cut: bool) -> RoutingSummary | None:
    """Each data-parallel rank has its own figures; tp peers hold copies of them or each its part."""
    record = RoutingRecord()
    scale = ctx.dp.rank + 1
    parts = ctx.tp.size if cut else 1
    counts = [6 * scale, 2 * scale]
    mine: list[int] = [count // parts for count in counts]
    record.add(
        0,
        _figures(1.0 * scale / parts, 2.0 * scale / parts, 3.0 * scale / parts, 4 * scale // parts, mine),
        copies=1 if cut else ctx.tp.size,
        parts=parts,
    )
    return record.summarise(ctx, 1)


@pytest.mark.parametrize("cut", [False, True], ids=["copies", "parts"])
@pytest.mark.parametrize("layout", [Layout(2), Layout(2, tp=2), Layout(4, tp=2)], ids=str)
def test_copies_and_parts_over_tp_give_the_same_means(pools: Pools, layout: Layout, cut: bool) -> None:
    """Mean over dp ranks with scales 1 and 2 (one dp rank: scale 1)."""
    scales = [rank + 1 for rank in range(layout.grid.dp)]
    mean = sum(scales) / len(scales)
    for found in pools.run(layout, _over_ranks, cut):
        assert found.load_balancing_loss == pytest.approx(mean)
        assert found.z_loss == pytest.approx(2 * mean)
        assert found.drop_rate == pytest.approx(0.5)
        assert found.max_load == pytest.approx(1.5)
        assert found.router_entropy == pytest.approx(3 / 8)
        assert found.counts.tolist() == [[6 * sum(scales), 2 * sum(scales)]]
        (only,) = found.layers
        assert all(math.isfinite(value) for value in asdict(only).values())
        assert only.load_balancing_loss == found.load_balancing_loss and only.drop_rate == found.drop_rate
