"""What the reduction over the replicas of data does not do. Floor 4.

The rules here are few and named. The router's sum over tp is none of them: it belongs to the schedule.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_parm.grads.buffer import GradientBuffers, Slot
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.sharding import spec_of
from megatron_parm.parallel.transport import broadcast_, sum_over_


@torch.no_grad()
def sum_over_ends(buffers: GradientBuffers, ctx: ParallelContext) -> None:
    """Sum the gradients of tied embeddings over the first and the last stage, which hold a part each.

    Before the reduction over dp: both stages then reduce the same numbers in the same order, so the two copies of the
    weight stay bitwise equal. A reduction that starts within backward must leave the tied buffer for after this.
    Call on all ranks; between the two stages nothing happens. Source: Megatron-LM's embedding group.
    """
    for buffer in buffers.buffers:
        if buffer.is_tied:
            sum_over_(buffer.data, ctx.ends)


@torch.no_grad()
def sum_over_tp(buffers: GradientBuffers, ctx: ParallelContext) -> None:
    """Sum over tp the gradients of the parameters that each rank of tp used on its own slice of the sequence.

    These are the norms, the learned positions and the biases of row-parallel layers under sequence parallelism
    (`ShardSpec.is_partial_on_tp`). One sum a step and buffer, after all micro-batches; the ranks of tp hold the same
    slots. Call on all ranks, once, after the gradients were reduced. Source: Korthikanti et al. 2022.
    """
    if ctx.tp.size == 1:
        return
    for buffer in buffers.buffers:
        partial = [slot for slot in buffer.slots if spec_of(slot.parameter).is_partial_on_tp]
        if partial:
            _over_tp(buffers, partial, lambda flat: sum_over_(flat, ctx.tp))


@torch.no_grad()
def copy_over_tp(buffers: GradientBuffers, ctx: ParallelContext) -> None:
    """Give every rank of tp the first one's gradients of the dense parameters that all of them hold whole.

    They are equal but for rounding: the baseline sends the copies of a token that tp peers hold through the experts in
    different rows, and a matrix product may round each row its own way. Without this the copies of norms, biases and
    routers would drift apart, and a checkpoint, which keeps one of them, would not resume bit for bit.
    Call on all ranks, after the gradients were reduced and `sum_over_tp`.
    """
    if ctx.tp.size == 1 or ctx.ep_esp.size == 1:
        return
    for buffer in buffers.buffers:
        whole = [slot for slot in buffer.slots if not spec_of(slot.parameter).is_cut_by("tp")]
        if buffer.role == "dense" and whole:
            _over_tp(buffers, whole, lambda flat: broadcast_(flat, ctx.tp))


def _over_tp(buffers: GradientBuffers, slots: list[Slot], collective: Callable[[Tensor], Tensor]) -> None:
    """`collective` in place on the reduced gradients of `slots`; tp peers hold the same parts of sharded ones."""
    reduced = [buffers.reduced(slot.name) for slot in slots]
    flat = collective(torch.cat([values.reshape(-1) for values in reduced]))
    for place, values in zip(reduced, torch.split(flat, [values.numel() for values in reduced]), strict=True):
        place.copy_(values.view_as(place))
