"""Each step of the schedules by value. Reference: numbers that carry their origin, so every place can be foretold.

A row is the number 1000 * sender + 100 * expert + slot; what arrives where is written out from the sizes of the axes.
Backward is judged by the definition of an adjoint, <step(x), y> = <x, gradient> summed over the ranks.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_parm.moe import steps
from megatron_parm.moe.buckets import Buckets, Packed, announce
from megatron_parm.parallel import transport
from megatron_parm.parallel.context import Axis, ParallelContext
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


def uneven(sender: int) -> list[int]:
    """Of a sender: some pairs of sender and expert are empty, expert 1 gets nothing from anyone."""
    return [(sender + expert) % 3 if expert != 1 else 0 for expert in range(EXPERTS)]


def from_rank_0_alone(sender: int) -> list[int]:
    """All for expert 0; a micro-batch as skewed as can be."""
    return [5 if sender == 0 else 0, 0, 0, 0]


def none_at_all(sender: int) -> list[int]:
    return [0] * EXPERTS


COUNTS = [uneven, from_rank_0_alone, none_at_all]
CountsOf = Callable[[int], list[int]]


def even(sender: int) -> list[int]:
    """What padded buckets hold."""
    return [SLOTS] * EXPERTS


def padded_of(sender: int) -> Tensor:
    return as_rows(rows_of(sender, even(sender))).view(EXPERTS, SLOTS, HIDDEN)


def buckets_of(sender: int, counts_of: CountsOf, axis: Axis) -> Buckets:
    """Padded for `even`, else packed and announced over `axis`."""
    if counts_of is even:
        return padded_of(sender)
    counts = counts_of(sender)
    (told,) = announce([Packed(as_rows(rows_of(sender, counts)), (tuple(counts),))], axis)
    return told


def content(part: Buckets) -> Tensor:
    return part.rows if isinstance(part, Packed) else part


def times(part: Buckets, factor: float) -> Buckets:
    return replace(part, rows=part.rows * factor) if isinstance(part, Packed) else part * factor


def check(part: Buckets, senders: Iterable[int], experts: Iterable[int], counts_of: CountsOf) -> None:
    """`part` holds the rows of each sender, in this order, for each of `experts`."""
    senders, experts = list(senders), list(experts)
    assert numbers_of(content(part)) == [
        number(sender, e, slot) for sender in senders for e in experts for slot in range(counts_of(sender)[e])
    ]
    if isinstance(part, Packed):
        assert part.counts == tuple(tuple(counts_of(sender)[e] for e in experts) for sender in senders)
        assert part.splits == [sum(block) for block in part.counts]
    else:
        assert part.shape == (len(senders), len(experts), SLOTS, HIDDEN)


def check_same(part: Buckets, wanted: Buckets) -> None:
    assert torch.equal(content(part), content(wanted))
    assert not isinstance(part, Packed) or (isinstance(wanted, Packed) and part.counts == wanted.counts)


def _there_and_back(ctx: ParallelContext, counts_of: CountsOf) -> None:
    local = EXPERTS // ctx.ep.size
    held = range(ctx.ep.rank * local, (ctx.ep.rank + 1) * local)  # the experts of this rank
    esp_parts = sum(range(1, ctx.esp.size + 1))

    for announced_over in (ctx.ep, ctx.ep_esp):  # as the baseline, as s1h
        mine = buckets_of(ctx.rank, counts_of, announced_over)
        inbox = steps.arrived(steps.ep_send(mine, ctx))
        check(inbox, ctx.ep.ranks, held, counts_of)
        check_same(steps.arrived(steps.ep_return(inbox, ctx)), mine)

    spread = steps.arrived(steps.esp_spread(inbox, ctx))
    fused = ctx.ep_esp.ranks  # esp fastest
    by_place = [fused[peer * ctx.esp.size + place] for place in range(ctx.esp.size) for peer in range(ctx.ep.size)]
    check(spread, by_place, held, counts_of)
    summed = steps.arrived(steps.esp_collect(times(spread, 1 + ctx.esp.rank), ctx))
    check_same(summed, times(inbox, esp_parts))

    outbox = steps.esp_replicate(mine, ctx)
    if isinstance(mine, Tensor) and isinstance(outbox, Tensor):
        blocks = mine.view(ctx.ep.size, local, SLOTS, HIDDEN)
        assert torch.equal(outbox, torch.stack([blocks[peer // ctx.esp.size] for peer in range(ctx.ep_esp.size)]))
    inbox = steps.arrived(steps.ep_esp_send(outbox, ctx))
    check(inbox, ctx.ep_esp.ranks, held, counts_of)
    returned = steps.arrived(steps.ep_esp_return(inbox, ctx))
    check_same(returned, outbox)
    partial = steps.arrived(steps.ep_esp_return(times(inbox, 1 + ctx.esp.rank), ctx))
    check_same(steps.esp_sum(partial, ctx), times(mine, esp_parts))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_padded_buckets_there_and_back(pools: Pools, layout: Layout) -> None:
    pools.run(layout, _there_and_back, even)


@pytest.mark.parametrize("counts_of", COUNTS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_packed_buckets_with_empty_parts_there_and_back(pools: Pools, layout: Layout, counts_of: CountsOf) -> None:
    """FC-41: parts of size zero, on a CPU back end."""
    pools.run(layout, _there_and_back, counts_of)


def _esp_reduce(ctx: ParallelContext, counts_of: CountsOf) -> None:
    """On esp peers that hold parts of the same rows."""
    first = ctx.esp.ranks[0]
    whole = buckets_of(first, counts_of, Axis.single("ep"))
    summed = steps.arrived(steps.esp_reduce(times(whole, 1 + ctx.esp.rank), ctx))
    check_same(summed, times(whole, sum(range(1, ctx.esp.size + 1))))
    if isinstance(summed, Packed) and isinstance(whole, Packed):
        assert summed.loads == whole.loads


@pytest.mark.parametrize("counts_of", [even, *COUNTS])
@pytest.mark.parametrize("layout", [Layout(1), Layout(2, esp=2), Layout(4, tp=2, esp=4)], ids=str)
def test_esp_reduce(pools: Pools, layout: Layout, counts_of: CountsOf) -> None:
    pools.run(layout, _esp_reduce, counts_of)


def _chain(part: Buckets, ctx: ParallelContext, way: str) -> Buckets:
    """Through every step, the shards of esp weighted differently so that none can stand for another."""
    shard = 1.0 + ctx.esp.rank
    if way == "ep":
        spread = steps.arrived(steps.esp_spread(steps.arrived(steps.ep_send(part, ctx)), ctx))
        summed = steps.arrived(steps.esp_collect(times(spread, shard), ctx))
        return steps.arrived(steps.ep_return(summed, ctx))
    inbox = steps.arrived(steps.ep_esp_send(steps.esp_replicate(part, ctx), ctx))
    return steps.esp_sum(steps.arrived(steps.ep_esp_return(times(inbox, shard), ctx)), ctx)


def _random_like(x: Tensor, seed: int) -> Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=x.dtype)


def _adjoint(ctx: ParallelContext, counts_of: CountsOf, way: str) -> tuple[float, float]:
    part = buckets_of(ctx.rank, counts_of, ctx.ep_esp)
    x = _random_like(content(part), ctx.rank).requires_grad_()
    moved = replace(part, rows=x) if isinstance(part, Packed) else x
    output = content(_chain(moved, ctx, way))
    y = _random_like(output, 100 + ctx.rank)
    output.backward(y)
    assert x.grad is not None and x.grad.shape == x.shape
    torch.testing.assert_close(output, sum(range(1, ctx.esp.size + 1)) * x, rtol=1e-14, atol=1e-14)
    both = torch.stack([(output.detach() * y).sum(), (x.detach() * x.grad).sum()])
    found = transport.sum_over(both, ctx.world)
    return found[0].item(), found[1].item()


@pytest.mark.cover(layout=LAYOUTS, counts_of=[even, *COUNTS], way=["ep", "ep_esp"])
def test_backward_is_the_adjoint(pools: Pools, layout: Layout, counts_of: CountsOf, way: str) -> None:
    """Ranks without a row take part in both directions."""
    for forward, backward in pools.run(layout, _adjoint, counts_of, way):
        assert forward == pytest.approx(backward, rel=1e-13, abs=1e-13)
        assert forward or counts_of is none_at_all


def _tokens(ctx: ParallelContext) -> None:
    tokens = torch.arange(8.0).view(4, 2) + 100 * ctx.dp.rank  # identical on tp peers
    shard = steps.mp_split(tokens, ctx)
    assert torch.equal(shard, tokens.chunk(ctx.tp.size)[ctx.tp.rank])
    assert torch.equal(steps.mp_all_gather(shard, ctx), tokens)
    slots = padded_of(ctx.dp.rank)[:, : SLOTS // ctx.tp.size * ctx.tp.size].contiguous()
    for cut in (steps.mp_split(slots, ctx, dim=1), steps.arrived(steps.mp_slice(slots, ctx))):
        assert isinstance(cut, Tensor)
        assert torch.equal(cut, slots.chunk(ctx.tp.size, 1)[ctx.tp.rank])
        for joined in (steps.mp_all_gather(cut, ctx, dim=1), steps.arrived(steps.mp_send(cut, ctx))):
            assert isinstance(joined, Tensor) and torch.equal(joined, slots)
    own = torch.full((2, 2), float(ctx.rank))
    assert steps.esp_all_gather(own, ctx)[:, 0].tolist() == [float(r) for r in ctx.esp.ranks for _ in range(2)]
    spread = torch.arange(float(ctx.esp.size * ctx.ep.size)).view(-1, 1, 1, 1).expand(-1, 2, SLOTS, HIDDEN)
    part = steps.esp_split(spread, ctx)
    assert part.shape == (ctx.ep.size, 2, SLOTS, HIDDEN)
    first = ctx.esp.rank * ctx.ep.size  # esp slowest
    assert part[:, 0, 0, 0].tolist() == [float(block) for block in range(first, first + ctx.ep.size)]
    transport.barrier(ctx.world)


@pytest.mark.parametrize(
    "layout",
    [Layout(1), Layout(2, tp=2), Layout(4, tp=2, esp=2), Layout(4, tp=2, esp=4), Layout(4, tp=2, esp=2, ep=2)],
    ids=str,
)
def test_steps_over_mp_and_esp(pools: Pools, layout: Layout) -> None:
    pools.run(layout, _tokens)


def _mp_gradients(ctx: ParallelContext) -> list[Tensor]:
    """Through mp_slice and mp_send: (input, its gradient), where what follows is identical on MP peers."""
    slots = _random_like(torch.empty(EXPERTS, 4, HIDDEN, dtype=torch.float64), ctx.dp.rank).requires_grad_()
    cut = steps.arrived(steps.mp_slice(slots, ctx))
    assert isinstance(cut, Tensor)
    joined = steps.arrived(steps.mp_send(cut.square(), ctx))
    assert isinstance(joined, Tensor)
    joined.backward(_random_like(joined, 100 + ctx.dp.rank))
    assert slots.grad is not None
    return [slots.detach(), slots.grad]


@pytest.mark.parametrize("layout", [Layout(1), Layout(2, tp=2), Layout(4, tp=2), Layout(4, tp=4)], ids=str)
def test_gradients_over_mp_are_those_without_mp(pools: Pools, layout: Layout) -> None:
    for rank, (slots, gradient) in enumerate(pools.run(layout, _mp_gradients)):
        y = _random_like(slots, 100 + layout.grid.coordinate("dp", rank))
        torch.testing.assert_close(gradient, 2 * slots * y, rtol=1e-14, atol=0)


@pytest.mark.parametrize("num_parts", [1, 2, 4])
@pytest.mark.parametrize("num_stages", [1, 3])
def test_pipelined_sends_the_next_part_before_it_works_on_this_one(num_parts: int, num_stages: int) -> None:
    """At each step every stage has one part; the stages before come first, so what they send is on the wire."""
    seen: list[tuple[int, int]] = []  # (stage, part)

    def stage(place: int) -> Callable[[list[int]], list[int]]:
        def work(value: list[int]) -> list[int]:
            assert value[1:] == list(range(place)), "what it gets is what the stage before made of the same part"
            seen.append((place, value[0]))
            return [*value, place]

        return work

    done = steps.pipelined([[part] for part in range(num_parts)], *map(stage, range(num_stages)))  # type: ignore[misc]
    assert done == [[part, *range(num_stages)] for part in range(num_parts)]
    wanted = sorted((part + place, place, part) for part in range(num_parts) for place in range(num_stages))
    assert seen == [(place, part) for _, place, part in wanted]


def test_the_order_of_three_parts_through_three_stages() -> None:
    """The same, written out."""
    seen: list[str] = []
    stages = [lambda part, name=name: seen.append(f"{name} {part}") or part for name in ("send", "work", "return")]
    steps.pipelined([0, 1, 2], *stages)  # type: ignore[list-item]
    assert seen == [
        *("send 0",),
        *("send 1", "work 0"),
        *("send 2", "work 1", "return 0"),
        *("work 2", "return 1"),
        *("return 2",),
    ]


def _pipelined_flights(ctx: ParallelContext) -> None:
    """Several chunks on the wire at once, of different sizes and one empty: none takes another's place."""
    chunks = [uneven, none_at_all, from_rank_0_alone, uneven]
    parts = [times(buckets_of(ctx.rank, counts, ctx.ep_esp), 1 + chunk) for chunk, counts in enumerate(chunks)]
    for part in parts:
        content(part).requires_grad_()
    back = steps.pipelined(
        parts,
        lambda part: steps.ep_esp_send(steps.esp_replicate(part, ctx), ctx),
        lambda inbox: steps.ep_esp_return(steps.arrived(inbox), ctx),
        lambda partial: steps.esp_sum(steps.arrived(partial), ctx),
    )
    for part, returned in zip(parts, back, strict=True):
        check_same(returned, times(part, ctx.esp.size))
    sum((1 + chunk) * content(returned).sum() for chunk, returned in enumerate(back)).backward()
    for chunk, part in enumerate(parts):
        gradient = content(part).grad
        assert gradient is not None
        assert torch.equal(gradient, torch.full_like(gradient, (1 + chunk) * ctx.esp.size))


@pytest.mark.parametrize("layout", [Layout(2, ep=2), Layout(4, ep=2, esp=2), Layout(8, ep=4, esp=2)], ids=str)
def test_chunks_on_the_wire_do_not_mix(pools: Pools, layout: Layout) -> None:
    pools.run(layout, _pipelined_flights)
