"""A small made-up model for the tests of this room: named tensors of every kind of cut, on any layout.

The reference of every load is `global_values(seed)`: the whole tensors, from which each rank's box is a slice.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_parm.checkpoint.find import find_checkpoint
from megatron_parm.checkpoint.load import load_tensors
from megatron_parm.checkpoint.save import SaveReport, save_checkpoint
from megatron_parm.errors import MegatronParmError
from megatron_parm.parallel.context import Axis, ParallelContext
from megatron_parm.parallel.sharding import Cut, ShardSpec

NUM_LAYERS = 4
Tensors = dict[str, tuple[Tensor, ShardSpec]]


def global_values(seed: int) -> dict[str, Tensor]:
    """Every tensor of the example, whole."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "embedding.weight": ((16, 8), torch.float32),  # on the first and the last stage, like a tied embedding
        "norm.weight": ((8,), torch.float64),
    }
    for layer in range(NUM_LAYERS):
        shapes |= {
            f"layers.{layer}.column.weight": ((16, 8), torch.bfloat16),
            f"layers.{layer}.row.weight": ((8, 16), torch.float32),
            f"layers.{layer}.gated.weight": ((2, 8, 8), torch.float32),
            f"layers.{layer}.experts.weight1": ((4, 8, 16), torch.float32),
            f"layers.{layer}.experts.weight2": ((4, 16, 8), torch.float64),
        }
    values = {name: torch.randn(shape, generator=generator).to(dtype) for name, (shape, dtype) in shapes.items()}
    return values | {"step": torch.tensor(seed), "mask": torch.rand(5, generator=generator) > 0.5}


def spec_for(name: str, shape: tuple[int, ...], ctx: ParallelContext) -> ShardSpec:
    """How the tensor of that name lies on the layout of `ctx`."""
    cuts_by_end: dict[str, tuple[tuple[int, Axis], ...]] = {
        "embedding.weight": ((0, ctx.tp),),
        "column.weight": ((0, ctx.tp),),
        "row.weight": ((1, ctx.tp),),
        "gated.weight": ((1, ctx.tp),),
        "experts.weight1": ((0, ctx.ep), (2, ctx.esp)),
        "experts.weight2": ((0, ctx.ep), (1, ctx.esp)),
    }
    cuts = next((cuts for end, cuts in cuts_by_end.items() if name.endswith(end)), ())
    return ShardSpec(
        shape, tuple(Cut(dim, axis) for dim, axis in cuts), "expert" if "experts" in name else "dense", True
    )


def is_here(name: str, ctx: ParallelContext) -> bool:
    """Whether this pipeline stage has the tensor."""
    if name.startswith("layers."):
        return int(name.split(".")[1]) * ctx.pp.size // NUM_LAYERS == ctx.pp.rank
    return name != "embedding.weight" or ctx.pp.rank in (0, ctx.pp.size - 1)


def tensors_of(ctx: ParallelContext, seed: int) -> Tensors:
    """This rank's boxes of `global_values(seed)`."""
    found = {}
    for name, value in global_values(seed).items():
        if is_here(name, ctx):
            spec = spec_for(name, tuple(value.shape), ctx)
            found[name] = (value[spec.box].clone(), spec)
    return found


def blank(tensors: Tensors) -> Tensors:
    """The same boxes with other content, so that what a load leaves out is seen."""
    return {
        name: (torch.full_like(local, float("nan") if local.is_floating_point() else 1), spec)
        for name, (local, spec) in tensors.items()
    }


def save(ctx: ParallelContext, root: Path, iteration: int, seed: int) -> SaveReport:
    """Save the example with a rank-local tensor and a small state."""
    random_state = torch.arange(6, dtype=torch.uint8) + 10 * ctx.rank
    state: dict[str, Any] = {"iteration": iteration, "seed": seed, "rate": 0.1}
    return save_checkpoint(root, iteration, tensors_of(ctx, seed), {"random": random_state}, state, ctx)


def differing_after_load(ctx: ParallelContext, root: Path, seed: int) -> list[str]:
    """Load what the tracker file names; the names whose box is not bitwise that of `global_values(seed)`."""
    expected = tensors_of(ctx, seed)
    loaded = blank(expected)
    load_tensors(find_checkpoint(root, ctx), loaded, ctx)
    return [name for name in expected if not torch.equal(loaded[name][0], expected[name][0])]


def error_of(ctx: ParallelContext, function: Any, *args: Any) -> tuple[str, int, str]:
    """Class, exit code and message of our error that `function(ctx, *args)` raises; any other goes through."""
    try:
        function(ctx, *args)
    except MegatronParmError as error:
        return type(error).__name__, error.exit_code, str(error)
    return "nothing was raised", 0, ""


def names_in(root: Path) -> list[str]:
    """What lies in `root`."""
    return sorted(entry.name for entry in root.iterdir())
