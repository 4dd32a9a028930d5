"""The pools report every way in which a call can fail, and work again afterwards."""

import os
import time
from collections.abc import Iterator
from dataclasses import asdict

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.grid import AXES
from megatron_parm.parallel.sharding import make_parameter
from tests.harness.layouts import MOE_LAYOUTS, Layout
from tests.harness.pools import Pool, Pools, WorkerError


@pytest.fixture(scope="module")
def hasty() -> Iterator[Pool]:
    """A pool of 2 with short limits, for calls that hang."""
    pool = Pool(2, group_timeout_s=4, call_limit_s=5)
    yield pool
    pool.kill()


def _sum_of_ranks(ctx: ParallelContext, factor: int) -> Tensor:
    total = torch.tensor([ctx.rank * factor])
    if ctx.world.size > 1:
        dist.all_reduce(total, group=ctx.world.group)
    return total


def _axes(ctx: ParallelContext) -> dict[str, tuple[int, int, tuple[int, ...]]]:
    for name in AXES:
        axis = ctx.axis(name)
        assert (axis.group is None) == (axis.size == 1)
        if axis.group is not None:
            ranks = torch.empty(axis.size, dtype=torch.int64)
            dist.all_gather(list(ranks.chunk(axis.size)), torch.tensor([ctx.rank]), group=axis.group)
            assert tuple(ranks.tolist()) == axis.ranks
    return {name: (ctx.axis(name).size, ctx.axis(name).rank, ctx.axis(name).ranks) for name in AXES}


def _process_id(ctx: ParallelContext) -> int:
    return os.getpid()


def _raise_on_rank_1(ctx: ParallelContext) -> None:
    if ctx.rank == 1:
        raise LookupError("the reason")
    dist.barrier(group=ctx.world.group)


def _die_on_rank_1(ctx: ParallelContext) -> None:
    if ctx.rank == 1:
        os.write(2, b"last words")
        os._exit(9)
    dist.barrier(group=ctx.world.group)


def _sleep(ctx: ParallelContext, seconds: float) -> None:
    time.sleep(seconds)


def _one_skips_a_collective(ctx: ParallelContext) -> None:
    if ctx.rank == 0:
        dist.barrier(group=ctx.world.group)


def _mixed_values(ctx: ParallelContext, given: Tensor) -> dict[str, object]:
    parameter = make_parameter((4, 3), dtype=torch.bfloat16, device=ctx.device)
    return {
        "transposed": given.t(),
        "parameter": parameter,
        "scalar": torch.tensor(True),
        "empty": torch.empty(0, 3),
        "text": str(ctx.rank),
    }


def _first_random(ctx: ParallelContext) -> float:
    return torch.rand(()).item()


@pytest.mark.parametrize("layout", MOE_LAYOUTS, ids=str)
def test_results_come_in_rank_order_and_groups_hold_the_grid(pools: Pools, layout: Layout) -> None:
    """Reference: RankGrid."""
    assert pools.run(layout, _sum_of_ranks, 3)[0].tolist() == [3 * sum(range(layout.world))]
    grid = layout.grid
    for rank, axes in enumerate(pools.run(layout, _axes)):
        for name, found in axes.items():
            assert found == (grid.size(name), grid.coordinate(name, rank), grid.group_of(name, rank))


def test_workers_live_from_call_to_call(pools: Pools) -> None:
    assert pools[4].run(_process_id) == pools.run(Layout(4, tp=2), _process_id)


def test_every_call_starts_from_the_same_random_state(pools: Pools) -> None:
    values = {
        value for layout in (Layout(1), Layout(2)) for _ in range(2) for value in pools.run(layout, _first_random)
    }
    assert len(values) == 1


@pytest.mark.parametrize("layout", [Layout(1), Layout(2)], ids=str)
def test_tensors_travel_by_value(pools: Pools, layout: Layout) -> None:
    given = torch.arange(6.0).reshape(2, 3)
    results = pools.run(layout, _mixed_values, given)
    for rank, result in enumerate(results):
        assert torch.equal(result["transposed"], given.t()) and result["transposed"].is_contiguous()
        assert result["parameter"].dtype == torch.bfloat16 and type(result["parameter"]) is Tensor
        assert result["scalar"].dtype == torch.bool and result["scalar"].shape == ()
        assert result["empty"].shape == (0, 3)
        assert result["text"] == str(rank)
    results[0]["transposed"].zero_()
    assert given.sum() == 15


def test_an_exception_names_rank_and_traceback_and_the_pool_recovers(hasty: Pool) -> None:
    hasty.run(_process_id)  # starts it
    begin = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        hasty.run(_raise_on_rank_1)
    assert time.monotonic() - begin < hasty.group_timeout_s, "one rank's error must not wait for the other's time-out"
    assert "LookupError: the reason" in caught.value.failures[1]
    assert "_raise_on_rank_1 on w2" in str(caught.value) and "rank 1" in str(caught.value)
    assert hasty.run(_sum_of_ranks, 1)[1].tolist() == [1]


def test_a_death_is_a_result(hasty: Pool) -> None:
    with pytest.raises(WorkerError) as caught:
        hasty.run(_die_on_rank_1)
    assert "exit code 9" in caught.value.failures[1] and "last words" in caught.value.failures[1]
    assert hasty.run(_sum_of_ranks, 1)[0].tolist() == [1]


def test_a_hang_ends_at_the_wall_clock_limit(hasty: Pool) -> None:
    with pytest.raises(WorkerError) as caught:
        hasty.run(_sleep, 60)
    assert set(caught.value.failures) == {0, 1}
    assert "no answer within 5 s" in caught.value.failures[0]


def test_a_collective_that_a_rank_skips_ends_at_the_group_timeout(hasty: Pool) -> None:
    with pytest.raises(WorkerError) as caught:
        hasty.run(_one_skips_a_collective)
    assert set(caught.value.failures) == {0}


def test_a_worker_that_dies_between_calls_is_replaced(hasty: Pool) -> None:
    before = hasty.run(_process_id)
    hasty._processes[0].kill()
    hasty._processes[0].join()
    with pytest.raises(WorkerError) as caught:
        hasty.run(_sum_of_ranks, 1)
    assert "the worker died, exit code -9" in caught.value.failures[0]
    assert set(hasty.run(_process_id)).isdisjoint(before)


def test_a_layout_of_another_size_is_refused(pools: Pools) -> None:
    with pytest.raises(ValueError, match="4 ranks"):
        pools[4].run_layout(Layout(2), _process_id)


def test_layouts_are_values() -> None:
    assert asdict(Layout(4, tp=2)) == {"world": 4, "tp": 2, "ep": 1, "esp": 1, "pp": 1, "nodes": 1}
    assert str(Layout(8, tp=2, esp=4)) == "w8-tp2-esp4"
