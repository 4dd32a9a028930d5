"""The layout table: every layout and schedule trains as one process does. Reference: one process, run by each worker.

Tolerances are those of the tool: over 3 steps in float64 1e-9, weights 1e-8, gradients 1e-10, which leave room for the
other order of sums only; in bf16 5e-2. The negative controls break one rule of the reduction each, inside the workers,
and must exceed the same limits.
"""

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megatron_parm.config.moe import Schedule
from megatron_parm.grads.buffer import GradientBuffers
from megatron_parm.grads.reduce import SequentialReduction
from megatron_parm.moe import gate
from megatron_parm.moe.schedules import SCHEDULES as ALL_SCHEDULES
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.transport import sum_over_
from megatron_parm.training import updates
from tests.harness import layouts
from tests.harness.pools import Pools
from tools import check_layouts
from tools.check_layouts import LAYOUTS, LIMITS, SCHEDULES, SINGLE_STAGE, SIZES, Layout, can_run, make_config, pairwise


def _place(layout: Layout) -> layouts.Layout:
    return layouts.Layout(layout.world, tp=layout.tp, ep=layout.ep, esp=layout.esp, pp=layout.pp)


PLAIN = SIZES[: len(SINGLE_STAGE)]  # on a single stage
FAULTY = [pytest.param(layout, marks=pytest.mark.full if layout.world > 4 else ()) for layout in PLAIN]
ROWS = [(layout, name) for layout in LAYOUTS for name in SCHEDULES if can_run(name, layout, dropless=False)]
CHOSEN = set(pairwise(ROWS))


# --- what runs in the workers ---


def _row(ctx: ParallelContext, layout: Layout, schedule: Any, dropless: bool) -> dict[str, float]:
    return check_layouts.check(layout, schedule, ctx, dropless=dropless)


def _gradients(
    ctx: ParallelContext, layout: Layout, schedule: Any, dropless: bool, broken: "Callable[[], Any] | None" = None
) -> float:
    """The largest difference of a gradient after one step; `broken` makes the context manager of a fault."""
    wanted = check_layouts.train_alone("fp64", 1, dropless, ctx.device).gradients  # without the fault
    config = make_config(layout, schedule, "fp64", dropless=dropless)
    fault: AbstractContextManager[Any] = nullcontext() if broken is None else broken()
    with fault:
        return check_layouts.gradient_difference(config, ctx, wanted)


def _figures(ctx: ParallelContext, layout: Layout, broken: Callable[[], Any]) -> float:
    """The largest difference of a figure over 3 steps with a fault."""
    alone = check_layouts.train_alone("fp64", 3, False, ctx.device)
    with broken():
        ours = check_layouts.train(make_config(layout, "s1", "fp64", dropless=False), ctx, 3)
    return ours.figures.difference(alone.figures)


def _without_the_router_sum() -> Any:
    return patch.object(gate, "share", lambda weight, axis: weight)


def _reduced_by(rule: Callable[[ParallelContext, str], tuple[Any, int]]) -> Any:
    """Gradient reduction with `rule`: (ctx, role) -> (axis to sum over, divisor)."""

    class Ruled(SequentialReduction):
        def __init__(self, buffers: GradientBuffers, ctx: ParallelContext, *how: Any, **rest: Any) -> None:
            super().__init__(buffers, ctx, *how, **rest)
            self._ctx = ctx

        def finish(self, divisor: float) -> None:
            for buffer in self._buffers.buffers:
                axis, divided_by = rule(self._ctx, buffer.role)
                sum_over_(buffer.data, axis)
                buffer.data.div_(divided_by)

    return patch.object(updates, "SequentialReduction", Ruled)


def _right() -> Any:
    return _reduced_by(lambda ctx, role: (ctx.dp if role == "dense" else ctx.edp, ctx.dp.size))


def _experts_divided_by_edp() -> Any:
    return _reduced_by(lambda ctx, role: (ctx.dp, ctx.dp.size) if role == "dense" else (ctx.edp, ctx.edp.size))


def _experts_summed_over_dp() -> Any:
    return _reduced_by(lambda ctx, role: (ctx.dp, ctx.dp.size))


# --- the table ---


def test_which_rows_there_are() -> None:
    """s2, s2h and deepspeed need a capacity; deepspeed an esp of 1 or tp."""
    dropless = [schedule for schedule in SCHEDULES if can_run(schedule, Layout(1), dropless=True)]
    assert dropless == ["baseline", "s1", "s1h", "s1n"]
    left_out = [(layout, name) for layout in PLAIN for name in SCHEDULES if not can_run(name, layout, dropless=False)]
    assert left_out == [
        (Layout(4, tp=4, esp=2, ep=2), "deepspeed"),
        (Layout(4, tp=1, esp=2, ep=2), "deepspeed"),
    ]
    assert set(SCHEDULES) == set(ALL_SCHEDULES)


@pytest.mark.cover(
    layout=PLAIN, schedule=SCHEDULES, where=lambda layout, schedule: can_run(schedule, layout, dropless=True)
)
def test_gradients_of_every_row_without_capacity(pools: Pools, layout: Layout, schedule: Schedule) -> None:
    """With a capacity they are compared by the whole runs below."""
    assert max(pools.run(_place(layout), _gradients, layout, schedule, True)) <= LIMITS["gradients"]


def test_the_table_has_every_way_and_its_cover_every_pair() -> None:
    """At least 60 layouts; what goes together in any row goes together in a row that runs by default."""
    assert len(set(LAYOUTS)) == len(LAYOUTS) >= 60

    def meets(rows: Any) -> set[Any]:
        values = [(*dataclasses.astuple(layout), schedule) for layout, schedule in rows]
        return {pair for row in values for pair in itertools.combinations(enumerate(row), 2)}

    assert meets(CHOSEN) == meets(ROWS)
    for way in ("stages", "zero_bubble", "sequence_parallel", "zero1", "overlap"):
        assert len({getattr(layout, way) for layout in LAYOUTS}) == 2


@pytest.mark.parametrize(
    ("layout", "schedule"),
    [pytest.param(*row, marks=() if row in CHOSEN else pytest.mark.full) for row in ROWS],
    ids=str,
)
def test_whole_training_of_a_row(pools: Pools, layout: Layout, schedule: str) -> None:
    """lm_loss, load_balancing_loss and grad_norm of every step, gradients of the first and weights after the last."""
    for found in pools.run(_place(layout), _row, layout, schedule, False):
        for title, limit in LIMITS.items():
            assert found[title] <= limit, title


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["s1", "s1h", "s1n", "baseline"])
@pytest.mark.parametrize("layout", SIZES, ids=str)
def test_whole_training_of_a_row_without_capacity(pools: Pools, layout: Layout, schedule: str) -> None:
    for found in pools.run(_place(layout), _row, layout, schedule, True):
        for title, limit in LIMITS.items():
            assert found[title] <= limit, title


# --- negative controls ---


@pytest.mark.parametrize("layout", FAULTY, ids=str)
def test_without_the_routers_sum_over_tp_the_s1_rows_fail(pools: Pools, layout: Layout) -> None:
    """No forward sees it: the loss of the first step is right, the gradient of the router is not."""
    place = _place(layout)
    found = max(pools.run(place, _gradients, layout, "s1", False, _without_the_router_sum))
    assert (found > 1e-3) == (layout.tp > 1)
    assert found <= LIMITS["gradients"] or layout.tp > 1
    assert max(pools.run(place, _gradients, layout, "s2", False, _without_the_router_sum)) <= LIMITS["gradients"]


@pytest.mark.parametrize("layout", FAULTY, ids=str)
def test_dividing_experts_by_edp_fails_where_tp_is_not_ep_esp(pools: Pools, layout: Layout) -> None:
    place = _place(layout)
    found = max(pools.run(place, _gradients, layout, "s1", False, _experts_divided_by_edp))
    assert (found > 1e-3) == (layout.tp != layout.ep * layout.esp)
    assert max(pools.run(place, _gradients, layout, "s1", False, _right)) <= LIMITS["gradients"]


@pytest.mark.parametrize("layout", FAULTY, ids=str)
def test_summing_experts_over_dp_fails_where_its_ranks_are_not_those_of_edp(pools: Pools, layout: Layout) -> None:
    """All ep rows but those whose two axes join the same ranks."""
    place = _place(layout)
    found = max(pools.run(place, _gradients, layout, "s1", False, _experts_summed_over_dp))
    assert (found > 1e-3) == (place.grid.groups("dp") != place.grid.groups("edp"))


@pytest.mark.parametrize(
    ("layout", "fault"),
    [
        (Layout(4, tp=2, esp=2, ep=2), _without_the_router_sum),
        (Layout(4, tp=1, esp=2, ep=2), _experts_divided_by_edp),
        (Layout(2, ep=2), _experts_summed_over_dp),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_figures_of_training_show_each_fault(pools: Pools, layout: Layout, fault: Callable[[], Any]) -> None:
    """Three steps leave the limit of the table, by far: the limit of float32 would see it too."""
    assert min(pools.run(_place(layout), _figures, layout, fault)) > 1e-5


# --- the tool ---


def test_the_tool_prints_and_stores_its_rows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    assert check_layouts.main(["--schedules", "s1", "--dropless", "--json", str(file)]) == 0
    title, row = capsys.readouterr().out.splitlines()
    assert all(name in title for name in ("layout", "schedule", *LIMITS))
    assert re.fullmatch(r"world 1: tp 1, ep 1, esp 1 +s1( +0.0e\+00){4}", row)
    (stored,) = json.loads(file.read_text())
    assert stored["schedule"] == "s1" and stored["gradients"] == 0.0


def test_a_row_beyond_its_limit_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    with patch.object(check_layouts, "check", lambda *_, **__: {title: 2 * limit for title, limit in LIMITS.items()}):
        assert check_layouts.main(["--schedules", "baseline"]) == 1


def test_a_figure_that_is_not_a_number_is_beyond_every_limit() -> None:
    right = check_layouts.Figures(((1.0, 1.0, 1.0),) * 2)
    for wrong in (((1.0, 1.0, 1.0), (1.0, 1.0, math.nan)), ((1.0, math.nan, 1.0), (1.0, 1.0, 1.0))):
        assert check_layouts.Figures(wrong).difference(right) == math.inf
    assert right.difference(right) == 0.0
