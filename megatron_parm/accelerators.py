"""Norm kernels of Transformer Engine or NVIDIA Apex where they work, else torch's own. Floor 0.

Both packages are optional and fail in many ways: importing Transformer Engine without CUDA raises RuntimeError, a wrong
build OSError or AttributeError, and PyPI's `apex` is another project. So each is imported under one guard, tried once
against torch's result, and what is used is said in one line. No other file imports them. Not yet run on CUDA.

torch's own fused AdamW and scaled_dot_product_attention need no package; nothing of these two is used for them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

Importer = Callable[[str], ModuleType]
RmsNorm = Callable[[Tensor, Tensor, float], Tensor]
LayerNorm = Callable[[Tensor, Tensor, Tensor, float], Tensor]

TOLERANCE = 1e-4  # float32 kernels that sum in another order, on values of order 1
ROWS, SIZE = 8, 64  # of the trial


@dataclass(frozen=True)
class NormKernels:
    """Norms over the last dim: rms_norm(x, weight, epsilon) and layer_norm(x, weight, bias, epsilon)."""

    name: str
    rms_norm: RmsNorm
    layer_norm: LayerNorm


def _torch_rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, epsilon)


def _torch_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, epsilon)


TORCH = NormKernels("torch", _torch_rms_norm, _torch_layer_norm)


@dataclass(frozen=True)
class Accelerators:
    """What works here: the kernels, and one line for the log."""

    norms: NormKernels
    report: str


def probe(device: torch.device, load: Importer = import_module, *, on_cpu_too: bool = False) -> Accelerators:
    """Try the packages on `device`, the first that works wins. Without an accelerator nothing is imported.

    `load` imports a module by name.
    """
    if device.type == "cpu" and not on_cpu_too:
        return Accelerators(TORCH, "kernels: torch (no accelerator)")
    reasons = []
    for name, make in (("Transformer Engine", _transformer_engine), ("Apex", _apex)):
        try:
            kernels = make(load)
            _compare_with_torch(kernels, device)
        except Exception as error:  # whatever an optional package does at import or in a kernel, training goes on
            reasons.append(f"{name}: {_first_line(error)}")
            continue
        return Accelerators(kernels, f"kernels: norms by {name}" + (f" ({'; '.join(reasons)})" if reasons else ""))
    return Accelerators(TORCH, f"kernels: torch ({'; '.join(reasons)})")


def _first_line(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"no module {error.name}"
    return f"{type(error).__name__} {str(error).splitlines()[0] if str(error) else ''}".rstrip()


def _transformer_engine(load: Importer) -> NormKernels:
    package = load("transformer_engine.pytorch")
    made: dict[tuple[str, int, float], torch.nn.Module] = {}

    def module(kind: str, size: int, epsilon: float, device: torch.device) -> torch.nn.Module:
        key = (kind, size, epsilon)
        if key not in made:
            made[key] = getattr(package, kind)(size, eps=epsilon, device=device)
        return made[key]

    def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        norm = module("RMSNorm", weight.shape[0], epsilon, x.device)
        return _tensor(functional_call(norm, {"weight": weight}, (x,)))

    def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
        norm = module("LayerNorm", weight.shape[0], epsilon, x.device)
        return _tensor(functional_call(norm, {"weight": weight, "bias": bias}, (x,)))

    return NormKernels("Transformer Engine", rms_norm, layer_norm)


def _apex(load: Importer) -> NormKernels:
    package = load("apex.normalization.fused_layer_norm")
    fused_rms, fused_layer = package.fused_rms_norm_affine, package.fused_layer_norm_affine

    def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return _tensor(fused_rms(x, weight, weight.shape, epsilon))

    def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
        return _tensor(fused_layer(x, weight, bias, weight.shape, epsilon))

    return NormKernels("Apex", rms_norm, layer_norm)


def _tensor(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"the kernel returned a {type(value).__name__}")
    return value


def _compare_with_torch(kernels: NormKernels, device: torch.device) -> None:
    """Raise if a kernel's result or gradients are not torch's."""
    for what, ours, theirs in (
        ("RMSNorm", _trial(kernels.rms_norm, device, 1), _trial(TORCH.rms_norm, device, 1)),
        ("LayerNorm", _trial(kernels.layer_norm, device, 2), _trial(TORCH.layer_norm, device, 2)),
    ):
        for mine, expected in zip(ours, theirs, strict=True):
            difference = (mine - expected).abs().max().item()
            if not difference <= TOLERANCE:
                raise ValueError(f"its {what} differs from torch's by {difference:.1e}")


def _trial(norm: Callable[..., Tensor], device: torch.device, num_vectors: int) -> list[Tensor]:
    """The output of a norm on fixed numbers, and the gradient of each input."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(ROWS, SIZE), *[(SIZE,)] * num_vectors]
    inputs = [torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in shapes]
    output = norm(*inputs, 1e-5)
    output.backward(torch.randn((ROWS, SIZE), generator=generator).to(device))  # type: ignore[no-untyped-call]
    gradients = [value.grad for value in inputs]
    if any(gradient is None for gradient in gradients):
        raise ValueError("it gives no gradient")
    return [output.detach(), *(gradient for gradient in gradients if gradient is not None)]
