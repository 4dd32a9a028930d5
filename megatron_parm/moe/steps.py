"""The steps of the schedules in the paper's words, each bound to its axis. Floor 5.

MP is `ctx.tp`, ESP is `ctx.esp`, EP&ESP is `ctx.ep_esp` (esp fastest). A step takes buckets of equal slots, as one
dense tensor, or `Ragged` ones (dropless). Each is made of operators that carry their adjoint. Source: parm.md
sections 2 and 3.
"""

from dataclasses import replace

import torch
from torch import Tensor

from megatron_parm.moe.buckets import Buckets, Counts, Ragged
from megatron_parm.parallel import collectives, transport
from megatron_parm.parallel.context import Axis, ParallelContext


def mp_split(x: Tensor, ctx: ParallelContext, dim: int = 0) -> Tensor:
    """MP-Split: this rank's slice of an `x` that is identical on MP peers."""
    return collectives.split(x, ctx.tp, dim)


def mp_all_gather(x: Tensor, ctx: ParallelContext, dim: int = 0) -> Tensor:
    """MP-AllGather: the slices joined, identical on MP peers from here on."""
    return collectives.all_gather(x, ctx.tp, dim)


def esp_all_gather(tokens: Tensor, ctx: ParallelContext) -> Tensor:
    """ESP-AllGather: the tokens of all ESP peers, which each then uses with its own shard of the experts."""
    return collectives.all_gather_summing(tokens, ctx.esp, 0)


def esp_all_reduce(partial: Buckets, ctx: ParallelContext) -> Buckets:
    """ESP-AllReduce of partial sums, of which each rank then keeps the part of its own tokens."""
    if isinstance(partial, Ragged):
        return replace(partial, rows=collectives.all_reduce_summing(partial.rows, ctx.esp))
    return collectives.all_reduce_summing(partial, ctx.esp)


def ep_all_to_all(buckets: Buckets, ctx: ParallelContext) -> Buckets:
    """EP-AlltoAll there (`[E, c, h]` -> `[ep, e, c, h]`) and back (`[ep, e, c, h]` -> `[E, c, h]`)."""
    if isinstance(buckets, Ragged):
        return _exchange(_by_owner(buckets, ctx.ep), ctx.ep)
    if buckets.dim() == 3:
        return collectives.all_to_all(_per_owner(buckets, ctx.ep), ctx.ep)  # [ep, e, c, h]
    return collectives.all_to_all(buckets, ctx.ep).flatten(0, 1)  # [E, c, h]


def esp_replicate(buckets: Buckets, ctx: ParallelContext) -> Buckets:
    """ESP dump: one copy of the buckets for each ESP shard of their expert, `[E, c, h]` -> `[ep*esp, e, c, h]`."""
    copies = ctx.esp.size
    if isinstance(buckets, Ragged):
        owned = _by_owner(buckets, ctx.ep)
        blocks = [block for block in torch.split(owned.rows, owned.splits) for _ in range(copies)]
        counts = tuple(counts for counts in owned.counts for _ in range(copies))
        return Ragged(torch.cat(blocks), counts)
    owned_slots = _per_owner(buckets, ctx.ep).unsqueeze(1)  # [ep, 1, e, c, h]
    return owned_slots.expand(-1, copies, -1, -1, -1).flatten(0, 1)  # [ep*esp, e, c, h]


def ep_esp_all_to_all(buckets: Buckets, ctx: ParallelContext) -> Buckets:
    """EP&ESP-AlltoAll: block p goes to rank p of the fused group; what it sent becomes block p."""
    if isinstance(buckets, Ragged):
        return _exchange(buckets, ctx.ep_esp)
    return collectives.all_to_all(buckets, ctx.ep_esp)


def esp_sum(returned: Buckets, ctx: ParallelContext) -> Buckets:
    """Local combine: the sum of the ESP shards' parts, `[ep*esp, e, c, h]` -> `[E, c, h]`."""
    if isinstance(returned, Ragged):
        blocks = torch.split(returned.rows, returned.splits)
        sums = [sum(blocks[at + 1 : at + ctx.esp.size], blocks[at]) for at in range(0, len(blocks), ctx.esp.size)]
        counts = tuple(count for block in returned.counts[:: ctx.esp.size] for count in block)
        return Ragged(torch.cat(sums), (counts,))
    parts = returned.view(ctx.ep.size, ctx.esp.size, *returned.shape[1:])  # [ep, esp, e, c, h]
    return parts.sum(1).flatten(0, 1)  # [E, c, h]


def _per_owner(buckets: Tensor, ep: Axis) -> Tensor:
    """`[E, c, h]` -> `[ep, e, c, h]`: the experts of each EP rank."""
    return buckets.view(ep.size, -1, *buckets.shape[1:])


def _by_owner(buckets: Ragged, ep: Axis) -> Ragged:
    """One block of E experts as ep blocks of e; blocks that came out of an exchange stay as they are."""
    if len(buckets.counts) != 1 or buckets.home is not None:
        return buckets
    (counts,) = buckets.counts
    each = len(counts) // ep.size
    return Ragged(buckets.rows, tuple(counts[at : at + each] for at in range(0, len(counts), each)))


def _exchange(buckets: Ragged, axis: Axis) -> Ragged:
    received = buckets.home if buckets.home is not None else _exchange_counts(buckets.counts, axis, buckets.rows.device)
    arriving = [sum(block) for block in received]
    rows = collectives.all_to_all_uneven(buckets.rows, axis, buckets.splits, arriving)
    return Ragged(rows, received, home=None if buckets.home is not None else buckets.counts)


def _exchange_counts(counts: Counts, axis: Axis, device: torch.device) -> Counts:
    received = transport.exchange(torch.tensor(counts, device=device), axis)
    return tuple(tuple(block) for block in received.tolist())
