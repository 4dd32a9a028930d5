"""Evaluation: the token-weighted loss of some batches. Floor 7."""

from collections.abc import Iterator

import torch
from torch import nn

from megatron_parm.data.batches import Batch
from megatron_parm.parallel import transport
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.training.forward_backward import to_device, token_losses


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterator[Batch], num_batches: int, ctx: ParallelContext) -> float:
    """Mean loss over all counted tokens of `num_batches` micro-batches on every data-parallel rank.

    The same on all ranks, and for every micro-batch and data-parallel size that reads the same samples. Call on all
    ranks. The model is left in training mode; dropout is off meanwhile and draws nothing.
    """
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=ctx.device)
    for _ in range(num_batches):
        loss_sum, count = token_losses(model, to_device(next(batches), ctx.device))
        sums += torch.stack([loss_sum.double(), count.double()])
    model.train()
    total, count = transport.sum_over(sums, ctx.dp).tolist()
    return float(total / max(count, 1.0))
