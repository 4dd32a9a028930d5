"""Offsets between the clocks of ranks. References: messages whose times are worked by hand, clocks set apart."""

import time

from megatron_parm.parallel.clocks import bounds, clock_offset, offset_within
from megatron_parm.parallel.context import ParallelContext
from tests.harness.layouts import Layout
from tests.harness.pools import Pools

APART_NS = 3_600 * 10**9


def test_the_narrowest_bounds_of_all_rounds_hold() -> None:
    """The clock is 100 ahead. Round 1: messages take 5 and 9; round 2: 2 there, 30 back."""
    first = [(1000, 1009), (2000, 2030)]
    own = [(1100, 1105), (2100, 2102)]
    assert bounds(first, own) == (1100 - 1009, 2102 - 2000)
    assert bounds(first, first) == (-9, 9)


def test_zero_where_it_may_be_else_the_middle() -> None:
    assert offset_within(-9, 3).offset_ns == 0 and offset_within(-9, 3).uncertainty_ns == 9
    assert (offset_within(91, 102).offset_ns, offset_within(91, 102).uncertainty_ns) == (96, 6)


def _offset(ctx: ParallelContext, apart_ns: int) -> tuple[int, int]:
    found = clock_offset(ctx.world, lambda: time.perf_counter_ns() + ctx.rank * apart_ns, ctx.device)
    return found.offset_ns, found.uncertainty_ns


def test_clocks_set_apart_are_found(pools: Pools) -> None:
    for rank, (offset, uncertainty) in enumerate(pools.run(Layout(4), _offset, APART_NS)):
        assert abs(offset - rank * APART_NS) <= uncertainty < 10**9


def test_ranks_of_one_machine_share_a_clock(pools: Pools) -> None:
    assert [offset for offset, _ in pools.run(Layout(4), _offset, 0)] == [0] * 4
