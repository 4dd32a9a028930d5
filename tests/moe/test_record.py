"""The record. Reference: means and rates worked out by hand from the figures given."""

import math
from dataclasses import asdict

import pytest
import torch
from torch import Tensor

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
        assert all(math.isfinite(v) for v in asdict(found).values() if not isinstance(v, Tensor))
