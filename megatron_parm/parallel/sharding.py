"""How a parameter lies over the ranks: the one source for clipping, gradient reduction and checkpoints. Floor 3.

Every parameter of a model carries a `ShardSpec` (set by `make_parameter`, read by `spec_of`). A dense parameter is
replicated over dp, and over tp where no dim is cut by it; an expert parameter is replicated over edp, and over ep or
esp where no dim is cut by them. Each rank holds a contiguous box of the global tensor.
"""

import itertools
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from megatron_parm.parallel.context import Axis, ParallelContext

Role = Literal["dense", "expert"]


@dataclass(frozen=True)
class Cut:
    """Dim `dim` of the global tensor is cut in equal parts over `axis`."""

    dim: int
    axis: Axis


@dataclass(frozen=True)
class Part:
    """Rows `start` to `stop` along `dim` of a tensor."""

    dim: int
    start: int
    stop: int

    def of(self, whole: Tensor) -> Tensor:
        """The part of `whole`; it shares its memory."""
        return whole.narrow(self.dim, self.start, self.stop - self.start)


def equal_parts(shape: tuple[int, ...], count: int) -> tuple[Part, ...]:
    """A tensor of `shape` in `count` parts whose rows differ by one at most; some may be empty.

    Cut along the first dim that divides evenly, else along the longest.
    """
    even = [dim for dim, size in enumerate(shape) if size % count == 0]
    dim = even[0] if even else max(range(len(shape)), key=lambda dim: shape[dim])
    edges = [shape[dim] * place // count for place in range(count + 1)]
    return tuple(Part(dim, start, stop) for start, stop in itertools.pairwise(edges))


@dataclass(frozen=True)
class ShardSpec:
    """The global shape of a parameter, its cuts, its role, and whether weight decay applies.

    `role` says who holds replicas: "dense" over dp, "expert" over edp. `decays` is False for biases and norm weights.
    `is_tied`: the first and the last stage of a pipeline hold it both, each with a part of its gradient, to be summed
    over `ends` (grads/finish.py).
    `part`: this rank holds only that part of its box, the replicas hold the others (sharded optimizer state).
    `is_partial_on_tp`: every rank of tp holds the whole parameter but uses it on its own slice of the sequence, so
    backward leaves a part of the gradient on each, to be summed (grads/finish.py).
    """

    global_shape: tuple[int, ...]
    cuts: tuple[Cut, ...]
    role: Role
    decays: bool
    is_tied: bool = False
    part: Part | None = None
    is_partial_on_tp: bool = False

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's box."""
        return tuple(piece.stop - piece.start for piece in self.box)

    @property
    def box(self) -> tuple[slice, ...]:
        """This rank's box as slices of the global tensor."""
        slices = [slice(0, size) for size in self.global_shape]
        for cut in self.cuts:
            part = self.global_shape[cut.dim] // cut.axis.size
            slices[cut.dim] = slice(cut.axis.rank * part, (cut.axis.rank + 1) * part)
        if self.part is not None:
            first = slices[self.part.dim].start
            slices[self.part.dim] = slice(first + self.part.start, first + self.part.stop)
        return tuple(slices)

    def is_cut_by(self, axis_name: str) -> bool:
        """Whether some dim is cut over the axis of that name."""
        return any(cut.axis.name == axis_name for cut in self.cuts)

    def is_counted_here(self, ctx: ParallelContext) -> bool:
        """Whether this rank counts the parameter in sums over the world: of all replicas of a box exactly one does."""
        if self.is_tied and ctx.ends.rank > 0:
            return False
        is_shared_out = self.part is not None
        if self.role == "dense":
            return (is_shared_out or ctx.dp.rank == 0) and (ctx.tp.rank == 0 or self.is_cut_by("tp"))
        counted = is_shared_out or ctx.edp.rank == 0
        for axis in (ctx.ep, ctx.esp):
            counted = counted and (axis.rank == 0 or self.is_cut_by(axis.name))
        return counted


def make_parameter(
    global_shape: tuple[int, ...],
    *cuts: Cut,
    role: Role = "dense",
    decays: bool = True,
    is_partial_on_tp: bool = False,
    dtype: torch.dtype,
    device: torch.device,
) -> nn.Parameter:
    """An uninitialised parameter that holds this rank's box of `global_shape`, with its `ShardSpec` attached.

    Raises ValueError if a dim is not divisible by its axis, which entrances have checked before, or is cut twice.
    """
    if len({cut.dim for cut in cuts}) < len(cuts):
        raise ValueError(f"a dim of {global_shape} is cut over two axes; a box has one cut a dim")
    for cut in cuts:
        if global_shape[cut.dim] % cut.axis.size:
            raise ValueError(f"dim {cut.dim} of {global_shape} is not divisible by {cut.axis.name} = {cut.axis.size}")
    spec = ShardSpec(global_shape, cuts, role, decays, is_partial_on_tp=is_partial_on_tp)
    parameter = nn.Parameter(torch.empty(spec.local_shape, dtype=dtype, device=device))
    parameter.shard_spec = spec  # type: ignore[attr-defined]  # torch allows attributes on a Parameter
    return parameter


def tie(parameter: nn.Parameter) -> None:
    """Note that `parameter` lies on the first and the last stage of a pipeline of several."""
    parameter.shard_spec = replace(spec_of(parameter), is_tied=True)  # type: ignore[attr-defined]


def make_state(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that are part of the model but no parameter, whole on every rank: for `register_buffer`.

    Such a buffer is saved and loaded beside the parameters; its type is its own, whatever the model's.
    """
    state = torch.zeros(shape, dtype=dtype, device=device)
    state.shard_spec = ShardSpec(shape, (), "dense", False)  # type: ignore[attr-defined]  # torch allows attributes
    return state


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor of a model that a checkpoint holds, by name: the parameters, and the buffers of `make_state`."""
    found: dict[str, Tensor] = dict(model.named_parameters())
    found |= {name: buffer for name, buffer in model.named_buffers() if hasattr(buffer, "shard_spec")}
    return found


def spec_of(parameter: Tensor) -> ShardSpec:
    """The `ShardSpec` of a parameter. Every parameter of a model has one."""
    spec = getattr(parameter, "shard_spec", None)
    assert isinstance(spec, ShardSpec), "a parameter was made without make_parameter"
    return spec
