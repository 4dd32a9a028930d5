"""The norm of all gradients of the model, clipping by it, and what is logged beside it. Floor 5.

Of all replicas of a parameter exactly one rank counts it (`ShardSpec.is_counted_here`), so a sum over the whole world
is the sum over the model's parameters on every layout. Squares are added in float64: float32 sums of 10^8 terms lose
digits that depend on how the layout cuts them, and the pass is bound by memory, not by arithmetic.
"""

import math
from collections.abc import Iterator
from itertools import groupby

import torch
from torch import Tensor

from megatron_parm.grads.buffer import GradientBuffers, Slot
from megatron_parm.optim.precision import MasterWeights
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.transport import sum_over

CHUNK_ELEMENTS = (
    1 << 16
)  # a float64 copy of this size stays in the processor's cache; measured 9x faster than in one piece
CLIP_EPSILON = 1e-6  # Megatron's and torch's, added to the norm that divides


def squared_sum(values: Tensor) -> Tensor:
    """The sum of squares, accumulated in float64. Shape: []."""
    if not values.is_cpu:
        norm: Tensor = torch.linalg.vector_norm(values, dtype=torch.float64)
        return norm.square()
    total = torch.zeros((), dtype=torch.float64)
    for chunk in torch.split(values.reshape(-1), CHUNK_ELEMENTS):
        wide = chunk.double()
        total += torch.dot(wide, wide)
    return total


@torch.no_grad()
def gradient_norm(buffers: GradientBuffers, ctx: ParallelContext) -> float:
    """The 2-norm of the gradient of the whole model: the same number on every rank. Call on all ranks.

    It is NaN or infinite on every rank if any gradient is on any rank, also on one that does not count the parameter.
    """

    counted = torch.zeros((), dtype=torch.float64, device=ctx.device)
    others = torch.zeros_like(counted)
    for values, is_counted in _reduced_runs(buffers, ctx):
        if is_counted:
            counted += squared_sum(values)
        else:
            others += squared_sum(values)
    # 0 x others adds nothing, or NaN; only a sum carries a NaN to every rank (gloo's MAX can lose it)
    return math.sqrt(sum_over(counted + 0.0 * others, ctx.world).item())


def _reduced_runs(buffers: GradientBuffers, ctx: ParallelContext) -> Iterator[tuple[Tensor, bool]]:
    """The reduced gradients in pieces, and whether this rank counts them."""

    def is_counted(slot: Slot) -> bool:
        return buffers.reduced_spec(slot.name).is_counted_here(ctx)

    for buffer in buffers.buffers:
        for here, slots in groupby(buffer.slots, key=is_counted):
            run = list(slots)
            if buffers.is_sharded:
                yield from ((buffers.reduced(slot.name), here) for slot in run)
            else:
                yield buffer.data[run[0].start : run[-1].stop], here


def clip_gradients(buffers: GradientBuffers, ctx: ParallelContext, max_norm: float) -> float:
    """Scale all gradients so that their norm is at most `max_norm` (0: never scale). Returns the norm before scaling.

    A norm that is not finite leaves the gradients as they are: the caller decides, and decides alike on every rank.
    """
    norm = gradient_norm(buffers, ctx)
    if max_norm > 0 and math.isfinite(norm):
        factor = max_norm / (norm + CLIP_EPSILON)
        if factor < 1:
            buffers.scale(factor)
    return norm


@torch.no_grad()
def count_zeros(buffers: GradientBuffers, ctx: ParallelContext) -> int:
    """How many elements of the model's gradient are exactly zero (--log-num-zeros-in-grad). Call on all ranks."""
    zeros = torch.zeros((), dtype=torch.int64, device=ctx.device)
    for buffer in buffers.buffers:
        for slot in buffer.slots:
            if buffers.reduced_spec(slot.name).is_counted_here(ctx):
                reduced = buffers.reduced(slot.name)
                zeros += reduced.numel() - torch.count_nonzero(reduced)
    return int(sum_over(zeros, ctx.world).item())


@torch.no_grad()
def parameter_norm(masters: MasterWeights, ctx: ParallelContext) -> float:
    """The 2-norm of the model's weights, masters where separate (--log-params-norm). Call on all ranks."""
    total = torch.zeros((), dtype=torch.float64, device=ctx.device)
    for name, weight in masters.weights.items():
        if masters.spec(name).is_counted_here(ctx):
            total += squared_sum(weight)
    return math.sqrt(sum_over(total, ctx.world).item())
