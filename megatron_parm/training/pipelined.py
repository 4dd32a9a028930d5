"""A step over several pipeline stages, behind the same seam as one over a single stage. Floor 7."""

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from megatron_parm.config.run import RunConfig
from megatron_parm.data.batches import Batch
from megatron_parm.grads.buffer import GradientBuffers
from megatron_parm.models.block import residual_dtype
from megatron_parm.models.build import BuiltModel, LanguageModel
from megatron_parm.moe.losses import BackwardScale
from megatron_parm.parallel import transport
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.pipeline.stages import Pipeline, ScheduleName, WireShapes, evaluation_groups
from megatron_parm.training.forward_backward import ForwardBackward, SingleStage, to_device
from megatron_parm.training.objective import Objective

DIVISORS = "divisors"  # beside the tensors of a micro-batch: what its loss sums are divided by


class _StageOfObjective(nn.Module):
    """A stage that the pipeline calls with the tensors of a micro-batch; the last one divides its loss sums."""

    def __init__(self, stage: nn.Module, objective: Objective, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.stage = stage
        self._objective = objective
        self._is_first, self._is_last = is_first, is_last

    def forward(self, x: Tensor, **tensors: Tensor) -> Tensor:
        divisors = tensors.pop(DIVISORS).squeeze(0)  # [k]
        batch = cast(Batch, tensors | ({self._objective.inputs: x} if self._is_first else {}))
        output = self._objective.sums(self.stage, batch, None if self._is_first else x)
        if torch.is_grad_enabled() and not output.requires_grad:
            output = output.requires_grad_()  # a stage that is frozen whole ends backward here
        if not self._is_last:
            return output.contiguous()  # [s, b, h]
        return output / divisors  # [k], in float64


class PipelinedStages:
    """The stages of this rank in a pipeline over `ctx.pp`, by one of torch's schedules. Call on all ranks.

    `seq_length` and `micro_batch_size` are those of every micro-batch; `slices`: ranks over which a hidden state is
    cut along the sequence.
    """

    def __init__(
        self,
        model: LanguageModel,
        buffers: GradientBuffers,
        balance_scale: BackwardScale,
        objective: Objective,
        ctx: ParallelContext,
        *,
        schedule: ScheduleName,
        micro_batch_size: int,
        seq_length: int,
        slices: int = 1,
    ) -> None:
        self._model, self._balance_scale, self._objective, self._ctx = model, balance_scale, objective, ctx
        self._one = torch.ones(len(objective.names), dtype=torch.float64, device=ctx.device)
        parts = [
            _StageOfObjective(
                stage, objective, is_first=layers.start == 0, is_last=layers.stop == model.shape.num_layers
            )
            for stage, layers in zip(model.stages, model.layers_of_parts, strict=True)
        ]
        tokens = torch.empty(micro_batch_size, seq_length, dtype=torch.int64, device="meta")
        hidden = torch.empty(
            seq_length // slices,
            micro_batch_size,
            model.shape.hidden_size,
            dtype=residual_dtype(model.shape, next(model.parameters()).dtype),
            device="meta",
        )  # [s/tp, b, h]
        losses = torch.empty(len(objective.names), dtype=torch.float64, device="meta")
        self._pipeline = Pipeline(
            parts,
            schedule,
            WireShapes(tokens, hidden.requires_grad_(), losses.requires_grad_()),
            ctx.pp,
            ctx.device,
            buffers.collect,
        )

    def run(self, micro_batches: Sequence[Batch], divisors: Sequence[Tensor], *, loss_scale: float = 1.0) -> Tensor:
        """As `ForwardBackward.run` says."""
        self._balance_scale.value = loss_scale / len(micro_batches)
        scaled = [divisor / loss_scale for divisor in divisors]
        total = torch.zeros_like(divisors[0])
        for losses in self._pipeline.train(self._with_divisors(micro_batches, scaled)):
            total += losses
        return self._from_last_stage(total / loss_scale)

    @torch.no_grad()
    def evaluate(self, batches: Iterator[Batch], num_batches: int) -> Tensor:
        """As `ForwardBackward.evaluate` says."""
        self._model.eval()
        total = torch.zeros(2, len(self._one), dtype=torch.float64, device=self._ctx.device)
        for size in evaluation_groups(num_batches, self._ctx.pp.size):
            group = [to_device(next(batches), self._ctx.device) for _ in range(size)]
            total[1] += torch.stack([self._objective.counts(batch) for batch in group]).sum(0)
            for sums in self._pipeline.evaluate(self._with_divisors(group, [self._one] * size)):
                total[0] += sums
        self._model.train()
        return self._from_last_stage(total)

    def _with_divisors(self, micro_batches: Sequence[Batch], divisors: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        names = {self._objective.inputs: "tokens"}  # as the pipeline calls what enters it
        return [
            {names.get(name, name): tensor for name, tensor in cast(dict[str, Tensor], batch).items()}
            | {DIVISORS: divisor.unsqueeze(0)}
            for batch, divisor in zip(micro_batches, divisors, strict=True)
        ]

    def _from_last_stage(self, values: Tensor) -> Tensor:
        return transport.broadcast_(values.contiguous(), self._ctx.pp, source=self._ctx.pp.size - 1)


def stages_of_run(
    config: RunConfig, built: BuiltModel, buffers: GradientBuffers, objective: Objective, ctx: ParallelContext
) -> ForwardBackward:
    """How the micro-batches of a resolved `config` run: over a single stage, or through a pipeline."""
    if ctx.pp.size == 1:
        return SingleStage(built.model, built.balance_scale, objective, trace=ctx.trace)
    return PipelinedStages(
        built.model,
        buffers,
        built.balance_scale,
        objective,
        ctx,
        schedule=config.parallel.schedule_of_pipeline(config.model.num_layers),
        micro_batch_size=config.training.micro_batch_size,
        seq_length=config.data.seq_length,
        slices=ctx.tp.size if config.parallel.sequence_parallel else 1,
    )
