"""Moves data between the ranks of an axis, without autograd. Floor 3.

The differentiable operators of `collectives.py` are made of these; the trainer, the optimizer and the checkpoint room
call them directly. Every function must be called by all ranks of the axis. On an axis of one rank nothing is sent. A
`start_*` puts a collective on the wire and returns; other work may run until its `Flight` lands.

gloo's AllGather and ReduceScatter are several times slower than the same built on its AlltoAll and a local sum (4
ranks, 4 MiB: 34 and 62 ms against 7), so on gloo they are built that way; NCCL's own are used on NCCL. gloo's
AllReduce takes 2 (n - 1) messages one after the other; a small sum sends everything to everyone at once instead.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_parm.parallel.context import Axis
from megatron_parm.parallel.watched import Waitable, watched, watching

SMALL_SUM_BYTES = 128 << 10  # what a rank may send in all for a sum in one hop


def _is_gloo(axis: Axis) -> bool:
    return bool(dist.get_backend(axis.group) == "gloo")


def _wire_device(axis: Axis) -> torch.device:
    """Where a small message must lie to be sent: the host for gloo, the accelerator otherwise."""
    accelerator = torch.accelerator.current_accelerator()
    if _is_gloo(axis) or accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


class Flight:
    """A collective on the wire. `sent` and the buffers of `result` must stay untouched until it lands."""

    def __init__(self, work: Waitable | None, sent: Tensor | None, result: Callable[[], Tensor]) -> None:
        self._work = work
        self._sent = sent
        self._result = result

    def land(self) -> Tensor:
        """Wait for it; what it brought."""
        if self._work is not None:
            self._work.wait()
        self._sent = None
        return self._result()


def landed(x: Tensor) -> Flight:
    """A flight for which nothing is sent."""
    return Flight(None, None, lambda: x)


def start_exchange(x: Tensor, axis: Axis) -> Flight:
    """Begin `exchange`."""
    return _start_exchange(x, axis, "all_to_all")


def _start_exchange(x: Tensor, axis: Axis, operation: str, size_bytes: int | None = None) -> Flight:
    """`operation`: what the exchange stands for; `size_bytes`: of that, where it is not that of `x`."""
    if axis.size == 1:
        return landed(x)
    x = x.contiguous()  # gloo silently permutes a non-contiguous tensor
    received = torch.empty_like(x)
    work = dist.all_to_all_single(received, x, group=axis.group, async_op=True)
    return Flight(watched(work, operation, axis, size_bytes or x.nbytes), x, lambda: received)


def start_exchange_uneven(x: Tensor, axis: Axis, send_splits: list[int], receive_splits: list[int]) -> Flight:
    """Begin `exchange_uneven`."""
    if axis.size == 1:
        return landed(x)
    x = x.contiguous()
    received = x.new_empty((sum(receive_splits), *x.shape[1:]))
    work = dist.all_to_all_single(received, x, receive_splits, send_splits, group=axis.group, async_op=True)
    size_bytes = max(x.nbytes, received.nbytes)
    return Flight(watched(work, "all_to_all_uneven", axis, size_bytes), x, lambda: received)


def start_gather_stack(x: Tensor, axis: Axis) -> Flight:
    """Begin `gather_stack`."""
    if axis.size == 1:
        return landed(x.unsqueeze(0))
    x = x.contiguous()
    if _is_gloo(axis):
        return _start_exchange(x.unsqueeze(0).expand(axis.size, *x.shape), axis, "all_gather")
    gathered = x.new_empty((axis.size, *x.shape))
    work = dist.all_gather_into_tensor(gathered, x.unsqueeze(0), group=axis.group, async_op=True)
    return Flight(watched(work, "all_gather", axis, gathered.nbytes), x, lambda: gathered)


def start_scatter_sum(stack: Tensor, axis: Axis) -> Flight:
    """Begin `scatter_sum`."""
    if axis.size == 1:
        return landed(stack.squeeze(0))
    if _is_gloo(axis):
        flight = _start_exchange(stack, axis, "reduce_scatter")
        return Flight(None, None, lambda: flight.land().sum(dim=0))
    stack = stack.contiguous()
    summed = torch.empty_like(stack[0])
    work = dist.reduce_scatter_tensor(summed.unsqueeze(0), stack, group=axis.group, async_op=True)
    return Flight(watched(work, "reduce_scatter", axis, stack.nbytes), stack, lambda: summed)


def start_sum_over(x: Tensor, axis: Axis) -> Flight:
    """Begin `sum_over`."""
    if axis.size == 1:
        return landed(x)
    if _sums_in_one_hop(x, axis):
        flight = _start_exchange(x.unsqueeze(0).expand(axis.size, *x.shape), axis, "all_reduce", x.nbytes)
        return Flight(None, None, lambda: flight.land().sum(dim=0, dtype=x.dtype))
    summed = x.clone(memory_format=torch.contiguous_format)
    work = dist.all_reduce(summed, group=axis.group, async_op=True)
    return Flight(watched(work, "all_reduce", axis, x.nbytes), None, lambda: summed)


def _sums_in_one_hop(x: Tensor, axis: Axis) -> bool:
    return _is_gloo(axis) and x.nbytes * axis.size <= SMALL_SUM_BYTES


def exchange(x: Tensor, axis: Axis) -> Tensor:
    """Send chunk j of dim 0 to rank j and stack what arrives, chunk i from rank i. Dim 0 must divide by the axis."""
    return start_exchange(x, axis).land()


def exchange_uneven(x: Tensor, axis: Axis, send_splits: list[int], receive_splits: list[int]) -> Tensor:
    """Send `send_splits[j]` rows of dim 0 to rank j; receive `receive_splits[i]` from rank i. Zeros are allowed."""
    return start_exchange_uneven(x, axis, send_splits, receive_splits).land()


def gather_stack(x: Tensor, axis: Axis) -> Tensor:
    """Every rank's `x`, stacked in axis order: `[axis.size, *x.shape]`. Shapes must agree."""
    return start_gather_stack(x, axis).land()


def scatter_sum(stack: Tensor, axis: Axis) -> Tensor:
    """Sum of every rank's `stack[my rank]`, where `stack` is `[axis.size, ...]`: ReduceScatter over dim 0."""
    return start_scatter_sum(stack, axis).land()


def sum_over_(x: Tensor, axis: Axis) -> Tensor:
    """Sum of `x` over the axis, in place; `x` must be contiguous."""
    if axis.size > 1:
        assert x.is_contiguous(), "an in-place sum needs a contiguous tensor"
        if _sums_in_one_hop(x, axis):
            return x.copy_(start_sum_over(x, axis).land())
        with watching("all_reduce", axis, x.nbytes):
            dist.all_reduce(x, group=axis.group)
    return x


def sum_over(x: Tensor, axis: Axis) -> Tensor:
    """Sum of `x` over the axis, as a new tensor (or `x` itself on an axis of one rank)."""
    return start_sum_over(x, axis).land()


def max_over(x: Tensor, axis: Axis) -> Tensor:
    """Elementwise maximum over the axis. gloo can lose a NaN here: reduce an is-finite flag with `min_over` too."""
    return _reduce(x, axis, dist.ReduceOp.MAX)


def min_over(x: Tensor, axis: Axis) -> Tensor:
    """Elementwise minimum over the axis."""
    return _reduce(x, axis, dist.ReduceOp.MIN)


def _reduce(x: Tensor, axis: Axis, op: dist.ReduceOp.RedOpType) -> Tensor:
    if axis.size == 1:
        return x
    reduced = x.clone(memory_format=torch.contiguous_format)
    with watching("all_reduce", axis, x.nbytes):
        dist.all_reduce(reduced, op=op, group=axis.group)
    return reduced


def broadcast_(x: Tensor, axis: Axis, source: int = 0) -> Tensor:
    """Overwrite `x` (contiguous) with that of the rank at place `source` of the axis."""
    if axis.size > 1:
        assert x.is_contiguous(), "an in-place broadcast needs a contiguous tensor"
        with watching("broadcast", axis, x.nbytes):
            dist.broadcast(x, src=axis.ranks[source], group=axis.group)
    return x


def gather_text(text: str, axis: Axis) -> list[str]:
    """Every rank's text, in axis order."""
    if axis.size == 1:
        return [text]
    device = _wire_device(axis)
    encoded = torch.frombuffer(bytearray(text.encode() + b"\n"), dtype=torch.uint8).to(device)
    lengths = gather_stack(torch.tensor([encoded.numel()], device=device), axis).flatten().tolist()
    padded = encoded.new_zeros(max(lengths))
    padded[: encoded.numel()] = encoded
    rows = gather_stack(padded, axis).cpu()
    return [row[: length - 1].numpy().tobytes().decode() for row, length in zip(rows, lengths, strict=True)]


def broadcast_text(text: str, axis: Axis, source: int = 0) -> str:
    """The text of the rank at place `source` of the axis; the others' argument is ignored."""
    if axis.size == 1:
        return text
    device = _wire_device(axis)
    encoded = torch.frombuffer(bytearray(text.encode() + b"\n"), dtype=torch.uint8).to(device)
    length = int(broadcast_(torch.tensor([encoded.numel()], device=device), axis, source).item())
    received = broadcast_(encoded if axis.rank == source else encoded.new_empty(length), axis, source)
    return bytes(received.cpu().tolist()[:-1]).decode()


def barrier(axis: Axis) -> None:
    """Wait until every rank of the axis has come here."""
    if axis.size > 1:
        sum_over_(torch.zeros(1, device=_wire_device(axis)), axis)
