"""Sums the accumulated gradients over the ranks that hold replicas of each parameter. Floor 4.

Dense gradients are summed over dp and expert gradients over edp. Both are then divided by the size of dp: the loss is
the mean over dp, and an expert has already received, through the AlltoAll, the tokens of every rank that shares it.
Source: parm.md section 3.

Buckets go out in one fixed order that is the same on every rank: by buffer, then from the front.
"""

import torch
from torch import Tensor

from megatron_parm.grads.buffer import GradientBuffer, GradientBuffers
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.transport import sum_over_

BUCKET_ELEMENTS = 40_000_000  # Megatron's default for --ddp-bucket-size


@torch.no_grad()
def reduce_gradients(
    buffers: GradientBuffers,
    ctx: ParallelContext,
    bucket_elements: int = BUCKET_ELEMENTS,
    divisor: float | None = None,
) -> None:
    """Sum dense gradients over dp and expert gradients over edp, then divide both by `divisor` (the size of dp).

    Called once a step, after the backward of the last micro-batch, on all ranks. Pass the number of tokens of the
    global batch as `divisor` where the loss of a micro-batch is a sum over tokens.
    """
    buffers.expect_attached()
    divide_by = ctx.dp.size if divisor is None else divisor
    for buffer in buffers.buffers:
        for bucket in split_into_buckets(buffer, bucket_elements):
            sum_over_(bucket, buffer.axis)
            if divide_by != 1:
                bucket.div_(divide_by)


def split_into_buckets(buffer: GradientBuffer, bucket_elements: int) -> list[Tensor]:
    """The buffer's data cut before slots, so that each piece has at most `bucket_elements` or holds a single slot."""
    starts = [0]
    for slot in buffer.slots[1:]:
        if slot.stop - starts[-1] > bucket_elements:
            starts.append(slot.start)
    ends = [*starts[1:], buffer.data.numel()]
    return [buffer.data[start:end] for start, end in zip(starts, ends, strict=True)]
