"""The steps of the schedules in the paper's words, each bound to its axis. Floor 5.

MP is `ctx.tp`, ESP is `ctx.esp`, EP&ESP is `ctx.ep_esp` (esp fastest). A step that communicates returns what is on the
wire; `arrived` waits for it. A step takes padded buckets, one dense tensor, or packed ones. Each is made of operators
that carry their adjoint. Source: parm.md sections 2 and 3.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from torch import Tensor

from megatron_parm.moe import packed_steps
from megatron_parm.moe.buckets import Buckets, Packed
from megatron_parm.parallel import collectives
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.overlapped import (
    AllReduceSumming,
    AllToAll,
    OwnSlice,
    Pending,
    ScatterSum,
    StackIdentical,
    StackSumming,
    finish,
    start,
)

# What is on the wire; `arrived` waits for it.
Flight = Pending[Tensor] | Pending[Packed]
arrived = finish


def pipelined(parts: Iterable[Any], *stages: Callable[[Any], Any]) -> list[Any]:
    """Take every part through all stages; while one part is at a stage, the next is at the stage before.

    A stage that ends in a send leaves its part on the wire while the other parts compute or travel. Backward runs the
    same way round.
    """
    values: list[Any] = list(parts)
    for step in range(len(values) + len(stages) - 1):
        for place, stage in enumerate(stages):
            if 0 <= step - place < len(values):
                values[step - place] = stage(values[step - place])
    return values


def mp_split(x: Tensor, ctx: ParallelContext, dim: int = 0) -> Tensor:
    """MP-Split: this rank's slice of an `x` that is identical on MP peers."""
    return collectives.split(x, ctx.tp, dim)


def mp_all_gather(x: Tensor, ctx: ParallelContext, dim: int = 0) -> Tensor:
    """MP-AllGather: the slices joined, identical on MP peers from here on."""
    return collectives.all_gather(x, ctx.tp, dim)


def mp_slice(slots: Buckets, ctx: ParallelContext) -> Flight:
    """MP-Split along the slots: `[E, c, h]` -> `[E, c/tp, h]`. Only its adjoint, an AllGather, is ever on the wire."""
    assert isinstance(slots, Tensor)
    num_experts, num_slots, hidden = slots.shape
    stack = slots.view(num_experts, ctx.tp.size, num_slots // ctx.tp.size, hidden).transpose(0, 1)
    return start(stack, OwnSlice(ctx.tp))


def mp_send(slots: Buckets, ctx: ParallelContext) -> Flight:
    """MP-AllGather along the slots, on the wire: `[E, c/tp, h]` -> `[E, c, h]`."""
    assert isinstance(slots, Tensor)
    return start(slots, StackIdentical(ctx.tp)).then(lambda x: x.transpose(0, 1).flatten(1, 2))


def esp_all_gather(tokens: Tensor, ctx: ParallelContext) -> Tensor:
    """ESP-AllGather: the tokens of all ESP peers, which each then uses with its own shard of the experts."""
    return collectives.all_gather_summing(tokens, ctx.esp, 0)


def esp_reduce(partial: Buckets, ctx: ParallelContext) -> Flight:
    """ESP-AllReduce of partial sums, of which each rank then keeps the part of its own tokens."""
    collective = AllReduceSumming(ctx.esp)
    if isinstance(partial, Packed):
        return start(partial.rows, collective).then(lambda rows: replace(partial, rows=rows))
    return start(partial, collective)


def esp_split(gathered: Buckets, ctx: ParallelContext) -> Tensor:
    """ESP-Split: the part of this rank's own rows, `[esp*ep, e, c, h]` -> `[ep, e, c, h]`."""
    assert isinstance(gathered, Tensor)
    return gathered.view(ctx.esp.size, ctx.ep.size, *gathered.shape[1:])[ctx.esp.rank]


def ep_send(part: Buckets, ctx: ParallelContext) -> Flight:
    """EP-AlltoAll there: `[E, c, h]` -> `[ep, e, c, h]`."""
    if isinstance(part, Packed):
        return packed_steps.ep_send(part, ctx)
    owned = part.view(ctx.ep.size, -1, *part.shape[1:])  # [ep, e, c, h]
    return start(owned, AllToAll(ctx.ep))


def ep_return(part: Buckets, ctx: ParallelContext) -> Flight:
    """EP-AlltoAll back: `[ep, e, c, h]` -> `[E, c, h]`."""
    if isinstance(part, Packed):
        return packed_steps.ep_return(part, ctx)
    return start(part, AllToAll(ctx.ep)).then(lambda x: x.flatten(0, 1))


def esp_spread(inbox: Buckets, ctx: ParallelContext) -> Flight:
    """ESP-AllGather inside the node: `[ep, e, c, h]` -> `[esp*ep, e, c, h]`, used by each rank with its own shard."""
    if isinstance(inbox, Packed):
        return packed_steps.esp_spread(inbox, ctx)
    return start(inbox, StackSumming(ctx.esp)).then(lambda x: x.flatten(0, 1))


def esp_collect(partial: Buckets, ctx: ParallelContext) -> Flight:
    """ESP-ReduceScatter inside the node: `[esp*ep, e, c, h]` of partial sums -> `[ep, e, c, h]`."""
    if isinstance(partial, Packed):
        return packed_steps.esp_collect(partial, ctx)
    stack = partial.unflatten(0, (ctx.esp.size, ctx.ep.size))  # type: ignore[no-untyped-call]  # torch's
    return start(stack, ScatterSum(ctx.esp))


def esp_replicate(part: Buckets, ctx: ParallelContext) -> Buckets:
    """ESP dump: one copy of the buckets for each ESP shard of their expert, `[E, c, h]` -> `[ep*esp, e, c, h]`."""
    if isinstance(part, Packed):
        return packed_steps.esp_replicate(part, ctx)
    owned = part.view(ctx.ep.size, 1, -1, *part.shape[1:])  # [ep, 1, e, c, h]
    return owned.expand(-1, ctx.esp.size, -1, -1, -1).flatten(0, 1)  # [ep*esp, e, c, h]


def ep_esp_send(outbox: Buckets, ctx: ParallelContext) -> Flight:
    """EP&ESP-AlltoAll there: block p goes to rank p of the fused group."""
    if isinstance(outbox, Packed):
        return packed_steps.ep_esp_send(outbox, ctx)
    return start(outbox, AllToAll(ctx.ep_esp))


def ep_esp_return(partial: Buckets, ctx: ParallelContext) -> Flight:
    """EP&ESP-AlltoAll back: every shard's part of what was sent there."""
    if isinstance(partial, Packed):
        return packed_steps.ep_esp_return(partial, ctx)
    return start(partial, AllToAll(ctx.ep_esp))


def esp_sum(returned: Buckets, ctx: ParallelContext) -> Buckets:
    """Local combine: the sum of the ESP shards' parts, `[ep*esp, e, c, h]` -> `[E, c, h]`."""
    if isinstance(returned, Packed):
        return packed_steps.esp_sum(returned, ctx)
    if ctx.esp.size == 1:
        return returned.flatten(0, 1)  # [E, c, h]
    parts = returned.view(ctx.ep.size, ctx.esp.size, *returned.shape[1:])  # [ep, esp, e, c, h]
    return parts.sum(1).flatten(0, 1)  # [E, c, h]
