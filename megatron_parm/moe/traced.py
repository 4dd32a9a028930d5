"""The stages of an MoE layer as spans of a trace, forward and backward. Floor 5.

A stage's backward is the time from the last gradient of its outputs to the first of its inputs; operators that change
nothing, at both ends of the stage, tell when gradients pass. Without a recording none of this is in the way.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.autograd import Function

from megatron_parm.moe import buckets, node_rows
from megatron_parm.moe.buckets import Buckets, Packed
from megatron_parm.moe.node_rows import NodeRows
from megatron_parm.moe.routing import Routing
from megatron_parm.observe.trace import COMPUTE, Trace
from megatron_parm.parallel.context import Axis, ParallelContext


class _Passing(Function):
    """Changes nothing; calls `note` when the gradient passes."""

    @staticmethod
    def forward(saved: Any, x: Tensor, note: Callable[[], None]) -> Tensor:
        saved.note = note
        return x.view_as(x)

    @staticmethod
    def backward(saved: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        saved.note()
        return gradient, None


class _Stage:
    """One visit of a stage: its forward is the block of `forward`, its backward lies between its two ends."""

    def __init__(self, trace: Trace, name: str) -> None:
        self._trace = trace
        self._name = name
        self._backward_since: int | None = None

    @contextmanager
    def forward(self) -> Iterator[None]:
        with self._trace.span(self._name):
            yield

    def enter(self, x: Tensor) -> Tensor:
        """`x`, an input of the stage."""
        return _Passing.apply(x, self._note_end)  # type: ignore[no-untyped-call,no-any-return]

    def leave(self, x: Tensor) -> Tensor:
        """`x`, an output of the stage."""
        return _Passing.apply(x, self._note_start)  # type: ignore[no-untyped-call,no-any-return]

    def enter_buckets(self, part: Buckets) -> Buckets:
        """A chunk of the stage's inputs."""
        return replace(part, rows=self.enter(part.rows)) if isinstance(part, Packed) else self.enter(part)

    def leave_buckets(self, part: Buckets) -> Buckets:
        """A chunk of the stage's outputs."""
        return replace(part, rows=self.leave(part.rows)) if isinstance(part, Packed) else self.leave(part)

    def _note_start(self) -> None:
        self._backward_since = self._trace.now_ns()

    def _note_end(self) -> None:
        if self._backward_since is not None:
            name = f"{self._name} backward"
            self._trace.add(COMPUTE, name, "compute", self._backward_since, self._trace.now_ns())
            self._backward_since = None


def dispatch(tokens: Tensor, routing: Routing) -> list[Buckets]:
    """`buckets.dispatch`, told to the trace of the routing."""
    if not routing.trace.is_recording:
        return buckets.dispatch(tokens, routing)
    stage = _Stage(routing.trace, "dispatch")
    with stage.forward():
        return [stage.leave_buckets(part) for part in buckets.dispatch(stage.enter(tokens), routing)]


def combine(parts: Sequence[Buckets], routing: Routing) -> Tensor:
    """`buckets.combine`, told to the trace of the routing."""
    if not routing.trace.is_recording:
        return buckets.combine(parts, routing)
    stage = _Stage(routing.trace, "combine")
    with stage.forward():
        return stage.leave(buckets.combine([stage.enter_buckets(part) for part in parts], routing))


def carry(tokens: Tensor, routing: Routing, ctx: ParallelContext, chunks: int) -> list[NodeRows]:
    """`node_rows.carry`, told to the trace of the routing."""
    if not routing.trace.is_recording:
        return node_rows.carry(tokens, routing, ctx, chunks)
    stage = _Stage(routing.trace, "dispatch")
    with stage.forward():
        parts = node_rows.carry(stage.enter(tokens), routing, ctx, chunks)
        return [replace(part, rows=stage.leave(part.rows)) for part in parts]


def settle(parts: Sequence[NodeRows], routing: Routing) -> Tensor:
    """`node_rows.settle`, told to the trace of the routing."""
    if not routing.trace.is_recording:
        return node_rows.settle(parts)
    stage = _Stage(routing.trace, "combine")
    with stage.forward():
        return stage.leave(node_rows.settle([replace(part, rows=stage.enter(part.rows)) for part in parts]))


@dataclass(frozen=True)
class TracedGate:
    """A gate, told to a trace, whose routings carry it to dispatch and combine."""

    route: Callable[..., Routing]
    trace: Trace

    def __call__(self, tokens: Tensor, **how: Axis | int | bool | None) -> Routing:
        """The routing of `tokens`."""
        stage = _Stage(self.trace, "gate")
        with stage.forward():
            routing = self.route(stage.enter(tokens), **how)
            return replace(routing, weight=stage.leave(routing.weight), trace=self.trace)


@dataclass(frozen=True)
class TracedExperts:
    """Experts, told to a trace."""

    compute: Callable[..., Buckets]
    trace: Trace

    def __call__(self, inbox: Buckets, *, copies: int = 1) -> Buckets:
        """The outputs, in the layout of `inbox`."""
        stage = _Stage(self.trace, "experts")
        with stage.forward():
            return stage.leave_buckets(self.compute(stage.enter_buckets(inbox), copies=copies))


@dataclass(frozen=True)
class TracedBlock:
    """What a schedule orders, told to a trace."""

    gate: TracedGate
    experts: TracedExperts
    sequence_parallel: bool
