"""Evaluation: the token-weighted losses of some batches. Floor 7."""

from collections.abc import Iterator

import torch
from torch import nn

from megatron_parm.data.batches import Batch
from megatron_parm.parallel import transport
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.training.forward_backward import to_device
from megatron_parm.training.objective import NEXT_TOKEN, Objective


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterator[Batch],
    num_batches: int,
    ctx: ParallelContext,
    objective: Objective = NEXT_TOKEN,
) -> tuple[float, ...]:
    """Each loss of `objective`, its mean over all that it counts in `num_batches` micro-batches on every dp rank.

    The same on all ranks, and for every micro-batch and data-parallel size that reads the same samples. Call on all
    ranks. The model is left in training mode; dropout is off meanwhile and draws nothing.
    """
    model.eval()
    sums = torch.zeros(2, len(objective.names), dtype=torch.float64, device=ctx.device)
    for _ in range(num_batches):
        batch = to_device(next(batches), ctx.device)
        sums += torch.stack([objective.sums(model, batch).double(), objective.counts(batch)])  # [2, k]
    model.train()
    totals, counts = transport.sum_over(sums, ctx.dp)
    return tuple((totals / counts.clamp(min=1)).tolist())
