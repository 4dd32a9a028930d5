"""Contiguous buffers in which gradients accumulate over the micro-batches of a step. Floor 4.

One buffer per role and gradient dtype, because a collective sums one flat tensor over one axis; tied embeddings have
their own, so that the first and the last stage add its parts in one order and get the same bits. Slots lie in the
reverse order of the parameters: backward fills a buffer from its front, so that a reduction may start before backward
has ended.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_parm.parallel.context import Axis, ParallelContext
from megatron_parm.parallel.sharding import Role, spec_of

# Slots start at multiples of this many elements, 64 bytes in float32, so that vectorised kernels may load whole lines.
ALIGNMENT_ELEMENTS = 16


@dataclass(frozen=True)
class Slot:
    """The place of one parameter's gradient in its buffer: elements `start` to `stop`."""

    name: str
    parameter: nn.Parameter
    start: int
    stop: int


@dataclass(frozen=True)
class GradientBuffer:
    """The gradients of all parameters of one role and dtype in one flat tensor; zeros between the slots.

    `axis` joins the ranks that hold replicas of these parameters: dp for dense ones, edp for experts. `is_tied`: the
    first and the last stage of the pipeline hold these parameters both (`ShardSpec.is_tied`).
    """

    role: Role
    axis: Axis
    data: Tensor
    slots: tuple[Slot, ...]
    is_tied: bool = False

    def gradient(self, slot: Slot) -> Tensor:
        """The gradient in `slot`, in the shape of its parameter; it shares the buffer's memory."""
        return self.data[slot.start : slot.stop].view(slot.parameter.shape)


def gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients accumulate: float32 for 16-bit parameters, the parameter's own for others."""
    return torch.float32 if dtype.itemsize < torch.float32.itemsize else dtype


class GradientBuffers:
    """The accumulated gradients of a model: one for every parameter, exactly zero after `zero()`, never absent.

    A parameter of float32 or float64 has a view of the buffer as its `grad`, and autograd adds into it; nobody may
    set it to None. A 16-bit parameter's gradient is added to a float32 view after each backward and then freed. A
    parameter that appears under two names (tied weights) has one slot, under its first name.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], ctx: ParallelContext) -> None:
        self.parameters: dict[str, nn.Parameter] = {}
        first_names: dict[int, str] = {}
        for name, parameter in parameters.items():
            if first_names.setdefault(id(parameter), name) == name:
                self.parameters[name] = parameter
        self.buffers = _make_buffers(self.parameters, ctx)
        own_views = {slot.name: buffer.gradient(slot) for buffer in self.buffers for slot in buffer.slots}
        self._views = {name: own_views[first_names[id(parameter)]] for name, parameter in parameters.items()}
        for name, parameter in self.parameters.items():
            _attach(parameter, own_views[name])

    def zero(self) -> None:
        """Set every gradient to zero: the start of a step."""
        for buffer in self.buffers:
            buffer.data.zero_()

    def scale(self, factor: float) -> None:
        """Multiply every gradient by `factor`."""
        for buffer in self.buffers:
            buffer.data.mul_(factor)

    def gradient_of(self, name: str) -> Tensor:
        """The accumulated gradient of the parameter called `name`, in its shape; it shares the buffer's memory."""
        return self._views[name]

    def expect_attached(self) -> None:
        """Check that autograd still accumulates into the buffers; AssertionError names a parameter that left."""
        for name, parameter in self.parameters.items():
            view = self._views[name]
            expected = view if parameter.dtype == view.dtype else None
            assert parameter.grad is expected, f"the gradient of {name} was replaced; use GradientBuffers.zero()"


def _make_buffers(parameters: dict[str, nn.Parameter], ctx: ParallelContext) -> tuple[GradientBuffer, ...]:
    members: dict[tuple[Role, bool, torch.dtype], list[str]] = {}
    for name, parameter in reversed(parameters.items()):
        spec = spec_of(parameter)
        members.setdefault((spec.role, spec.is_tied, gradient_dtype(parameter.dtype)), []).append(name)
    buffers = []
    # sorted: every rank of an axis reduces its buffers in the same order, whatever order the names came in
    for role, is_tied, dtype in sorted(members, key=str):
        slots, end = [], 0
        for name in members[role, is_tied, dtype]:
            start = -(-end // ALIGNMENT_ELEMENTS) * ALIGNMENT_ELEMENTS
            end = start + parameters[name].numel()
            slots.append(Slot(name, parameters[name], start, end))
        axis = ctx.dp if role == "dense" else ctx.edp
        data = torch.zeros(end, dtype=dtype, device=slots[0].parameter.device)
        buffers.append(GradientBuffer(role, axis, data, tuple(slots), is_tied))
    return tuple(buffers)


def _attach(parameter: nn.Parameter, view: Tensor) -> None:
    if parameter.dtype == view.dtype:
        parameter.grad = view
    else:
        parameter.register_post_accumulate_grad_hook(_move_into(view))  # type: ignore[no-untyped-call]  # torch's


def _move_into(view: Tensor) -> Callable[[Tensor], None]:
    def move(parameter: Tensor) -> None:
        assert parameter.grad is not None
        view.add_(parameter.grad)
        parameter.grad = None

    return move
