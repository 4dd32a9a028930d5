"""The steps of the schedules on packed buckets, whose rows are as many as were kept. Floor 5.

Every split follows from the announced loads, so no step waits for numbers. Blocks are ordered by peer; the blocks of a
fused group have esp fastest. See `steps.py` for what each step means.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from megatron_parm.moe.buckets import Loads, Packed
from megatron_parm.parallel.context import Axis, ParallelContext
from megatron_parm.parallel.overlapped import AllToAllUneven, Pending, start


def _flight(
    rows: Tensor, axis: Axis, send: list[int], receive: list[int], view: Callable[[Tensor], Packed]
) -> Pending[Packed]:
    return start(rows, AllToAllUneven(axis, send, receive)).then(view)


def _experts_of(place: int, part: Packed, ep: Axis) -> slice:
    each = len(part.loads[0]) // ep.size
    return slice(place * each, (place + 1) * each)


def _by_owner(part: Packed, ep: Axis) -> Loads:
    """The counts of one block of E experts as those of ep blocks of e."""
    (counts,) = part.counts
    return tuple(counts[_experts_of(place, part, ep)] for place in range(ep.size))


def _held_by(part: Packed, ranks: list[int], ep: Axis) -> Loads:
    """What each of `ranks` of the announcing axis sends to this rank's experts."""
    mine = _experts_of(ep.rank, part, ep)
    return tuple(part.loads[rank][mine] for rank in ranks)


def _esp_of(part: Packed, ctx: ParallelContext) -> int:
    """esp places in the announced loads: 1 where they were announced over ep alone."""
    return len(part.loads) // ctx.ep.size


def ep_send(part: Packed, ctx: ParallelContext) -> Pending[Packed]:
    """One block of E -> ep blocks of e, from the ranks with this rank's esp place."""
    esp = _esp_of(part, ctx)
    place = ctx.esp.rank if esp > 1 else 0
    arriving = _held_by(part, [peer * esp + place for peer in range(ctx.ep.size)], ctx.ep)
    send = [sum(block) for block in _by_owner(part, ctx.ep)]
    receive = [sum(block) for block in arriving]
    return _flight(part.rows, ctx.ep, send, receive, lambda rows: replace(part, rows=rows, counts=arriving))


def ep_return(part: Packed, ctx: ParallelContext) -> Pending[Packed]:
    """ep blocks of e -> one block of E: what `ep_send` took away."""
    esp = _esp_of(part, ctx)
    place = ctx.esp.rank if esp > 1 else 0
    mine = (part.loads[ctx.ep.rank * esp + place],)
    home = replace(part, counts=mine)
    receive = [sum(block) for block in _by_owner(home, ctx.ep)]
    return _flight(part.rows, ctx.ep, part.splits, receive, lambda rows: replace(home, rows=rows))


def esp_spread(part: Packed, ctx: ParallelContext) -> Pending[Packed]:
    """ESP-AllGather: ep blocks -> esp * ep blocks, esp slowest."""
    esp, rows = ctx.esp.size, part.rows
    arriving = tuple(
        block
        for place in range(esp)
        for block in _held_by(part, [peer * esp + place for peer in range(ctx.ep.size)], ctx.ep)
    )
    each = len(arriving) // esp
    receive = [sum(map(sum, arriving[place * each : (place + 1) * each])) for place in range(esp)]
    copies = rows.unsqueeze(0).expand(esp, -1, -1).flatten(0, 1)
    return _flight(
        copies, ctx.esp, [rows.shape[0]] * esp, receive, lambda got: replace(part, rows=got, counts=arriving)
    )


def esp_collect(part: Packed, ctx: ParallelContext) -> Pending[Packed]:
    """ESP-ReduceScatter of partial sums: esp * ep blocks -> this rank's ep blocks."""
    esp = ctx.esp.size
    each = len(part.counts) // esp
    blocks = [part.counts[place * each : (place + 1) * each] for place in range(esp)]
    send = [sum(map(sum, block)) for block in blocks]
    own = send[ctx.esp.rank]

    def unpack(rows: Tensor) -> Packed:
        return replace(part, rows=_added(rows, esp) if esp > 1 else rows, counts=blocks[ctx.esp.rank])

    return _flight(part.rows, ctx.esp, send, [own] * esp, unpack)


def esp_replicate(part: Packed, ctx: ParallelContext) -> Packed:
    """One block of E -> ep * esp blocks of e, each owner's rows once for every shard."""
    owned = _by_owner(part, ctx.ep)
    if ctx.esp.size == 1:
        return replace(part, counts=owned)
    return replace(
        part,
        rows=replicate(part.rows, [sum(block) for block in owned], ctx.esp.size),
        counts=tuple(counts for counts in owned for _ in range(ctx.esp.size)),
    )


def ep_esp_send(part: Packed, ctx: ParallelContext) -> Pending[Packed]:
    """Block p to rank p of the fused group."""
    arriving = _held_by(part, list(range(ctx.ep_esp.size)), ctx.ep)
    receive = [sum(block) for block in arriving]
    return _flight(part.rows, ctx.ep_esp, part.splits, receive, lambda rows: replace(part, rows=rows, counts=arriving))


def ep_esp_return(part: Packed, ctx: ParallelContext) -> Pending[Packed]:
    """What `ep_esp_send` took away, from every shard."""
    home = replace(part, counts=(part.loads[ctx.ep_esp.rank],))
    counts = tuple(block for block in _by_owner(home, ctx.ep) for _ in range(ctx.esp.size))
    receive = [sum(block) for block in counts]
    return _flight(part.rows, ctx.ep_esp, part.splits, receive, lambda rows: replace(part, rows=rows, counts=counts))


def esp_sum(part: Packed, ctx: ParallelContext) -> Packed:
    """ep * esp blocks -> one block of E, the shards of each owner added."""
    esp = ctx.esp.size
    counts = (tuple(count for block in part.counts[::esp] for count in block),)
    return replace(part, rows=add_copies(part.rows, part.splits[::esp], esp), counts=counts)


def replicate(rows: Tensor, sizes: list[int], copies: int) -> Tensor:
    """Blocks of `sizes` rows, each `copies` times in a row."""
    if copies == 1:
        return rows
    repeated = [block.expand(copies, -1, -1).flatten(0, 1) for block in torch.split(rows, sizes)]
    return repeated[0] if len(repeated) == 1 else torch.cat(repeated)


def add_copies(rows: Tensor, sizes: list[int], copies: int) -> Tensor:
    """The adjoint of `replicate`: the sum of the copies of each block."""
    if copies == 1:
        return rows
    sums = [_added(block, copies) for block in torch.split(rows, [size * copies for size in sizes])]
    return sums[0] if len(sums) == 1 else torch.cat(sums)


def _added(rows: Tensor, copies: int) -> Tensor:
    """The sum of `copies` equal runs of rows."""
    return rows.view(copies, rows.shape[0] // copies, rows.shape[1]).sum(0)
