"""Every option of the router and the shared expert under every schedule equals one process.

Reference: tests/moe/naive.py, float64, outputs, every gradient and figure; the tolerance is that of test_schedules.py.
"""

from dataclasses import replace

import pytest

from megatron_parm.moe.schedules import SCHEDULES
from tests.harness.layouts import MOE_LAYOUTS, Layout
from tests.harness.pools import Pools
from tests.moe.layer_run import Case, largest_difference
from tests.moe.naive import NaiveRouter

BIAS = (0.3, -0.2, 0.0, 0.25, -0.3, 0.1, 0.0, -0.1)
CASES = {
    "sequence-wise loss": Case(router=NaiveRouter(balancing="seq_aux_loss")),
    "sequence-wise loss, slices across sequences": Case(
        sequence=6, batch=4, router=NaiveRouter(balancing="seq_aux_loss")
    ),
    "sinkhorn": Case(factor=4.0, router=NaiveRouter(balancing="sinkhorn")),
    "sinkhorn, top-1": Case(factor=8.0, topk=1, router=NaiveRouter(balancing="sinkhorn")),
    "no balancing": Case(router=NaiveRouter(balancing="none")),
    "sigmoid": Case(router=NaiveRouter(score="sigmoid")),
    "sigmoid, top-1": Case(factor=8.0, topk=1, router=NaiveRouter(score="sigmoid")),
    "bias": Case(router=NaiveRouter(score="sigmoid", bias=BIAS, scaling=2.5)),
    "bias, sequence-wise loss, drops": Case(
        factor=0.9, router=NaiveRouter(score="sigmoid", bias=BIAS, balancing="seq_aux_loss")
    ),
    "groups": Case(router=NaiveRouter(groups=(4, 2))),
    "groups of sigmoid scores with a bias": Case(router=NaiveRouter(score="sigmoid", groups=(4, 1), bias=BIAS)),
    "groups before softmax, scaled": Case(pre_softmax=True, router=NaiveRouter(groups=(2, 1), scaling=0.5)),
    "jitter": Case(jitter=0.3),
    "forced balance": Case(factor=1.0, router=NaiveRouter(forced=True)),
    "forced balance, top-3": Case(factor=None, topk=3, router=NaiveRouter(forced=True)),
    "shared expert": Case(shared=8),
    "shared expert, gated": Case(shared=16, shared_gate=True, gated=True, bias=False),
    "shared expert, sequence parallel": Case(shared=8, shared_gate=True, sequence_parallel=True),
    "padding, sequence-wise loss": Case(padding=6, router=NaiveRouter(balancing="seq_aux_loss")),
    "padding, sinkhorn": Case(factor=2.0, padding=6, router=NaiveRouter(balancing="sinkhorn")),
    "padding, groups": Case(padding=6, router=NaiveRouter(groups=(4, 1))),
    "sequence-wise loss, sequence parallel": Case(
        router=NaiveRouter(balancing="seq_aux_loss"), sequence_parallel=True, jitter=0.1
    ),
}


def _runs(layout: Layout, case: str, schedule: str) -> bool:
    """Slots where they are needed; with drops the capacity of s1 is counted by slice, as `slices` of the reference."""
    if schedule == "deepspeed" and layout.esp not in (1, layout.tp):
        return False
    return schedule not in ("deepspeed", "s2", "s2h") or CASES[case].factor is not None


# one of each kind up to four ranks: that any layout goes with any schedule is the matter of test_schedules.py
LAYOUTS = [
    layout
    for layout in MOE_LAYOUTS
    if layout.world in (1, 8) or layout in (Layout(2, tp=2), Layout(2, ep=2), Layout(4, tp=2, ep=2, esp=2))
]


@pytest.mark.cover(layout=LAYOUTS, case=CASES, schedule=sorted(SCHEDULES), where=_runs)
def test_equals_one_process(pools: Pools, layout: Layout, case: str, schedule: str) -> None:
    assert largest_difference(pools, layout, CASES[case], schedule, chunks=1) < 1e-10


@pytest.mark.parametrize(
    ("fault", "case", "schedule", "layout"),
    [
        ("sequences not summed", "sequence-wise loss", "s1", Layout(2, tp=2)),
        ("sequences cut at 0", "sequence-wise loss, slices across sequences", "s1", Layout(4, tp=4)),
        ("own jitter", "jitter", "s2", Layout(4, tp=2, ep=2)),
        ("own sinkhorn", "sinkhorn", "s1", Layout(2, tp=2)),
        ("slices not summed", "shared expert, sequence parallel", "s1", Layout(2, tp=2)),
    ],
)
def test_negative_controls(pools: Pools, fault: str, case: str, schedule: str, layout: Layout) -> None:
    """The comparison sees each fault put in on purpose."""
    assert largest_difference(pools, layout, CASES[case], schedule, fault) > 1e-3


@pytest.mark.parametrize("option", ["score", "groups", "bias", "scaling", "balancing", "forced"])
def test_every_option_changes_the_result(pools: Pools, option: str) -> None:
    """Negative control of the table: with the option left out of the reference the comparison fails."""
    router = NaiveRouter(
        score="sigmoid", groups=(4, 1), bias=BIAS, scaling=2.0, balancing="seq_aux_loss", forced=option == "forced"
    )
    case = Case(router=router)
    assert largest_difference(pools, Layout(1), case, "s1") < 1e-10
    plain = NaiveRouter()
    other = replace(router, **{option: getattr(plain, option)})
    assert largest_difference(pools, Layout(1), case, "s1", other=replace(case, router=other)) > 1e-3
