"""Evaluation: the token-weighted losses of some batches. Floor 7."""

from collections.abc import Iterator

from megatron_parm.data.batches import Batch
from megatron_parm.parallel import transport
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.training.forward_backward import ForwardBackward


def evaluate(
    forward_backward: ForwardBackward, batches: Iterator[Batch], num_batches: int, ctx: ParallelContext
) -> tuple[float, ...]:
    """Each loss of the objective, its mean over all that it counts in `num_batches` micro-batches on every dp rank.

    The same on all ranks, and for every micro-batch and data-parallel size that reads the same samples. Call on all
    ranks. The model is left in training mode; dropout is off meanwhile and draws nothing.
    """
    totals, counts = transport.sum_over(forward_backward.evaluate(batches, num_batches), ctx.dp)
    return tuple((totals / counts.clamp(min=1)).tolist())
