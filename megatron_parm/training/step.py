"""One training step: micro-batches forward and backward, reduction, clipping, update. Floor 7."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_parm.data.batches import Batch
from megatron_parm.grads.buffer import GradientBuffers
from megatron_parm.grads.finish import copy_over_tp, sum_over_ends, sum_over_tp
from megatron_parm.grads.reduce import GradientReduction, SequentialReduction
from megatron_parm.observe.timers import Timers
from megatron_parm.optim.clip import clip_gradients
from megatron_parm.optim.loss_scale import LossScale
from megatron_parm.optim.precision import Optimizer
from megatron_parm.parallel import transport
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.training.forward_backward import ForwardBackward, to_device
from megatron_parm.training.non_finite import ForwardWatch, describe_origin, non_finite_names
from megatron_parm.training.objective import NEXT_TOKEN, Objective


@dataclass(frozen=True)
class StepResult:
    """losses: those of the objective over the global batch, the same on all ranks; grad_norm: before clipping;
    is_skipped: no update made. loss_scale: of this step; is_hopeless: it was skipped, and no smaller one will help."""

    losses: tuple[float, ...]
    grad_norm: float
    is_skipped: bool
    loss_scale: float = 1.0
    is_hopeless: bool = False

    @property
    def lm_loss(self) -> float:
        """The first loss, by which a run is judged."""
        return self.losses[0]


class TrainStep:
    """Runs steps on one model, whose micro-batches go through `forward_backward`.

    The loss of a step is the mean over micro-batches and data-parallel ranks of each micro-batch's mean; with
    `per_token_loss` the mean over all counted tokens of the global batch. A micro-batch without a counted token adds
    nothing.
    """

    def __init__(
        self,
        forward_backward: ForwardBackward,
        buffers: GradientBuffers,
        optimizer: Optimizer,
        ctx: ParallelContext,
        *,
        max_norm: float,
        per_token_loss: bool,
        objective: Objective = NEXT_TOKEN,
        reduction: GradientReduction | None = None,
        timers: Timers | None = None,
        loss_scale: LossScale | None = None,
        watch: ForwardWatch | None = None,
    ) -> None:
        self._forward_backward = forward_backward
        self._buffers = buffers
        self._optimizer = optimizer
        self._ctx = ctx
        self._max_norm = max_norm
        self._per_token_loss = per_token_loss
        self._reduction = SequentialReduction(buffers, ctx) if reduction is None else reduction
        self._loss_scale = LossScale() if loss_scale is None else loss_scale
        self._watch = watch
        self._loss_was_finite = True
        self._objective = objective
        self._timers = timers or Timers()

    def run(self, batches: Iterator[Batch], num_micro_batches: int, lr: float, weight_decay: float) -> StepResult:
        """One step over `num_micro_batches` of `batches`. Call on all ranks; nothing changes if it is skipped."""
        trace, timed = self._ctx.trace, self._timers.span
        with trace.span("data"):
            self._buffers.zero()
            with timed("batch-generator", level=2):
                micro_batches = [to_device(next(batches), self._ctx.device) for _ in range(num_micro_batches)]
            divisors = self._divisors(micro_batches)
        self._reduction.begin(num_micro_batches)
        if self._watch is not None:
            self._watch.begin()
        scale = self._loss_scale.value
        with trace.span("micro-batches", number=num_micro_batches), timed("forward-backward"):
            total = self._forward_backward.run(micro_batches, divisors, loss_scale=scale)
        self._optimizer.expect_settled()
        with trace.span("reduce gradients"), timed("all-grads-sync"):
            sum_over_ends(self._buffers, self._ctx)
            self._reduction.finish(self._ctx.dp.size * scale)
            sum_over_tp(self._buffers, self._ctx)
            copy_over_tp(self._buffers, self._ctx)
        with timed("optimizer"):
            losses = tuple((transport.sum_over(total, self._ctx.dp) / self._ctx.dp.size).tolist())
            with trace.span("clip"), timed("optimizer-clip-main-grad", level=2):
                norm = clip_gradients(self._buffers, self._ctx, self._max_norm)
            # both are sums over ranks, which carry a NaN or an infinity of one rank to all: so all decide alike
            is_finite = all(map(math.isfinite, (norm, *losses)))
            if is_finite:
                with trace.span("optimizer"), timed("optimizer-inner-step", level=2):
                    self._optimizer.step(lr, weight_decay)
        self._loss_was_finite = is_finite or bool(torch.isfinite(total).all())
        is_hopeless = not is_finite and self._loss_scale.is_exhausted()
        self._loss_scale.update(is_finite=is_finite)
        return StepResult(losses, norm, not is_finite, scale, is_hopeless)

    def describe_fault(self) -> str:
        """Where the last step, which was skipped, ceased to be finite. Call on all ranks."""
        weights = non_finite_names(self._buffers.parameters)
        layer = None if self._watch is None else self._watch.first_fault()
        return describe_origin(self._ctx, self._loss_was_finite, self._reduction.faults(), weights, layer)

    def _divisors(self, micro_batches: Sequence[Batch]) -> list[Tensor]:
        """What each micro-batch's loss sums are divided by, so that the quotients' mean over dp is the step's loss."""
        counts = [self._objective.counts(batch) for batch in micro_batches]  # [k] each
        if self._per_token_loss:
            tokens = transport.sum_over(torch.stack(counts).sum(0), self._ctx.dp)  # [k]
            return [tokens.clamp(min=1) / self._ctx.dp.size] * len(counts)
        return [count.clamp(min=1) * len(counts) for count in counts]
