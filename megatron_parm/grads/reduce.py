"""Sums the accumulated gradients over the ranks that hold replicas of each parameter. Floor 4.

Dense gradients are summed over dp and expert gradients over edp. Both are then divided by the size of dp: the loss is
the mean over dp, and an expert has already received, through the AlltoAll, the tokens of every rank that shares it.
Source: parm.md section 3.

Sharded buffers (ZeRO-1) are reduced by a ReduceScatter: each replica gets the sum of its own part alone.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from megatron_parm.grads.bucket import BUCKET_ELEMENTS, Bucket, ordered_buckets
from megatron_parm.grads.buffer import GradientBuffers
from megatron_parm.grads.staging import Staging
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.into_buffers import start_scatter_sum_into, start_sum_

Landing = Callable[[], None]


class GradientReduction(Protocol):
    """Reduces the gradients of a step, at its end or while backward runs."""

    def begin(self, num_micro_batches: int) -> None:
        """A step of so many micro-batches begins; the buffers are zero."""

    def finish(self, divisor: float) -> None:
        """Every backward has ended: reduce what is not reduced yet, and divide. Call on all ranks."""

    def faults(self) -> list[str]:
        """Parameters whose gradient of this rank alone was not finite in the last step, in the order of backward."""


class BucketSender:
    """Puts buckets on the wire. wire_dtype: what travels, where it is narrower than the gradients (bfloat16).

    watches: keep the norm of each gradient as it was before it met those of other ranks, for `faults`.
    """

    def __init__(
        self, buffers: GradientBuffers, ctx: ParallelContext, wire_dtype: torch.dtype | None, *, watches: bool
    ) -> None:
        self._buffers = buffers
        self._watches = watches
        self._norms: list[tuple[Bucket, Tensor]] = []
        self._wire_dtype = wire_dtype
        self._staging = Staging(ctx.device)

    def start(self, bucket: Bucket) -> Landing:
        """Begin the reduction of a complete bucket; call the result to wait for it. Call on all ranks of its axis."""
        if self._watches:  # no value is looked at here: that would wait for the device
            own = [self._buffers.gradient_of(slot.name) for slot in bucket.slots]
            self._norms.append((bucket, torch.stack(torch._foreach_norm(own))))
        if bucket.axis.size == 1:
            return lambda: self._keep_own(bucket)
        return self._start_sharded(bucket) if self._buffers.is_sharded else self._start_whole(bucket)

    def begin(self) -> None:
        """A step begins: forget the norms of the last one."""
        self._norms.clear()

    def faults(self) -> list[str]:
        """Parameters whose gradient of this rank alone was not finite in this step, in the order of backward."""
        return [
            slot.name
            for bucket, norms in self._norms
            for slot, is_finite in zip(bucket.slots, torch.isfinite(norms).tolist(), strict=True)
            if not is_finite
        ]

    def divide(self, bucket: Bucket, divisor: float) -> None:
        """Divide what the bucket's reduction left on this rank."""
        if divisor == 1:
            return
        if not self._buffers.is_sharded:
            bucket.data.div_(divisor)
            return
        for slot in bucket.slots:
            self._buffers.reduced(slot.name).div_(divisor)

    def _start_whole(self, bucket: Bucket) -> Landing:
        if self._wire_dtype in (None, bucket.data.dtype):
            flight = start_sum_(bucket.data, bucket.axis)
            return lambda: _land(flight.land)
        sent = self._staging.take(self._wire_dtype or bucket.data.dtype, bucket.data.numel())
        sent.copy_(bucket.data)
        flight = start_sum_(sent, bucket.axis)

        def land() -> None:
            bucket.data.copy_(flight.land())
            self._staging.give_back(sent)

        return land

    def _start_sharded(self, bucket: Bucket) -> Landing:
        axis, dtype = bucket.axis, self._wire_dtype or bucket.data.dtype
        rows = bucket.rows
        sent, received = (self._staging.take(dtype, axis.size, rows.width) for _ in range(2))
        summed = self._staging.take(bucket.data.dtype, rows.width)
        rows.pack([self._buffers.gradient_of(slot.name) for slot in bucket.slots], sent)
        flight = start_scatter_sum_into(summed, sent, received, axis)

        def land() -> None:
            rows.unpack_one(flight.land(), [self._buffers.reduced(slot.name) for slot in bucket.slots])
            self._staging.give_back(sent, received, summed)

        return land

    def _keep_own(self, bucket: Bucket) -> None:
        """One replica: its part is the whole, which lies in the buffer already."""


def _land(wait: Callable[[], object]) -> None:
    wait()


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
    SequentialReduction(buffers, ctx, bucket_elements).finish(ctx.dp.size if divisor is None else divisor)


class SequentialReduction:
    """Reduces bucket after bucket when backward has ended."""

    def __init__(
        self,
        buffers: GradientBuffers,
        ctx: ParallelContext,
        bucket_elements: int = BUCKET_ELEMENTS,
        wire_dtype: torch.dtype | None = None,
        *,
        watches: bool = False,
    ) -> None:
        self._buffers = buffers
        self._buckets = ordered_buckets(buffers, bucket_elements)
        self._sender = BucketSender(buffers, ctx, wire_dtype, watches=watches)

    def begin(self, num_micro_batches: int) -> None:
        """Nothing is sent before the end."""
        self._sender.begin()

    def faults(self) -> list[str]:
        """As `GradientReduction.faults` says."""
        return self._sender.faults()

    @torch.no_grad()
    def finish(self, divisor: float) -> None:
        """One bucket is on the wire at a time, in the fixed order."""
        self._buffers.expect_attached()
        for bucket in self._buckets:
            self._sender.start(bucket)()
            self._sender.divide(bucket, divisor)
