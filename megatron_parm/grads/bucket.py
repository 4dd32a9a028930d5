"""Gradients are reduced in buckets: runs of neighbouring slots of one buffer, each one collective. Floor 4.

The order of the buckets is fixed when they are made, by the place of a bucket's last parameter in the reverse of the
model's order, which is the order in which backward completes them. It is the same on all ranks of a stage, so it may
decide the order of collectives; the order of completion may not, for parameters without work change it from rank to
rank, and two reductions swapped on one group add up wrong values without an error.
"""

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from megatron_parm.grads.buffer import GradientBuffer, GradientBuffers, Slot
from megatron_parm.grads.rows import Rows
from megatron_parm.parallel.context import Axis

BUCKET_ELEMENTS = 40_000_000  # Megatron's default for --ddp-bucket-size


@dataclass(frozen=True)
class Bucket:
    """Slots that are reduced together over `axis`; `data` is their piece of the buffer.

    `is_tied`: the first and the last stage sum it before it is reduced, so it waits for the end of backward.
    """

    axis: Axis
    data: Tensor
    slots: tuple[Slot, ...]
    is_tied: bool = False

    @cached_property
    def rows(self) -> Rows:
        """How the parts of its parameters lie side by side when they are shared out over `axis`."""
        return Rows(tuple(tuple(slot.parameter.shape) for slot in self.slots), self.axis.size)


def split_into_buckets(buffer: GradientBuffer, bucket_elements: int) -> list[Bucket]:
    """The buffer cut before slots, so that each piece has at most `bucket_elements` or holds a single slot."""
    runs: list[list[Slot]] = []
    for slot in buffer.slots:
        if runs and slot.stop - runs[-1][0].start <= bucket_elements:
            runs[-1].append(slot)
        else:
            runs.append([slot])
    starts = [0, *(run[0].start for run in runs[1:])]
    ends = [*starts[1:], buffer.data.numel()]
    return [
        Bucket(buffer.axis, buffer.data[start:end], tuple(run), buffer.is_tied)
        for start, end, run in zip(starts, ends, runs, strict=True)
    ]


def ordered_buckets(buffers: GradientBuffers, bucket_elements: int) -> list[Bucket]:
    """The buckets of all buffers in the fixed order in which they are reduced; tied ones are the last."""
    place = {name: number for number, name in enumerate(reversed(buffers.parameters))}
    found = [bucket for buffer in buffers.buffers for bucket in split_into_buckets(buffer, bucket_elements)]
    return sorted(found, key=lambda bucket: (bucket.is_tied, place[bucket.slots[-1].name]))
