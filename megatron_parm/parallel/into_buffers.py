"""Collectives on buffers that the caller keeps: reductions of gradients, gathers of parameters. Floor 3.

`transport.py` makes a tensor for each result; here nothing is allocated, for the same buffers serve every step, and
writing to fresh memory costs more than the sum itself (64 MB: 154 ms against 71). A `start_*` puts a collective on the
wire; its buffers must stay untouched until the flight lands. Call on all ranks of the axis, in the same order.

As in `transport.py`, gloo gets a ReduceScatter and an AllGather made of its AlltoAll.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_parm.parallel.context import Axis
from megatron_parm.parallel.transport import Flight, landed


def start_sum_(x: Tensor, axis: Axis) -> Flight:
    """Begin the sum of a contiguous `x` over the axis, in place."""
    if axis.size == 1:
        return landed(x)
    assert x.is_contiguous(), "an in-place sum needs a contiguous tensor"
    return Flight(dist.all_reduce(x, group=axis.group, async_op=True), None, lambda: x)


def start_scatter_sum_into(summed: Tensor, stack: Tensor, received: Tensor, axis: Axis) -> Flight:
    """Begin a ReduceScatter: `summed` [S] gets the sum over the axis of every rank's `stack[my rank]`.

    `stack` and `received` are `[axis.size, S]`, all three contiguous; `summed` may have a wider dtype than they have,
    and then the addition is made in it where it is made here. The order of addition is that of the ranks.
    """
    if dist.get_backend(axis.group) == "gloo":
        work = dist.all_to_all_single(received, stack, group=axis.group, async_op=True)

        def add_up() -> Tensor:
            return torch.sum(received, dim=0, dtype=summed.dtype, out=summed)

        return Flight(work, stack, add_up)
    narrow = received[0]
    work = dist.reduce_scatter_tensor(narrow.unsqueeze(0), stack, group=axis.group, async_op=True)
    return Flight(work, stack, lambda: summed.copy_(narrow))


def start_gather_into(gathered: Tensor, stack: Tensor, axis: Axis) -> Flight:
    """Begin an AllGather: `gathered[i]` becomes what rank i holds in `stack[my rank]`.

    Both are `[axis.size, S]` and contiguous; the other rows of `stack` are overwritten.
    """
    mine = stack[axis.rank]
    if dist.get_backend(axis.group) == "gloo":
        for place in range(axis.size):
            if place != axis.rank:
                stack[place].copy_(mine)
        work = dist.all_to_all_single(gathered, stack, group=axis.group, async_op=True)
        return Flight(work, stack, lambda: gathered)
    work = dist.all_gather_into_tensor(gathered, mine.unsqueeze(0), group=axis.group, async_op=True)
    return Flight(work, stack, lambda: gathered)
