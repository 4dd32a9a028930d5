"""Collectives that run beside other work, forward and backward. Floor 3.

`start` puts a collective on the wire and returns at once; `finish` waits for it and gives the result. Between the two
anything else may run: experts, or a collective on another group. Backward mirrors it without further words: the
adjoint of `finish` starts the adjoint collective, the adjoint of `start` waits for it, so what overlapped forward
overlaps backward.

All ranks of an axis start and finish the same collectives in the same order; autograd visits later-made nodes first,
so the order of backward is the same on all ranks too. Only asynchronous handles are used: the same code overlaps on
gloo and NCCL.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megatron_parm.parallel import transport
from megatron_parm.parallel.context import Axis
from megatron_parm.parallel.transport import Flight

T = TypeVar("T")
S = TypeVar("S")


class Collective(Protocol):
    """A collective and its adjoint, as asynchronous flights."""

    def forward(self, x: Tensor) -> Flight:
        """Put `x` on the wire."""

    def adjoint(self, gradient: Tensor) -> Flight:
        """Put the gradient of the result on the wire."""


@dataclass(frozen=True)
class AllToAll:
    """Equal chunks of dim 0; see `collectives.all_to_all`."""

    axis: Axis

    def forward(self, x: Tensor) -> Flight:
        """Chunk j goes to rank j."""
        return transport.start_exchange(x, self.axis)

    adjoint = forward


@dataclass(frozen=True)
class AllToAllUneven:
    """Uneven chunks of dim 0; see `collectives.all_to_all_uneven`."""

    axis: Axis
    send_splits: list[int]
    receive_splits: list[int]

    def forward(self, x: Tensor) -> Flight:
        """The rows travel there."""
        return transport.start_exchange_uneven(x, self.axis, self.send_splits, self.receive_splits)

    def adjoint(self, gradient: Tensor) -> Flight:
        """The rows travel back."""
        return transport.start_exchange_uneven(gradient, self.axis, self.receive_splits, self.send_splits)


@dataclass(frozen=True)
class StackIdentical:
    """Every rank's tensor, stacked, for a result that every rank uses alike: `[axis, ...]`; see
    `collectives.all_gather`."""

    axis: Axis

    def forward(self, x: Tensor) -> Flight:
        """AllGather."""
        return transport.start_gather_stack(x, self.axis)

    def adjoint(self, gradient: Tensor) -> Flight:
        """The own slice; nothing is sent."""
        return transport.landed(gradient[self.axis.rank].contiguous())


@dataclass(frozen=True)
class OwnSlice:
    """`stack[my rank]` of a stack that is identical on the axis: the adjoint of `StackIdentical`."""

    axis: Axis

    def forward(self, x: Tensor) -> Flight:
        """The own slice; nothing is sent."""
        return transport.landed(x[self.axis.rank].contiguous())

    def adjoint(self, gradient: Tensor) -> Flight:
        """AllGather."""
        return transport.start_gather_stack(gradient, self.axis)


@dataclass(frozen=True)
class StackSumming:
    """Every rank's tensor, stacked, for a result that each rank uses differently: `[axis, ...]`; gradients are
    summed."""

    axis: Axis

    def forward(self, x: Tensor) -> Flight:
        """AllGather."""
        return transport.start_gather_stack(x, self.axis)

    def adjoint(self, gradient: Tensor) -> Flight:
        """ReduceScatter."""
        return transport.start_scatter_sum(gradient, self.axis)


@dataclass(frozen=True)
class ScatterSum:
    """The sum of every rank's `stack[my rank]`: the adjoint of `StackSumming`."""

    axis: Axis

    def forward(self, x: Tensor) -> Flight:
        """ReduceScatter."""
        return transport.start_scatter_sum(x, self.axis)

    def adjoint(self, gradient: Tensor) -> Flight:
        """AllGather."""
        return transport.start_gather_stack(gradient, self.axis)


@dataclass(frozen=True)
class AllReduceSumming:
    """The sum over the axis, for a result that each rank uses differently; see `collectives.all_reduce_summing`."""

    axis: Axis

    def forward(self, x: Tensor) -> Flight:
        """AllReduce."""
        return transport.start_sum_over(x, self.axis)

    adjoint = forward


class _Wire:
    """What forward and backward of one collective know of each other."""

    def __init__(self, collective: Collective) -> None:
        self.collective = collective
        self.flight: Flight | None = None

    def land(self) -> Tensor:
        """Wait for what is on the wire and take it off."""
        assert self.flight is not None, "nothing is on the wire"
        landed = self.flight.land()
        self.flight = None
        return landed


@dataclass(frozen=True)
class Pending(Generic[T]):
    """A collective on its way, and what its result will be seen as. `token` carries it through autograd; its values
    mean nothing.

    The operators hold the wire alone: one that held the token too would keep itself, and with it the graph, alive.
    """

    wire: _Wire
    token: Tensor
    view: Callable[[Tensor], T]

    def then(self, view: Callable[[T], S]) -> "Pending[S]":
        """The same collective, its result passed on to `view` when it arrives."""
        return Pending(self.wire, self.token, lambda result: view(self.view(result)))


class _Start(Function):
    @staticmethod
    def forward(saved: Any, x: Tensor, wire: _Wire) -> Tensor:
        saved.wire = wire
        wire.flight = wire.collective.forward(x)
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(saved: Any, _token: Tensor) -> tuple[Tensor | None, ...]:
        return saved.wire.land(), None


class _Finish(Function):
    @staticmethod
    def forward(saved: Any, token: Tensor, wire: _Wire) -> Tensor:
        saved.wire = wire
        saved.token = (token.dtype, token.device)
        return wire.land().detach()  # on an axis of one rank it is the very tensor that was started

    @staticmethod
    @once_differentiable
    def backward(saved: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        saved.wire.flight = saved.wire.collective.adjoint(gradient)
        dtype, device = saved.token
        return torch.empty(0, dtype=dtype, device=device), None


def start(x: Tensor, collective: Collective) -> Pending[Tensor]:
    """Put `x` on the wire; `x` must not be written until `finish`. Call on all ranks of the collective's axis."""
    wire = _Wire(collective)
    return Pending(wire, _Start.apply(x, wire), lambda result: result)  # type: ignore[no-untyped-call]


def finish(pending: Pending[T]) -> T:
    """Wait for a started collective; its result. Once for each start."""
    result = _Finish.apply(pending.token, pending.wire)  # type: ignore[no-untyped-call]
    assert isinstance(result, Tensor)
    return pending.view(result)
