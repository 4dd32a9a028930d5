"""Forward and backward of all micro-batches of a step: the seam between the loop and how the stages run. Floor 7."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from megatron_parm.data.batches import Batch
from megatron_parm.moe.losses import BackwardScale
from megatron_parm.observe.trace import NO_TRACE, Trace
from megatron_parm.training.objective import NEXT_TOKEN, Objective


class ForwardBackward(Protocol):
    """Runs every micro-batch of a step forward and backward; gradients accumulate in the buffers of the model."""

    def run(self, micro_batches: Sequence[Batch], divisors: Sequence[Tensor], *, loss_scale: float = 1.0) -> Tensor:
        """The sums of loss_sum / divisor over the micro-batches, float64 [k], the same on all stages, unscaled.

        `divisors` float64 [k] each, for the k losses of the objective. Every gradient is that of the sum of all k (and
        of the balance losses, averaged over the micro-batches) times `loss_scale`. Call on all ranks of the stage and
        of pp; gradients are not reduced yet.
        """

    def evaluate(self, batches: Iterator[Batch], num_batches: int) -> Tensor:
        """[2, k] in float64: the sum of each loss over the next `num_batches` of `batches`, and its count.

        The same on all stages. Dropout is off meanwhile and draws nothing; the model is left in training mode. Call on
        all ranks of the stage and of pp.
        """


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on `device`; itself where it is there already."""
    moved = {name: value.to(device, non_blocking=True) for name, value in batch.items() if isinstance(value, Tensor)}
    return moved  # type: ignore[return-value]  # the keys are those of the batch


class SingleStage:
    """The whole model on this rank (and its tp, ep and esp peers): one micro-batch after the other."""

    def __init__(
        self,
        model: nn.Module,
        balance_scale: BackwardScale,
        objective: Objective = NEXT_TOKEN,
        *,
        trace: Trace = NO_TRACE,
    ) -> None:
        self._trace = trace
        self._model = model
        self._balance_scale = balance_scale
        self._objective = objective
        self._device = next(model.parameters(), torch.empty(0)).device

    def run(self, micro_batches: Sequence[Batch], divisors: Sequence[Tensor], *, loss_scale: float = 1.0) -> Tensor:
        """As `ForwardBackward.run` says."""
        self._balance_scale.value = loss_scale / len(micro_batches)
        total = torch.zeros_like(divisors[0])
        for number, (batch, divisor) in enumerate(zip(micro_batches, divisors, strict=True)):
            with self._trace.span("forward", micro_batch=number):
                losses = self._objective.sums(self._model, batch) / divisor  # [k]
                loss = losses.sum()
            with self._trace.span("backward", micro_batch=number):
                (loss * loss_scale if loss_scale != 1.0 else loss).backward()  # type: ignore[no-untyped-call]
            total += losses.detach()
        return total

    @torch.no_grad()
    def evaluate(self, batches: Iterator[Batch], num_batches: int) -> Tensor:
        """As `ForwardBackward.evaluate` says."""
        self._model.eval()
        sums = torch.zeros(2, len(self._objective.names), dtype=torch.float64, device=self._device)
        for _ in range(num_batches):
            batch = to_device(next(batches), self._device)
            losses = self._objective.sums(self._model, batch)  # [k]
            sums += torch.stack([losses.double(), self._objective.counts(batch)])  # [2, k]
        self._model.train()
        return sums
