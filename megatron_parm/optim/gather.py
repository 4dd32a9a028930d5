"""Brings the parts of updated parameters together, for ZeRO-1: at once, or beside the next forward. Floor 5.

Each replica has updated its part of every parameter; an AllGather over dp (experts: over edp) makes the parameters
whole again. Beside forward (--overlap-param-gather) all gathers go out at once, in the order in which forward needs
them, and a module waits for its own parameters just before it runs.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_parm.grads.bucket import BUCKET_ELEMENTS
from megatron_parm.grads.rows import Rows
from megatron_parm.grads.staging import Staging
from megatron_parm.parallel.context import Axis, ParallelContext
from megatron_parm.parallel.into_buffers import start_gather_into
from megatron_parm.parallel.sharding import Part, Role, spec_of


@dataclass(frozen=True)
class Bundle:
    """Parameters of one role and dtype that travel in one AllGather over `axis`."""

    axis: Axis
    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    rows: Rows


class ParameterGather:
    """Gathers the parameters of which each replica holds a part."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        parts: Mapping[str, Part],
        ctx: ParallelContext,
        bucket_elements: int = BUCKET_ELEMENTS,
    ) -> None:
        self._parts = parts
        self._bundles = _make_bundles(parameters, ctx, bucket_elements)
        self._bundle_of = {name: place for place, bundle in enumerate(self._bundles) for name in bundle.names}
        self._staging = Staging(ctx.device)
        self._landings: dict[int, Callable[[], None]] = {}  # by bundle, of those on the wire
        self._is_overlapped = False

    def overlap_with(self, model: nn.Module) -> None:
        """From now on gather beside the forward of `model`.

        The layers of its lists and dicts of modules wait for their own parameters; the model itself waits for all the
        others, for a weight may be used without a call of its module (tied embeddings).
        """
        self._is_overlapped = True
        units = [
            (f"{path}.{name}.", unit)
            for path, container in model.named_modules()
            if isinstance(container, nn.ModuleList | nn.ModuleDict)
            for name, unit in container.named_children()
        ]
        for prefix, unit in units:
            self._wait_before(unit, (name for name in self._bundle_of if name.startswith(prefix)))
        prefixes = tuple(prefix for prefix, _ in units)
        self._wait_before(model, (name for name in self._bundle_of if not name.startswith(prefixes)))

    def run(self) -> None:
        """Gather after an update; when it overlaps, only begin. Call on all ranks."""
        assert not self._landings, "parameters were updated while the last gather was on its way"
        for place in range(len(self._bundles)):
            self._start(place)
            if not self._is_overlapped:
                self._land(place)

    def land_all(self) -> None:
        """Wait for what is on the wire."""
        for place in sorted(self._landings):
            self._land(place)

    def expect_landed(self) -> None:
        """Check, after a forward pass, that it waited for every parameter."""
        late = [name for place in self._landings for name in self._bundles[place].names]
        assert not late, f"a forward pass went by without waiting for {', '.join(late[:3])}"

    def _wait_before(self, module: nn.Module, names: Iterable[str]) -> None:
        places = sorted({self._bundle_of[name] for name in names})

        def wait(*_: object) -> None:
            for place in places:
                self._land(place)

        if places:
            module.register_forward_pre_hook(wait)

    @torch.no_grad()
    def _start(self, place: int) -> None:
        bundle = self._bundles[place]
        dtype, shape = bundle.parameters[0].dtype, (bundle.axis.size, bundle.rows.width)
        stack, gathered = (self._staging.take(dtype, *shape) for _ in range(2))
        own: list[Tensor] = [
            self._parts[name].of(p.detach()) for name, p in zip(bundle.names, bundle.parameters, strict=True)
        ]
        bundle.rows.pack_one(own, stack[bundle.axis.rank])
        flight = start_gather_into(gathered, stack, bundle.axis)

        def land() -> None:
            with torch.no_grad():
                bundle.rows.unpack(flight.land(), [parameter.detach() for parameter in bundle.parameters])
            self._staging.give_back(stack, gathered)

        self._landings[place] = land

    def _land(self, place: int) -> None:
        if place in self._landings:
            self._landings.pop(place)()


def _make_bundles(
    parameters: Mapping[str, nn.Parameter], ctx: ParallelContext, bucket_elements: int
) -> tuple[Bundle, ...]:
    """In the order of the model, which is that of forward; those over an axis of one rank are whole already."""
    open_runs: dict[tuple[Role, torch.dtype], list[str]] = {}
    runs: list[list[str]] = []
    for name, parameter in parameters.items():
        key = spec_of(parameter).role, parameter.dtype
        run = open_runs.get(key)
        size = sum(parameters[other].numel() for other in run or ())
        if run is None or size + parameter.numel() > bucket_elements:
            run = open_runs[key] = []
            runs.append(run)
        run.append(name)
    bundles = []
    for run in runs:
        held = tuple(parameters[name] for name in run)
        axis = ctx.dp_gradients if spec_of(held[0]).role == "dense" else ctx.edp_gradients
        if axis.size > 1:
            bundles.append(Bundle(axis, tuple(run), held, Rows(tuple(tuple(p.shape) for p in held), axis.size)))
    return tuple(bundles)
