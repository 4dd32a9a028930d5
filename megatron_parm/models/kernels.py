"""Which kernels a built model computes with: those of accelerators.py, or compiled by torch. Floor 6.

`--compile` compiles what lies between two collectives and is more than one product: norms and activations. The
collectives themselves, and the products, stay as they are, so every layout and schedule runs compiled.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megatron_parm.accelerators import NormKernels
from megatron_parm.layers.feed_forward import FeedForward
from megatron_parm.layers.norm import Norm
from megatron_parm.moe.shared_expert import SharedExpert

Activate = Callable[[Tensor], Tensor]


def use_kernels(model: nn.Module, norms: NormKernels, *, compiles: bool) -> None:
    """Let every norm of `model` compute by `norms`; with `compiles` norms and activations are compiled at first use."""
    if compiles:
        norms = NormKernels(f"{norms.name}, compiled", torch.compile(norms.rms_norm), torch.compile(norms.layer_norm))
    compiled: dict[Activate, Activate] = {}  # one compiled function for all layers
    for module in model.modules():
        if isinstance(module, Norm):
            module.kernels = norms
        elif compiles and isinstance(module, FeedForward | SharedExpert):
            module.activate = compiled.setdefault(module.activate, torch.compile(module.activate))
