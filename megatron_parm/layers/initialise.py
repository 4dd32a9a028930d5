"""Initial weights that do not depend on the layout. Floor 4.

Every parameter carries an `Initialiser` (set by `attach`). `initialise_weights` draws the whole global tensor from a
generator seeded by the run's seed and the parameter's global name, and keeps this rank's box. So tp, ep, esp and pp
change nothing, and no two slices repeat (Megatron's `--use-cpu-initialization`, for every layout).
"""

import hashlib
from dataclasses import dataclass, replace
from math import prod, sqrt
from typing import Literal

import torch
from torch import Tensor, nn

from megatron_parm.parallel.sharding import spec_of

Kind = Literal["normal", "xavier_uniform", "ones", "zeros"]


@dataclass(frozen=True)
class Initialiser:
    """How a parameter is filled.

    `std` is of kind "normal". Rows of dim 0 from `valid_rows` on are zero (padding of the vocabulary) and do not change
    what the other rows draw. With `per_leading`, each slice of dim 0 is drawn on its own, and only this rank's slices:
    for experts.
    """

    kind: Kind
    std: float = 0.02
    valid_rows: int | None = None
    per_leading: bool = False

    def scaled_for_output(self, num_layers: int) -> "Initialiser":
        """The same for layers that write to the residual stream: std / sqrt(2 * num_layers). Source: GPT-2."""
        return replace(self, std=self.std / sqrt(2 * num_layers))


ONES = Initialiser("ones")
ZEROS = Initialiser("zeros")


def attach(parameter: nn.Parameter, initialiser: Initialiser) -> nn.Parameter:
    """Say how `initialise_weights` shall fill `parameter`; returns it."""
    parameter.initialiser = initialiser  # type: ignore[attr-defined]  # torch allows attributes on a Parameter
    return parameter


def initialise_weights(module: nn.Module, seed: int) -> None:
    """Fill every parameter of the whole model `module`. Names must be global: the same on every layout."""
    for name, parameter in module.named_parameters():
        initialiser = getattr(parameter, "initialiser", None)
        assert isinstance(initialiser, Initialiser), f"{name} has no initialiser"
        with torch.no_grad():
            parameter.copy_(_local_box(parameter, initialiser, seed, name))


def _local_box(parameter: nn.Parameter, initialiser: Initialiser, seed: int, name: str) -> Tensor:
    spec = spec_of(parameter)
    if initialiser.kind in ("ones", "zeros"):
        return torch.full(spec.local_shape, float(initialiser.kind == "ones"))
    if initialiser.per_leading:
        leading, *inner = spec.box
        slices = [
            _draw(spec.global_shape[1:], initialiser, _generator(seed, f"{name}[{index}]"))[tuple(inner)]
            for index in range(leading.start, leading.stop)
        ]
        return torch.stack(slices)
    return _draw(spec.global_shape, initialiser, _generator(seed, name))[spec.box]


def _draw(shape: tuple[int, ...], initialiser: Initialiser, generator: torch.Generator) -> Tensor:
    rows = shape[0] if initialiser.valid_rows is None else initialiser.valid_rows
    drawn_shape = (rows, *shape[1:])
    if initialiser.kind == "normal":
        drawn = torch.randn(drawn_shape, generator=generator).mul_(initialiser.std)
    else:
        # Glorot's bound; a weight of blocks [blocks, out, in] counts as the matrix [blocks * out, in]
        bound = sqrt(6.0 / (prod(drawn_shape[:-1]) + drawn_shape[-1]))
        drawn = torch.rand(drawn_shape, generator=generator).mul_(2 * bound).sub_(bound)
    if rows == shape[0]:
        return drawn
    return torch.cat([drawn, drawn.new_zeros(shape[0] - rows, *shape[1:])])


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
