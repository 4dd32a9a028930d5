"""What a trace tells of an MoE layer. References: the same layer untraced, bit for bit; the closed forms of cost.py."""

from collections import Counter
from typing import Any

import pytest
import torch

from megatron_parm.moe.cost import LayerShape, plan
from megatron_parm.observe.trace import COMPUTE, Recording, Span
from megatron_parm.parallel.context import ParallelContext
from tests.harness.layouts import MOE_LAYOUTS, Layout
from tests.harness.pools import Pools
from tests.moe.layer_run import Case, run_layer

STAGES = ("gate", "dispatch", "experts", "combine")
LAYOUTS = [layout for layout in MOE_LAYOUTS if layout.world in (1, 4)]
ALL = ["baseline", "deepspeed", "s1", "s2", "s1h", "s2h", "s1n"]


def _traced_run(ctx: ParallelContext, case: Case, schedule: str, chunks: int) -> dict[str, Any]:
    plain = run_layer(ctx, case, schedule, chunks=chunks)
    trace = Recording()
    trace.start()
    traced = run_layer(ctx.traced(trace), case, schedule, chunks=chunks)
    return {"plain": plain, "traced": traced, "spans": trace.spans}


def _can_run(schedule: str, layout: Layout) -> bool:
    return schedule != "deepspeed" or layout.esp in (1, layout.tp)


@pytest.mark.cover(
    layout=LAYOUTS,
    schedule=ALL,
    chunks=[1, 2],
    padded=[True, False],
    where=lambda layout, schedule, chunks, padded: _can_run(schedule, layout),
)
def test_every_stage_is_told_and_nothing_changes(
    pools: Pools, layout: Layout, schedule: str, chunks: int, padded: bool
) -> None:
    case = Case(padded=padded)
    for found in pools.run(layout, _traced_run, case, schedule, chunks):
        plain, traced, spans = found["plain"], found["traced"], found["spans"]
        for name in ("output", "input_gradient"):
            assert torch.equal(plain[name], traced[name])
        for name, gradient in plain["gradients"].items():
            assert torch.equal(gradient, traced["gradients"][name]), name
        seen = Counter(span.name for span in spans if span.lane == COMPUTE and span.kind == "compute")
        for stage in STAGES:
            times = chunks if stage == "experts" else 1
            assert (seen[stage], seen[f"{stage} backward"]) == (times, times), stage
        assert seen["MoE layer"] == 1
        assert all(span.start_ns <= span.end_ns for span in spans)
        _check_that_blocks_nest([span for span in spans if span.lane == COMPUTE])


def _check_that_blocks_nest(spans: list[Span]) -> None:
    """Two spans of the compute lane either follow each other or one holds the other: one thread did them."""
    for one in spans:
        for other in spans:
            assert not one.start_ns < other.start_ns < one.end_ns < other.end_ns, (one.name, other.name)


@pytest.mark.cover(
    layout=[layout for layout in LAYOUTS if layout.world > 1],
    schedule=[name for name in ALL if name != "s1n"],  # it never pads
    chunks=[1, 2],
    where=lambda layout, schedule, chunks: _can_run(schedule, layout),
)
def test_collectives_carry_the_bytes_of_the_closed_forms(
    pools: Pools, layout: Layout, schedule: str, chunks: int
) -> None:
    """Padded buckets, whose slots divide by every chunk; forward and backward move as much."""
    case = Case(padded=True, bias=False)
    tokens = case.sequence * case.batch
    assert case.factor is not None
    sizes = LayerShape(tokens, 8, 8, 8, 2, case.factor, 1, True, True, 2, 8, layout.tp, layout.ep, layout.esp)
    stages = plan(schedule, sizes)
    wanted: Counter[str] = Counter()
    for stage in (*stages.once, *stages.chunked):
        if stage.operation != "experts":
            wanted[_family(stage.operation, stage.axis)] += round(2 * stage.amount)
    for found in pools.run(layout, _traced_run, case, schedule, chunks):
        seen: Counter[str] = Counter()
        for span in found["spans"]:
            family = _family(span.name, span.lane)
            if span.kind == "collective" and family in wanted:
                assert span.about["ranks"] == getattr(layout.grid, span.lane, layout.ep * layout.esp)
                seen[family] += int(span.about["bytes"])
        assert seen == wanted


def _family(operation: str, axis: str) -> str:
    """A gather's adjoint may be a scatter."""
    return f"{operation.replace('reduce_scatter', 'all_gather')}/{axis}"
