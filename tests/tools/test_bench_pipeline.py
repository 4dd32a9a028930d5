"""The bubble that tools/bench_pipeline.py reads from a trace. Reference: two ranks' passes drawn by hand."""

import argparse

import pytest

from megatron_parm.observe.trace import Span
from megatron_parm.parallel.context import ParallelContext
from tests.harness.layouts import Layout
from tests.harness.pools import Pools
from tools.bench_pipeline import bubble_of, make_config, measure, parse

# p = 2, m = 2, a pass takes 10 forward and 20 backward: 1F1B takes 90 for 60 of work, (p - 1) / m = 0.5
FIRST = [("forward", 0, 10), ("forward", 10, 20), ("backward", 40, 60), ("backward", 70, 90)]
LAST = [("forward", 10, 20), ("backward", 20, 40), ("forward", 40, 50), ("backward", 50, 70), ("wait", 70, 200)]


def _bubble(ctx: ParallelContext) -> float:
    passes = FIRST if ctx.pp.rank == 0 else LAST
    return bubble_of([Span("compute", name, "compute", start, end) for name, start, end in passes], ctx)


def test_the_bubble_of_a_drawn_step(pools: Pools) -> None:
    assert pools.run(Layout(2, pp=2), _bubble) == [0.5, 0.5]


def _measured(ctx: ParallelContext, flags: argparse.Namespace) -> list[dict[str, object]]:
    return measure(flags, ctx)


def test_real_steps_have_the_rows_of_both_schedules(pools: Pools) -> None:
    words = "--layers 4 --hidden 16 --seq 8 --micro-batches 4 --warmup 0 --iters 1"
    for rows in pools.run(Layout(2, pp=2), _measured, parse(words.split())):
        assert [(row["schedule"], row["virtual_stages"], row["ideal"]) for row in rows] == [
            ("1f1b", 1, 0.25),
            ("interleaved", 2, 0.125),
        ]
        for row in rows:
            assert float(str(row["bubble"])) > 0, "p = 2 cannot be without one"


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="--num-layers 3"):
        make_config(parse(["--layers", "3"]), "1f1b", 1, 2)
