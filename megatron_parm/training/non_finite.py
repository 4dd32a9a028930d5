"""What to say when a loss or a gradient is not finite: which rank, which layer and which parameter first. Floor 7."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.transport import gather_text

SHOWN = 4  # ranks that a message names
WATCHED = ("embedding", "self_attention", "mlp", "final_layernorm")  # last names of the modules that are looked at


class ForwardWatch:
    """Notes whether all that each part of a model gave in this step was finite, without waiting for the device."""

    def __init__(self, model: nn.Module) -> None:
        self._is_finite: dict[str, Tensor] = {}
        for name, module in model.named_modules():
            if name.rpartition(".")[2] in WATCHED:
                module.register_forward_hook(self._hook(name))

    def begin(self) -> None:
        """Forget the step before."""
        self._is_finite.clear()

    def first_fault(self) -> str | None:
        """The first part, in the order of forward, that gave something not finite."""
        faults = (name for name, is_finite in self._is_finite.items() if not bool(is_finite))
        return next(faults, None)

    def _hook(self, name: str) -> Callable[[nn.Module, object, Tensor], None]:
        @torch.no_grad()
        def note(module: nn.Module, _: object, output: Tensor) -> None:
            if module.training:
                is_finite = torch.isfinite(output.detach().sum(dtype=torch.float64))  # of one number, and no copy
                before = self._is_finite.get(name)
                self._is_finite[name] = is_finite if before is None else before & is_finite

        return note


def non_finite_names(tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> list[str]:
    """The names of the tensors with an element that is NaN or infinite."""
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    return [name for name, tensor in pairs if not bool(torch.isfinite(tensor).all())]


def describe_origin(
    ctx: ParallelContext,
    loss_is_finite: bool,
    gradients: Sequence[str],
    weights: Sequence[str],
    layer: str | None = None,
) -> str:
    """Where it began, over all ranks, the same text on every one. Call on all ranks.

    loss_is_finite: of this rank. gradients: this rank's parameters, in the order of backward, whose own gradient was
    not finite before it met those of other ranks. weights: those that are not finite themselves. layer: the first of
    this rank's parts of the model whose forward gave something not finite.
    """
    mine = {"loss": not loss_is_finite, "gradients": list(gradients), "weights": list(weights), "layer": layer}
    found = [json.loads(text) for text in gather_text(json.dumps(mine), ctx.world)]
    told = [f"rank {rank}: {_of_one(one)}" for rank, one in enumerate(found) if any(one.values())]
    if not told:
        return "each rank's own loss and gradients are finite: their sum overflowed"
    more = f"; and {len(told) - SHOWN} more ranks" if len(told) > SHOWN else ""
    return "; ".join(told[:SHOWN]) + more


def _of_one(found: dict[str, Any]) -> str:
    parts = ["its loss is not finite"] if found["loss"] else []
    if found["layer"]:
        parts.append(f"forward of {found['layer']} gave the first number that is not")
    for kind, names in (("weight", found["weights"]), ("gradient", found["gradients"])):
        if names:
            rest = f" and {len(names) - 1} more in the order of backward" if len(names) > 1 else ""
            parts.append(f"{kind} of {names[0]}{rest}")
    return ", ".join(parts)
