"""Every schedule on every layout equals one process: output, input gradient, all weight gradients, all figures.

Reference: tests/moe/naive.py, one micro-batch of each data-parallel rank at a time, float64. 1e-10 is far above the
rounding of a few hundred additions of values of order 1 (1e-14) and far below any real fault (1e-2).
"""

from dataclasses import replace

import pytest
import torch

from megatron_parm.moe.schedules import SCHEDULES
from tests.harness.layouts import MOE_LAYOUTS, NODE_LAYOUTS, Layout
from tests.harness.pools import Pools
from tests.moe.layer_run import Case, largest_difference, run_layer

CASES = {
    "nothing dropped": Case(),
    "dropless": Case(factor=None),
    "drops": Case(factor=0.7),
    "drops, padded": Case(factor=0.7, padded=True),
    "padded": Case(padded=True),
    "drops by position": Case(factor=0.6, policy="position", pre_softmax=True, gated=True),
    "odd slots": Case(factor=0.9, batch=4, bias=False),  # 15 slots under s2 do not divide by tp
    "one expert takes all": Case(factor=None, skew=60.0, topk=1, pre_softmax=True),
    "sequence parallel": Case(sequence_parallel=True),
    "sequence parallel, drops": Case(factor=0.7, sequence_parallel=True),
    "padding": Case(padding=6),
    "padding, dropless": Case(factor=None, padding=6),
    "padding, drops": Case(factor=0.5, padding=6, policy="position"),
    "padding, sequence parallel": Case(factor=0.7, padding=6, sequence_parallel=True),
}


def _has_slots_where_needed(layout: Layout, case: str, schedule: str, chunks: int) -> bool:
    if schedule == "deepspeed" and layout.esp not in (1, layout.tp):
        return False
    return schedule not in ("deepspeed", "s2", "s2h") or CASES[case].factor is not None


@pytest.mark.cover(
    layout=MOE_LAYOUTS,
    case=CASES,
    schedule=list(SCHEDULES),
    chunks=[1, 2, 3],
    where=_has_slots_where_needed,
)
def test_equals_one_process(pools: Pools, layout: Layout, case: str, schedule: str, chunks: int) -> None:
    assert largest_difference(pools, layout, CASES[case], schedule, chunks=chunks) < 1e-10


@pytest.mark.cover(layout=NODE_LAYOUTS, case=CASES, schedule=["s1n"], chunks=[1, 2, 3])
def test_equals_one_process_on_several_nodes(
    pools: Pools, layout: Layout, case: str, schedule: str, chunks: int
) -> None:
    assert largest_difference(pools, layout, CASES[case], schedule, chunks=chunks) < 1e-10


@pytest.mark.parametrize("schedule", ["baseline", "s1", "s2"])
def test_float32_is_equal_to_its_rounding(pools: Pools, schedule: str) -> None:
    case = replace(CASES["nothing dropped"], dtype=torch.float32)
    assert largest_difference(pools, Layout(8, tp=2, esp=2, ep=2), case, schedule) < 1e-4


@pytest.mark.parametrize(
    ("fault", "schedule", "layout"),
    [
        ("router not summed", "s1", Layout(4, tp=2, esp=2, ep=2)),
        ("experts by edp", "s1", Layout(4, tp=1, esp=2, ep=2)),
        ("experts by edp", "baseline", Layout(4, ep=2)),
        ("experts over dp", "s2", Layout(4, ep=2)),
        ("padding is text", "s1", Layout(2, tp=2)),
        ("padding by slice", "s1", Layout(2, tp=2)),
        ("padding is text", "baseline", Layout(2, esp=2)),
    ],
)
def test_negative_controls(pools: Pools, fault: str, schedule: str, layout: Layout) -> None:
    """The comparison sees each known fault; no forward test would. FC-21: padding is one of them."""
    case = Case(padding=6) if "padding" in fault else Case()
    assert largest_difference(pools, layout, case, schedule, fault) > 1e-3


def test_s2_needs_a_capacity(pools: Pools) -> None:
    with pytest.raises(AssertionError, match="needs a capacity"):
        largest_difference(pools, Layout(1), CASES["dropless"], "s2")


@pytest.mark.parametrize("layout", [Layout(4, tp=2, esp=2, ep=2), Layout(8, tp=4, esp=4, ep=2)], ids=str)
def test_s2_routes_and_drops_as_the_baseline_bit_for_bit(pools: Pools, layout: Layout) -> None:
    runs = [pools.run(layout, run_layer, CASES["drops"], schedule) for schedule in ("baseline", "s2")]
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first["summary"].counts, second["summary"].counts)
        assert first["summary"].drop_rate == second["summary"].drop_rate > 0
        assert first["summary"].load_balancing_loss == second["summary"].load_balancing_loss
