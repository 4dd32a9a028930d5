"""Each step of the schedules by value. Reference: numbers that carry their origin, so every place can be foretold.

A row is the number 1000 * sender + 100 * expert + slot; what arrives where is written out from the sizes of the axes.
Adjoints of the operators inside are tested in tests/parallel/test_collectives.py, and of the schedules as a whole in
test_schedules.py.
"""

import pytest
import torch
from torch import Tensor

from megatron_parm.moe import steps
from megatron_parm.moe.buckets import Ragged
from megatron_parm.parallel import transport
from megatron_parm.parallel.context import ParallelContext
from tests.harness.layouts import Layout
from tests.harness.pools import Pools

EXPERTS, SLOTS, HIDDEN = 4, 3, 2
LAYOUTS = [
    Layout(1),
    Layout(2, ep=2),
    Layout(2, esp=2),
    Layout(4, ep=2, esp=2),
    Layout(4, tp=2, ep=4),
    Layout(8, ep=4, esp=2),
]


def number(sender: int, expert: int, slot: int) -> int:
    return 1000 * sender + 100 * expert + slot


def rows_of(sender: int, counts: list[int]) -> list[int]:
    """The rows of a sender sorted by expert."""
    return [number(sender, e, slot) for e, count in enumerate(counts) for slot in range(count)]


def as_rows(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64).unsqueeze(1).expand(-1, HIDDEN).contiguous()


def numbers_of(rows: Tensor) -> list[int]:
    assert torch.equal(rows, rows[..., :1].expand_as(rows))
    return rows[..., 0].flatten().long().tolist()


def counts_of(sender: int) -> list[int]:
    """Of a sender, uneven: some pairs of sender and expert are empty, expert 1 gets nothing from anyone."""
    return [(sender + expert) % 3 if expert != 1 else 0 for expert in range(EXPERTS)]


def dense_of(sender: int) -> Tensor:
    return as_rows(rows_of(sender, [SLOTS] * EXPERTS)).view(EXPERTS, SLOTS, HIDDEN)


def ragged_of(sender: int) -> Ragged:
    counts = counts_of(sender)
    return Ragged(as_rows(rows_of(sender, counts)), (tuple(counts),))


def _dense(ctx: ParallelContext) -> None:
    mine = dense_of(ctx.rank)
    local = EXPERTS // ctx.ep.size
    first = ctx.ep.rank * local  # the experts that this rank holds
    inbox = steps.ep_all_to_all(mine, ctx)
    assert isinstance(inbox, Tensor) and inbox.shape == (ctx.ep.size, local, SLOTS, HIDDEN)
    assert numbers_of(inbox) == [
        number(sender, e, slot) for sender in ctx.ep.ranks for e in range(first, first + local) for slot in range(SLOTS)
    ]
    back = steps.ep_all_to_all(inbox, ctx)
    assert isinstance(back, Tensor) and torch.equal(back, mine)

    outbox = steps.esp_replicate(mine, ctx)
    assert isinstance(outbox, Tensor) and outbox.shape == (ctx.ep_esp.size, local, SLOTS, HIDDEN)
    blocks = mine.view(ctx.ep.size, local, SLOTS, HIDDEN)
    assert torch.equal(outbox, torch.stack([blocks[peer // ctx.esp.size] for peer in range(ctx.ep_esp.size)]))
    inbox = steps.ep_esp_all_to_all(outbox, ctx)
    assert isinstance(inbox, Tensor)
    assert numbers_of(inbox) == [
        number(sender, e, slot)
        for sender in ctx.ep_esp.ranks
        for e in range(first, first + local)
        for slot in range(SLOTS)
    ]
    returned = steps.ep_esp_all_to_all(inbox, ctx)
    assert isinstance(returned, Tensor) and torch.equal(returned, outbox)
    summed = steps.esp_sum(returned, ctx)
    assert isinstance(summed, Tensor) and torch.equal(summed, ctx.esp.size * mine)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_equal_slots(pools: Pools, layout: Layout) -> None:
    pools.run(layout, _dense)


def _check_arrived(inbox: Ragged, senders: tuple[int, ...], first: int, local: int) -> None:
    held = range(first, first + local)
    assert inbox.counts == tuple(tuple(counts_of(sender)[e] for e in held) for sender in senders)
    assert numbers_of(inbox.rows) == [
        number(sender, e, slot) for sender in senders for e in held for slot in range(counts_of(sender)[e])
    ]


def _ragged(ctx: ParallelContext) -> None:
    mine = ragged_of(ctx.rank)
    local = EXPERTS // ctx.ep.size
    first = ctx.ep.rank * local
    inbox = steps.ep_all_to_all(mine, ctx)
    assert isinstance(inbox, Ragged)
    _check_arrived(inbox, ctx.ep.ranks, first, local)
    back = steps.ep_all_to_all(inbox, ctx)
    assert isinstance(back, Ragged) and torch.equal(back.rows, mine.rows)

    outbox = steps.esp_replicate(mine, ctx)
    assert isinstance(outbox, Ragged) and len(outbox.counts) == ctx.ep_esp.size
    inbox = steps.ep_esp_all_to_all(outbox, ctx)
    assert isinstance(inbox, Ragged)
    _check_arrived(inbox, ctx.ep_esp.ranks, first, local)
    returned = steps.ep_esp_all_to_all(inbox, ctx)
    assert isinstance(returned, Ragged) and returned.counts == outbox.counts
    assert torch.equal(returned.rows, outbox.rows)
    summed = steps.esp_sum(returned, ctx)
    assert isinstance(summed, Ragged) and summed.counts == mine.counts
    assert torch.equal(summed.rows, ctx.esp.size * mine.rows)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_uneven_rows_with_empty_parts(pools: Pools, layout: Layout) -> None:
    """FC-41: parts of size zero, on a CPU back end."""
    pools.run(layout, _ragged)


def _nothing_at_all(ctx: ParallelContext) -> None:
    """Rank 0 alone has rows, all for expert 0; a micro-batch as skewed as can be."""
    counts = (5 if ctx.rank == 0 else 0, 0, 0, 0)
    mine = Ragged(as_rows(rows_of(ctx.rank, list(counts))).requires_grad_(), (counts,))
    inbox = steps.ep_esp_all_to_all(steps.esp_replicate(mine, ctx), ctx)
    assert isinstance(inbox, Ragged)
    assert inbox.rows.shape == (5 if ctx.ep.rank == 0 else 0, HIDDEN)
    summed = steps.esp_sum(steps.ep_esp_all_to_all(inbox, ctx), ctx)
    assert isinstance(summed, Ragged)
    summed.rows.sum().backward()
    assert mine.rows.grad is not None
    assert torch.equal(mine.rows.grad, torch.full_like(mine.rows, ctx.esp.size))


@pytest.mark.parametrize("layout", [Layout(2, ep=2), Layout(4, ep=2, esp=2)], ids=str)
def test_ranks_without_rows_take_part(pools: Pools, layout: Layout) -> None:
    pools.run(layout, _nothing_at_all)


def _tokens(ctx: ParallelContext) -> None:
    tokens = torch.arange(8.0).view(4, 2) + 100 * ctx.dp.rank  # identical on tp peers
    shard = steps.mp_split(tokens, ctx)
    assert torch.equal(shard, tokens.chunk(ctx.tp.size)[ctx.tp.rank])
    assert torch.equal(steps.mp_all_gather(shard, ctx), tokens)
    slots = dense_of(ctx.dp.rank)[:, : SLOTS // ctx.tp.size * ctx.tp.size]
    shard = steps.mp_split(slots, ctx, dim=1)
    assert torch.equal(shard, slots.chunk(ctx.tp.size, 1)[ctx.tp.rank])
    assert torch.equal(steps.mp_all_gather(shard, ctx, dim=1), slots)
    own = torch.full((2, 2), float(ctx.rank))
    assert steps.esp_all_gather(own, ctx)[:, 0].tolist() == [float(r) for r in ctx.esp.ranks for _ in range(2)]
    partial = dense_of(ctx.rank)
    summed = steps.esp_all_reduce(partial, ctx)
    assert isinstance(summed, Tensor) and torch.equal(summed, sum(dense_of(r) for r in ctx.esp.ranks))
    ragged = steps.esp_all_reduce(Ragged(as_rows([ctx.rank]), ((1, 0, 0, 0),), home=((1, 0, 0, 0),)), ctx)
    assert isinstance(ragged, Ragged) and ragged.home == ((1, 0, 0, 0),)
    assert numbers_of(ragged.rows) == [sum(ctx.esp.ranks)]
    transport.barrier(ctx.world)


@pytest.mark.parametrize(
    "layout", [Layout(1), Layout(2, tp=2), Layout(4, tp=2, esp=2), Layout(4, tp=2, esp=4)], ids=str
)
def test_steps_over_mp_and_esp(pools: Pools, layout: Layout) -> None:
    pools.run(layout, _tokens)
