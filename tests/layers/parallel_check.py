"""Runs a layer on one process and cut over tp, and joins what the ranks return, so that a test only compares.

The reference of every comparison is the same layer in one process with the same seed: `initialise_weights` gives the
same global weights to both, which tests/layers/test_initialise.py shows on its own.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_parm.layers.initialise import initialise_weights
from megatron_parm.parallel import transport
from megatron_parm.parallel.context import Axis, ParallelContext
from megatron_parm.parallel.sharding import ShardSpec, spec_of
from tests.harness.layouts import Layout
from tests.harness.pools import Pools

TP_LAYOUTS = (Layout(2, tp=2), Layout(4, tp=4), Layout(4, tp=2))
# float64, a handful of sums in another order
TOLERANCE = 1e-10


@dataclass(frozen=True)
class Box:
    """A parameter's gradient on one rank, and where it lies in the global tensor."""

    gradient: Tensor
    global_shape: tuple[int, ...]
    place: tuple[slice, ...]


@dataclass(frozen=True)
class Outcome:
    """What one rank saw: output, gradient of the input, gradients by parameter name."""

    output: Tensor
    input_gradient: Tensor
    boxes: dict[str, Box]


def randomise_vectors(module: nn.Module) -> None:
    """Give biases and norm weights values that a test can see, the same on every layout."""
    generator = torch.Generator().manual_seed(11)
    for parameter in module.parameters():
        spec: ShardSpec = spec_of(parameter)
        if not spec.decays:
            drawn = torch.randn(spec.global_shape, generator=generator, dtype=parameter.dtype)
            with torch.no_grad():
                parameter.add_(0.3 * drawn[spec.box])


def boxes_of(module: nn.Module, tp: Axis | None = None) -> dict[str, Box]:
    """The gradient of every parameter with its place; with `tp` the parts of partial gradients are summed over it."""
    found = {}
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        spec = spec_of(parameter)
        gradient = parameter.grad
        if tp is not None and spec.is_partial_on_tp:
            gradient = transport.sum_over(gradient, tp)
        found[name] = Box(gradient, spec.global_shape, spec.box)
    return found


def run_layer(
    ctx: ParallelContext, make: Callable[[Axis], nn.Module], x: Tensor, joined_dim: int | None = None
) -> Outcome:
    """Forward and backward of `make(tp)` on `x` with a loss that weighs every output differently.

    `joined_dim` is the dim of an output that is cut over tp; its loss is then this rank's part of the weights.
    """
    module = make(ctx.tp)
    initialise_weights(module, seed=3)
    randomise_vectors(module)
    x = x.clone().requires_grad_()
    output = module(x)
    shape = list(output.shape)
    if joined_dim is not None:
        shape[joined_dim] *= ctx.tp.size
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(12), dtype=x.dtype)
    if joined_dim is not None:
        weights = weights.chunk(ctx.tp.size, joined_dim)[ctx.tp.rank]
    (output * weights).sum().backward()
    return Outcome(output.detach(), x.grad, boxes_of(module))


def run_sliced(ctx: ParallelContext, make: Callable[[Axis], nn.Module], x: Tensor, sums_parts: bool = True) -> Outcome:
    """`run_layer` of a layer under sequence parallelism: this rank's slice of `x` in, its slice of the output out.

    Without `sums_parts` partial gradients stay as backward left them: the fault of a missing rule.
    """
    module = make(ctx.tp)
    initialise_weights(module, seed=3)
    randomise_vectors(module)
    x = x.chunk(ctx.tp.size)[ctx.tp.rank].clone().requires_grad_()
    output = module(x)
    shape = (output.shape[0] * ctx.tp.size, *output.shape[1:])
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(12), dtype=x.dtype)
    (output * weights.chunk(ctx.tp.size)[ctx.tp.rank]).sum().backward()
    return Outcome(output.detach(), x.grad, boxes_of(module, ctx.tp if sums_parts else None))


def differences(whole: Outcome, parts: list[Outcome], joined_dim: int | None = None) -> dict[str, float]:
    """Largest difference of each gradient, and of 'output' and 'input', between one process and the ranks of tp."""
    outputs = [part.output for part in parts]
    found = {"input": _largest(whole.input_gradient, [part.input_gradient for part in parts])}
    if joined_dim is None:
        found["output"] = _largest(whole.output, outputs)
    else:
        found["output"] = _largest(whole.output, [torch.cat(outputs, joined_dim)])
    return found | gradient_differences(whole.boxes, [part.boxes for part in parts])


def gradient_differences(whole: dict[str, Box], parts: list[dict[str, Box]]) -> dict[str, float]:
    """Largest difference between each rank's gradient and its box of the one-process gradient."""
    assert all(part.keys() == whole.keys() for part in parts)
    return {
        name: max(_largest(box.gradient[part[name].place], [part[name].gradient]) for part in parts)
        for name, box in whole.items()
    }


def _largest(expected: Tensor, found: list[Tensor]) -> float:
    for value in found:
        assert value.shape == expected.shape, f"{list(value.shape)}, not {list(expected.shape)}"
    return max(float((value - expected).abs().max()) for value in found)


def compare(
    pools: Pools, layout: Layout, make: Callable[[Axis], nn.Module], x: Tensor, joined_dim: int | None = None
) -> dict[str, float]:
    """`differences` between one process and the first tp group of `layout`."""
    whole = pools.run(Layout(1), run_layer, make, x, joined_dim)[0]
    parts = pools.run(layout, run_layer, make, x, joined_dim)[: layout.tp]
    return differences(whole, parts, joined_dim)


def compare_sliced(
    pools: Pools, layout: Layout, make: Callable[[Axis], nn.Module], x: Tensor, sums_parts: bool = True
) -> dict[str, float]:
    """`compare` of a layer under sequence parallelism: slices in, slices out."""
    whole = pools.run(Layout(1), run_layer, make, x)[0]
    parts = pools.run(layout, run_sliced, make, x, sums_parts)[: layout.tp]
    joined = [
        Outcome(*(torch.cat([getattr(p, f) for p in parts]) for f in ("output", "input_gradient")), part.boxes)
        for part in parts
    ]
    return differences(whole, joined)
