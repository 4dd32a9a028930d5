"""Every differentiable collective with its adjoint beside it. Floor 3.

Each is an autograd operator, out of place, called by all ranks of the axis; on an axis of one rank it returns `x`
itself. The gradient that an operator may receive is part of its contract, for a wrong pairing gives a wrong gradient
that no forward test sees:

    operator             forward                  adjoint          gradient it may receive
    split                keep my slice            all-gather       each rank's own slice
    all_gather           join slices              keep my slice    identical on all ranks
    all_gather_summing   join slices              reduce-scatter   partial sums
    reduce_scatter       sum, keep my slice       all-gather       own slice
    all_reduce           sum                      identity         identical on all ranks
    all_reduce_summing   sum                      all-reduce       partial sums
    share                identity                 all-reduce       partial sums
    all_to_all           exchange equal chunks    itself           own chunks
    all_to_all_uneven    exchange uneven chunks   splits swapped   own chunks

Source: parm.md section 3; Shoeybi 2019, section 3 (`share` and `all_reduce` are its f and g).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megatron_parm.parallel import transport
from megatron_parm.parallel.context import Axis


def _my_slice(x: Tensor, axis: Axis, dim: int) -> Tensor:
    if x.shape[dim] % axis.size:
        raise ValueError(f"dim {dim} of {list(x.shape)} is not divisible by the {axis.size} ranks of axis {axis.name}")
    part = x.shape[dim] // axis.size
    return x.narrow(dim, axis.rank * part, part)


def _join(x: Tensor, axis: Axis, dim: int) -> Tensor:
    stack = transport.gather_stack(x, axis)  # [axis, ...]
    return stack.flatten(0, 1) if dim == 0 else torch.cat(stack.unbind(0), dim=dim)


def _sum_and_scatter(x: Tensor, axis: Axis, dim: int) -> Tensor:
    _my_slice(x, axis, dim)  # refuses a dim that does not divide
    dim %= x.dim()
    sizes = (*x.shape[:dim], axis.size, x.shape[dim] // axis.size, *x.shape[dim + 1 :])
    return transport.scatter_sum(x.view(sizes).movedim(dim, 0), axis)  # a view until it is sent


class _Split(Function):
    @staticmethod
    def forward(saved: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        saved.axis, saved.dim = axis, dim
        return _my_slice(x, axis, dim).contiguous()

    @staticmethod
    @once_differentiable
    def backward(saved: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _join(gradient, saved.axis, saved.dim), None, None


class _AllGather(Function):
    @staticmethod
    def forward(saved: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        saved.axis, saved.dim = axis, dim
        return _join(x, axis, dim)

    @staticmethod
    @once_differentiable
    def backward(saved: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _my_slice(gradient, saved.axis, saved.dim).contiguous(), None, None


class _AllGatherSumming(Function):
    @staticmethod
    def forward(saved: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        saved.axis, saved.dim = axis, dim
        return _join(x, axis, dim)

    @staticmethod
    @once_differentiable
    def backward(saved: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _sum_and_scatter(gradient, saved.axis, saved.dim), None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(saved: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        saved.axis, saved.dim = axis, dim
        return _sum_and_scatter(x, axis, dim)

    @staticmethod
    @once_differentiable
    def backward(saved: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _join(gradient, saved.axis, saved.dim), None, None


class _AllReduce(Function):
    @staticmethod
    def forward(saved: Any, x: Tensor, axis: Axis) -> Tensor:
        return transport.sum_over(x, axis)

    @staticmethod
    @once_differentiable
    def backward(saved: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, None


class _AllReduceSumming(Function):
    @staticmethod
    def forward(saved: Any, x: Tensor, axis: Axis) -> Tensor:
        saved.axis = axis
        return transport.sum_over(x, axis)

    @staticmethod
    @once_differentiable
    def backward(saved: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return transport.sum_over(gradient, saved.axis), None


class _Share(Function):
    @staticmethod
    def forward(saved: Any, x: Tensor, axis: Axis) -> Tensor:
        saved.axis = axis
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(saved: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return transport.sum_over(gradient, saved.axis), None


class _AllToAll(Function):
    @staticmethod
    def forward(saved: Any, x: Tensor, axis: Axis) -> Tensor:
        saved.axis = axis
        return transport.exchange(x, axis)

    @staticmethod
    @once_differentiable
    def backward(saved: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return transport.exchange(gradient, saved.axis), None


class _AllToAllUneven(Function):
    @staticmethod
    def forward(saved: Any, x: Tensor, axis: Axis, send_splits: list[int], receive_splits: list[int]) -> Tensor:
        saved.axis, saved.send_splits, saved.receive_splits = axis, send_splits, receive_splits
        return transport.exchange_uneven(x, axis, send_splits, receive_splits)

    @staticmethod
    @once_differentiable
    def backward(saved: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        back = transport.exchange_uneven(gradient, saved.axis, saved.receive_splits, saved.send_splits)
        return back, None, None, None


def _apply(function: type[Function], x: Tensor, axis: Axis, *arguments: Any) -> Tensor:
    if axis.size == 1:
        return x
    result = function.apply(x, axis, *arguments)  # type: ignore[no-untyped-call]
    assert isinstance(result, Tensor)
    return result


def split(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's slice of an `x` that is identical on the axis. Gradient: own slice in, joined out."""
    return _apply(_Split, x, axis, dim)


def all_gather(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """The slices joined, for a result that every rank uses alike. Gradient: identical in, own slice out."""
    return _apply(_AllGather, x, axis, dim)


def all_gather_summing(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """The slices joined, for a result that each rank uses differently. Gradient: partial in, summed own slice out."""
    return _apply(_AllGatherSumming, x, axis, dim)


def reduce_scatter(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's slice of the sum over the axis. Gradient: own slice in, joined out."""
    return _apply(_ReduceScatter, x, axis, dim)


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """The sum over the axis, for a result that every rank uses alike. Gradient: identical in, unchanged out."""
    return _apply(_AllReduce, x, axis)


def all_reduce_summing(x: Tensor, axis: Axis) -> Tensor:
    """The sum over the axis, for a result that each rank uses differently. Gradient: partial in, summed out."""
    return _apply(_AllReduceSumming, x, axis)


def share(x: Tensor, axis: Axis) -> Tensor:
    """`x` itself, identical on the axis, before each rank uses it differently. Gradient: partial in, summed out."""
    return _apply(_Share, x, axis)


def all_to_all(x: Tensor, axis: Axis) -> Tensor:
    """Chunk j of dim 0 goes to rank j; what rank i sent becomes chunk i. Gradient: the chunks travel back."""
    return _apply(_AllToAll, x, axis)


def all_to_all_uneven(x: Tensor, axis: Axis, send_splits: list[int], receive_splits: list[int]) -> Tensor:
    """As `all_to_all` with chunks of the given numbers of rows, zero included. Gradient: the rows travel back."""
    return _apply(_AllToAllUneven, x, axis, send_splits, receive_splits)
