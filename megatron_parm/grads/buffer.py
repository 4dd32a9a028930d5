"""Contiguous buffers in which gradients accumulate over the micro-batches of a step. Floor 4.

One buffer per role and gradient dtype, because a collective sums one flat tensor over one axis; tied embeddings have
their own, so that the first and the last stage add its parts in one order and get the same bits. Slots lie in the
reverse order of the parameters: backward fills a buffer from its front, so that a reduction may start before backward
has ended.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megatron_parm.parallel.context import Axis, ParallelContext
from megatron_parm.parallel.sharding import Part, Role, ShardSpec, equal_parts, spec_of

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

    `reduced` is what a reduction leaves on this rank: the whole gradient, or with `sharded` (ZeRO-1) this rank's part
    of it, which no other replica has. Whatever comes after the reduction works on that.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], ctx: ParallelContext, *, sharded: bool = False) -> None:
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
        self.parts = {name: _own_part(p, ctx) for name, p in self.parameters.items()} if sharded else {}
        self._reduced = {name: _reduced_place(own_views[name], self.parts.get(name)) for name in self.parameters}

    def zero(self) -> None:
        """Set every gradient to zero: the start of a step."""
        for buffer in self.buffers:
            buffer.data.zero_()

    @property
    def is_sharded(self) -> bool:
        """Whether the replicas share the reduced gradients out among them."""
        return bool(self.parts)

    def scale(self, factor: float) -> None:
        """Multiply every reduced gradient by `factor`."""
        for values in self._reduced.values() if self.is_sharded else (buffer.data for buffer in self.buffers):
            values.mul_(factor)

    def reduced(self, name: str) -> Tensor:
        """This rank's reduced gradient of the parameter: whole, or its part. Valid after a reduction."""
        return self._reduced[name]

    def reduced_spec(self, name: str) -> ShardSpec:
        """Which box of the global tensor `reduced` is."""
        return replace(spec_of(self.parameters[name]), part=self.parts.get(name))

    def gradient_of(self, name: str) -> Tensor:
        """The accumulated gradient of the parameter called `name`, in its shape; it shares the buffer's memory."""
        return self._views[name]

    def collect(self) -> None:
        """Take in gradients of 16-bit parameters that were set without autograd's hooks: by a pass over weights alone.

        A gradient of float32 or float64 is added to its view of the buffer by whoever computes it.
        """
        for name, parameter in self.parameters.items():
            if parameter.grad is not None and parameter.dtype != self._views[name].dtype:
                self._views[name].add_(parameter.grad)
                parameter.grad = None

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
        axis = ctx.dp_gradients if role == "dense" else ctx.edp_gradients
        data = torch.zeros(end, dtype=dtype, device=slots[0].parameter.device)
        buffers.append(GradientBuffer(role, axis, data, tuple(slots), is_tied))
    return tuple(buffers)


def _own_part(parameter: nn.Parameter, ctx: ParallelContext) -> Part:
    axis = ctx.dp if spec_of(parameter).role == "dense" else ctx.edp
    return equal_parts(tuple(parameter.shape), axis.size)[axis.rank]


def _reduced_place(view: Tensor, part: Part | None) -> Tensor:
    """Where a reduction leaves its result: in the buffer, save for a part that optimizer kernels could not walk."""
    if part is None:
        return view
    own = part.of(view)
    return own if own.is_contiguous() else torch.zeros_like(own, memory_format=torch.contiguous_format)


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
