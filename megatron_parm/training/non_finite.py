"""What to say when a loss or a gradient is not finite: which rank, and which parameter first. Floor 7."""

import json
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.transport import gather_text

SHOWN = 4  # ranks that a message names


def non_finite_names(tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> list[str]:
    """The names of the tensors with an element that is NaN or infinite."""
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    return [name for name, tensor in pairs if not bool(torch.isfinite(tensor).all())]


def describe_origin(
    ctx: ParallelContext, loss_is_finite: bool, gradients: Sequence[str], weights: Sequence[str]
) -> str:
    """Where it began, over all ranks, the same text on every one. Call on all ranks.

    loss_is_finite: of this rank. gradients: this rank's parameters, in the order of backward, whose own gradient was
    not finite before it met those of other ranks. weights: those that are not finite themselves.
    """
    mine = {"loss": not loss_is_finite, "gradients": list(gradients), "weights": list(weights)}
    found = [json.loads(text) for text in gather_text(json.dumps(mine), ctx.world)]
    told = [f"rank {rank}: {_of_one(one)}" for rank, one in enumerate(found) if any(one.values())]
    if not told:
        return "each rank's own loss and gradients are finite: their sum overflowed"
    more = f"; and {len(told) - SHOWN} more ranks" if len(told) > SHOWN else ""
    return "; ".join(told[:SHOWN]) + more


def _of_one(found: dict[str, list[str]]) -> str:
    parts = ["its loss is not finite"] if found["loss"] else []
    for kind, names in (("weight", found["weights"]), ("gradient", found["gradients"])):
        if names:
            rest = f" and {len(names) - 1} more in the order of backward" if len(names) > 1 else ""
            parts.append(f"{kind} of {names[0]}{rest}")
    return ", ".join(parts)
