"""Micro-batches through the stages of a pipeline: a thin adapter on torch.distributed.pipelining. Floor 6.

What torch leaves to its user is decided here, once: losses are divided by the caller (scale_grads=False); shapes are
told beforehand, so that no extra forward pass runs collectives; one schedule object for each number of micro-batches;
evaluation has stages of its own and keeps nothing. Sources: torch.distributed.pipelining; Narayanan 2021 (1F1B,
interleaved), Qi 2023 (zero-bubble).
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from megatron_parm.observe.trace import Trace
from megatron_parm.parallel.context import Axis

ScheduleName = Literal["1f1b", "interleaved", "zero-bubble"]
Schedule = Schedule1F1B | ScheduleGPipe | ScheduleInterleaved1F1B | ScheduleInterleavedZeroBubble

SCHEDULES: dict[ScheduleName, type[Schedule]] = {
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
}
GROUP_ROUNDS = 4  # of an evaluation: pipelines full before it is emptied
FORWARD, BACKWARD, WEIGHTS = "forward", "backward", "weights"  # names of spans


def nothing() -> None:
    """What is to be done after a pass over weights where gradients are in place already."""


@dataclass(frozen=True)
class WireShapes:
    """What a stage takes and gives, as tensors on the meta device: ids [b, s] first, hidden states [s, b, h] between.

    `losses` [k]: what the last stage gives.
    """

    tokens: Tensor
    hidden: Tensor
    losses: Tensor


class _TracedStage(PipelineStage):
    """Torch's stage, with spans around its passes, its gradients contiguous for the wire, its errors as they were."""

    trace: Trace
    after_weights: Callable[[], None]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._span(FORWARD, fwd_chunk_id), _cause_alone(self.stage_index):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        if not self.has_backward:
            return
        with self._span(BACKWARD, bwd_chunk_id), _cause_alone(self.stage_index):
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        gradients = self.bwd_cache.get(bwd_chunk_id, ())
        self.bwd_cache[bwd_chunk_id] = tuple(None if one is None else one.contiguous() for one in gradients)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        if not self.has_backward:
            return
        with self._span(WEIGHTS, bwd_chunk_id), _cause_alone(self.stage_index):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
            self.after_weights()

    def _span(self, name: str, micro_batch: int) -> AbstractContextManager[None]:
        return self.trace.span(name, stage=self.stage_index, micro_batch=micro_batch)


@contextmanager
def _cause_alone(stage: int) -> Iterator[None]:
    """Let an error out as it was raised in the stage: torch wraps it, and its kind decides what is done about it."""
    try:
        yield
    except RuntimeError as error:
        if error.__cause__ is None:
            raise
        error.__cause__.add_note(f"in pipeline stage {stage}")
        raise error.__cause__ from None


@contextmanager
def _without_torch_dumps() -> Iterator[None]:
    """Torch logs the whole schedule when a stage fails; the error itself is told by whoever catches it."""
    logger = logging.getLogger("torch.distributed.pipelining.schedules")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@dataclass
class Pipeline:
    """This rank's stages, `parts` in order; stage i of all is on rank i % pp of `axis`. Call on all ranks of it.

    A part is called as part(x, **tensors), where x are ids or hidden states and the others those of the micro-batch;
    the last part returns losses [k], the others hidden states. Micro-batches hold "tokens" and what else the parts
    want, on every stage alike; all are cut along dim 0, and no shape may change. The trace of `axis` is told of every
    pass. The weights' pass of zero-bubble sets gradients without autograd's hooks: `after_weights` follows each.
    """

    parts: Sequence[nn.Module]
    schedule: ScheduleName
    shapes: WireShapes
    axis: Axis
    device: torch.device
    after_weights: Callable[[], None] = nothing
    _training: list[PipelineStage] = field(init=False)
    _evaluation: list[PipelineStage] = field(init=False)
    _schedules: dict[tuple[bool, int], Schedule] = field(init=False, default_factory=dict)
    _losses: list[Tensor] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._training = self._make_stages()
        self._evaluation = self._make_stages()

    @property
    def is_first(self) -> bool:
        """Whether this rank has the stage that reads tokens."""
        return self.axis.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank has the stage that gives losses."""
        return self.axis.rank == self.axis.size - 1

    def train(self, micro_batches: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """Forward and backward of all micro-batches: the losses [k] of each on the last stage, none on the others.

        Gradients are those of the sum of all losses.
        """
        schedule: Any = self._schedule_for(len(micro_batches), trains=True)
        tokens, others = self._joined(micro_batches)
        self._losses.clear()
        with _without_torch_dumps():
            target = torch.zeros(len(micro_batches), device=self.device)  # torch wants one; the losses know theirs
            schedule.step(*tokens, target=target, return_outputs=False, **others)
        return list(self._losses)

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """Forward alone: what the last stage gave for each micro-batch, nothing on the others. Nothing is kept."""
        schedule: Any = self._schedule_for(len(micro_batches), trains=False)
        tokens, others = self._joined(micro_batches)
        with _without_torch_dumps():
            merged = schedule.step(*tokens, **others)  # [micro-batches * k]
        for stage in self._evaluation:
            stage.clear_runtime_states()
        return list(merged.view(len(micro_batches), -1).unbind(0)) if self.is_last else []

    def _make_stages(self) -> list[PipelineStage]:
        num_stages = self.axis.size * len(self.parts)
        stages: list[PipelineStage] = []
        for number, part in enumerate(self.parts):
            place = self.axis.rank + number * self.axis.size
            stage = _TracedStage(
                part,
                place,
                num_stages,
                self.device,
                input_args=self.shapes.tokens if place == 0 else self.shapes.hidden,
                output_args=self.shapes.losses if place == num_stages - 1 else self.shapes.hidden,
                group=self.axis.group,
            )
            stage.trace, stage.after_weights = self.axis.trace, self.after_weights
            stages.append(stage)
        return stages

    def _schedule_for(self, num_micro_batches: int, *, trains: bool) -> Schedule:
        """The schedule object for so many micro-batches; torch's are bound to one number."""
        key = trains, num_micro_batches
        if key not in self._schedules:
            stages = self._training if trains else self._evaluation
            rules = {"loss_fn": self._keep_and_add if trains else None, "scale_grads": False}
            kind: Any = ScheduleInterleaved1F1B
            if trains:
                kind = SCHEDULES[self.schedule]
            elif len(stages) == 1:
                kind = ScheduleGPipe
            takes_one = kind in (Schedule1F1B, ScheduleGPipe)
            self._schedules[key] = kind(stages[0] if takes_one else stages, num_micro_batches, **rules)
        return self._schedules[key]

    def _keep_and_add(self, losses: Tensor, target: Tensor) -> Tensor:
        self._losses.append(losses.detach().clone())
        return losses.sum()

    def _joined(self, micro_batches: Sequence[Mapping[str, Tensor]]) -> tuple[list[Tensor], dict[str, Tensor]]:
        """The micro-batches one after another, as torch wants them before it cuts them: tokens, everything else."""
        for micro_batch in micro_batches:
            found, declared = micro_batch["tokens"].shape, self.shapes.tokens.shape
            assert found == declared, f"a micro-batch of {list(found)} tokens in a pipeline made for {list(declared)}"
        joined = {name: torch.cat([one[name] for one in micro_batches]) for name in micro_batches[0]}
        tokens = joined.pop("tokens")
        return [tokens] if self.is_first else [], joined


def evaluation_groups(num_micro_batches: int, pp: int) -> list[int]:
    """Sizes of the groups in which so many micro-batches are evaluated, each of which every schedule runs.

    A group fills the pipeline once, so longer ones idle less; one keeps a boundary activation for each micro-batch.
    """
    longest = GROUP_ROUNDS * pp
    groups = [longest] * (num_micro_batches // longest)
    rest = num_micro_batches % longest
    return groups + [size for size in (rest // pp * pp, rest % pp) if size]
