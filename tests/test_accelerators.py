"""Optional packages, as fakes that fail in the ways the real ones do. Reference: torch's own kernels."""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_parm.accelerators import TORCH, Accelerators, probe

CPU = torch.device("cpu")


class Fakes:
    """Imports by name: a module, an exception to raise, or (by default) nothing of that name."""

    def __init__(self, **modules: ModuleType | Exception) -> None:
        self._modules = modules
        self.asked: list[str] = []

    def __call__(self, name: str) -> ModuleType:
        self.asked.append(name)
        found = self._modules.get(
            name.split(".", maxsplit=1)[0], ModuleNotFoundError(f"No module named {name!r}", name=name)
        )
        if isinstance(found, Exception):
            raise found
        return found


def module(**symbols: Any) -> ModuleType:
    made = ModuleType("fake")
    vars(made).update(symbols)
    return made


def rms(x: Tensor, weight: Tensor, shape: torch.Size, epsilon: float) -> Tensor:
    return F.rms_norm(x, shape, weight, epsilon)


def layer(x: Tensor, weight: Tensor, bias: Tensor, shape: torch.Size, epsilon: float) -> Tensor:
    return F.layer_norm(x, shape, weight, bias, epsilon)


def rms_without_epsilon(x: Tensor, weight: Tensor, shape: torch.Size, epsilon: float) -> Tensor:
    return F.rms_norm(x, shape, 1.01 * weight, epsilon)


def layer_with_a_lost_gradient(x: Tensor, weight: Tensor, bias: Tensor, shape: torch.Size, epsilon: float) -> Tensor:
    return F.layer_norm(x, shape, weight, bias.detach(), epsilon)


class EngineRms(nn.Module):
    def __init__(self, size: int, eps: float, device: torch.device) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size, device=device)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class EngineLayer(nn.LayerNorm):
    def __init__(self, size: int, eps: float, device: torch.device) -> None:
        super().__init__(size, eps, device=device)


APEX = module(fused_rms_norm_affine=rms, fused_layer_norm_affine=layer)
ENGINE = module(RMSNorm=EngineRms, LayerNorm=EngineLayer)


def probed(**modules: ModuleType | Exception) -> Accelerators:
    return probe(CPU, Fakes(**modules), on_cpu_too=True)


@pytest.mark.parametrize(
    ("modules", "said"),
    [
        ({}, "kernels: torch (Transformer Engine: no module transformer_engine.pytorch; Apex: no module apex.norm"),
        ({"transformer_engine": RuntimeError("Found no NVIDIA driver\nmore")}, "RuntimeError Found no NVIDIA driver;"),
        ({"transformer_engine": OSError("libcudart.so.12: cannot open")}, "OSError libcudart.so.12: cannot open"),
        ({"apex": module(__doc__="a web framework")}, "Apex: AttributeError"),
        ({"apex": ImportError("cannot import name 'UnencryptedCookieSessionFactoryConfig'")}, "Apex: ImportError"),
        ({"apex": module(fused_rms_norm_affine=rms)}, "fused_layer_norm_affine"),
        ({"transformer_engine": module(RMSNorm=EngineRms)}, "has no attribute 'LayerNorm'"),
        (
            {"apex": module(fused_rms_norm_affine=rms_without_epsilon, fused_layer_norm_affine=layer)},
            "Apex: ValueError its RMSNorm differs from torch's by",
        ),
        (
            {"apex": module(fused_rms_norm_affine=rms, fused_layer_norm_affine=layer_with_a_lost_gradient)},
            "Apex: ValueError it gives no gradient",
        ),
    ],
)
def test_a_package_that_does_not_work_leaves_torch_and_says_why(modules: dict[str, Any], said: str) -> None:
    found = probed(**modules)
    assert found.norms is TORCH
    assert found.report.startswith("kernels: torch (") and said in found.report
    assert "\n" not in found.report


@pytest.mark.parametrize(
    ("modules", "name"),
    [
        ({"apex": APEX}, "Apex"),
        ({"transformer_engine": ENGINE}, "Transformer Engine"),
        ({"transformer_engine": ENGINE, "apex": APEX}, "Transformer Engine"),
        ({"transformer_engine": RuntimeError("no CUDA"), "apex": APEX}, "Apex"),
    ],
)
def test_a_package_that_works_is_used(modules: dict[str, Any], name: str) -> None:
    found = probed(**modules)
    assert found.norms.name == name and f"norms by {name}" in found.report
    x, weight, bias = torch.randn(4, 16), torch.randn(16), torch.randn(16)
    torch.testing.assert_close(found.norms.rms_norm(x, weight, 1e-6), F.rms_norm(x, (16,), weight, 1e-6))
    torch.testing.assert_close(
        found.norms.layer_norm(x, weight, bias, 1e-6), F.layer_norm(x, (16,), weight, bias, 1e-6)
    )


def test_without_an_accelerator_nothing_is_imported() -> None:
    fakes = Fakes(apex=APEX)
    assert probe(CPU, fakes).norms is TORCH
    assert fakes.asked == []
