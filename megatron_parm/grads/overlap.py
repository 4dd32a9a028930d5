"""Reduces gradients while backward still runs (--overlap-grad-reduce). Floor 4.

A parameter is complete when its gradient was accumulated once for every micro-batch of the step; a bucket when its
parameters are. A complete bucket waits until the ones before it in the fixed order are on the wire, and, by the policy
of `gaps.py`, until no MoE layer is exchanging tokens. What is left goes out at the end of backward, so a parameter that
took no part in the loss costs time, never a wrong sum.

Not for pipeline schedules that split backward in two: there the hooks do not fire for every parameter.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_parm.grads.bucket import BUCKET_ELEMENTS, ordered_buckets
from megatron_parm.grads.buffer import GradientBuffers
from megatron_parm.grads.gaps import ExchangeGaps
from megatron_parm.grads.reduce import BucketSender, Landing
from megatron_parm.parallel.context import ParallelContext


class OverlappedReduction:
    """Puts buckets on the wire from hooks of backward, in the fixed order. Made once; lives as long as the model."""

    def __init__(
        self,
        buffers: GradientBuffers,
        ctx: ParallelContext,
        bucket_elements: int = BUCKET_ELEMENTS,
        wire_dtype: torch.dtype | None = None,
        gaps: ExchangeGaps | None = None,
        *,
        watches: bool = False,
    ) -> None:
        self._buffers = buffers
        self._buckets = ordered_buckets(buffers, bucket_elements)
        self._sender = BucketSender(buffers, ctx, wire_dtype, watches=watches)
        self._gaps = ExchangeGaps() if gaps is None else gaps
        self._gaps.when_open(self._send_ready)
        self._due: dict[str, int] = {}  # parameter -> micro-batches whose gradient is still to come
        self._waits_for = [0] * len(self._buckets)  # parameters that are not complete
        self._landings: list[Landing] = []  # of the buckets sent, in order
        self.num_sent_early = 0  # buckets of the last step that went out before backward had ended
        for place, bucket in enumerate(self._buckets):
            for slot in bucket.slots:
                slot.parameter.register_post_accumulate_grad_hook(self._hook(place, slot.name))  # type: ignore[no-untyped-call]  # torch's

    def begin(self, num_micro_batches: int) -> None:
        """Expect one gradient of each parameter from each micro-batch."""
        self._due = {slot.name: num_micro_batches for bucket in self._buckets for slot in bucket.slots}
        self._waits_for = [len(bucket.slots) for bucket in self._buckets]
        self._landings = []
        self._sender.begin()

    def faults(self) -> list[str]:
        """As `GradientReduction.faults` says."""
        return self._sender.faults()

    @torch.no_grad()
    def finish(self, divisor: float) -> None:
        """Send the buckets that are left, wait for all, divide."""
        self._buffers.expect_attached()
        self.num_sent_early = len(self._landings)
        while len(self._landings) < len(self._buckets):
            self._send_next()
        for bucket, land in zip(self._buckets, self._landings, strict=True):
            land()
            self._sender.divide(bucket, divisor)
        self._due = {}  # a backward outside of a step (a test, a probe) is none of ours
        self._landings = []

    def _hook(self, place: int, name: str) -> Callable[[Tensor], None]:
        def count(_: Tensor) -> None:
            if not self._due:
                return
            assert place >= len(self._landings), f"a gradient of {name} came after its bucket was sent"
            self._due[name] -= 1
            if self._due[name] == 0:
                self._waits_for[place] -= 1
                self._send_ready()

        return count

    def _send_ready(self) -> None:
        while self._due and self._gaps.is_open and self._is_ready(len(self._landings)):
            self._send_next()

    def _is_ready(self, place: int) -> bool:
        return place < len(self._buckets) and self._waits_for[place] == 0 and not self._buckets[place].is_tied

    def _send_next(self) -> None:
        with torch.no_grad():
            self._landings.append(self._sender.start(self._buckets[len(self._landings)]))
