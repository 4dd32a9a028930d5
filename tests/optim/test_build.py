"""AdamW and SGD. Reference: a hand-written float64 loop over single numbers."""

import math

import pytest
import torch
from torch import Tensor, nn

from megatron_parm.errors import ConfigError
from megatron_parm.grads.buffer import GradientBuffers
from megatron_parm.optim.build import build_optimizer, fastest_kernel
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.sharding import make_parameter

CTX = ParallelContext.single()
BETA1, BETA2, EPS, MOMENTUM = 0.8, 0.95, 1e-6, 0.7
STEPS = [(1e-2, 0.1), (3e-2, 0.1), (2e-2, 0.3), (0.0, 0.2), (1e-2, 0.0)]  # learning rate, weight decay of each step
TOLERANCES = {torch.float64: 1e-13, torch.float32: 1e-5}  # rounding of five updates


def _parameters(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = {}
    for name, shape in (("weight", (3, 4)), ("bias", (3,)), ("experts", (2, 3))):
        made[name] = make_parameter(shape, decays=name != "bias", dtype=dtype, device=CTX.device)
        made[name].data.copy_(torch.randn(shape, generator=generator, dtype=torch.float64))
    return made


def _gradients(shape: torch.Size) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1 + sum(shape))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in STEPS]


def _adamw_by_hand(weight: float, gradients: list[float], decays: bool) -> float:
    first = second = 0.0
    for step, ((lr, decay), gradient) in enumerate(zip(STEPS, gradients, strict=True), start=1):
        weight -= lr * decay * weight * decays
        first = BETA1 * first + (1 - BETA1) * gradient
        second = BETA2 * second + (1 - BETA2) * gradient * gradient
        corrected = math.sqrt(second / (1 - BETA2**step))
        weight -= lr * first / (1 - BETA1**step) / (corrected + EPS)
    return weight


def _sgd_by_hand(weight: float, gradients: list[float], decays: bool) -> float:
    velocity = 0.0
    for (lr, decay), gradient in zip(STEPS, gradients, strict=True):
        velocity = MOMENTUM * velocity + gradient + decay * weight * decays
        weight -= lr * velocity
    return weight


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_updates_equal_the_loop_by_hand(kind: str, dtype: torch.dtype) -> None:
    parameters = _parameters(dtype)
    start = {name: parameter.detach().double().clone() for name, parameter in parameters.items()}
    buffers = GradientBuffers(parameters, CTX)
    optimizer = build_optimizer(buffers, kind, adam_beta1=BETA1, adam_beta2=BETA2, adam_eps=EPS, sgd_momentum=MOMENTUM)
    for step, (lr, decay) in enumerate(STEPS):
        for name, parameter in parameters.items():
            buffers.gradient_of(name).copy_(_gradients(parameter.shape)[step])
        optimizer.step(lr, decay)
    by_hand = {"adam": _adamw_by_hand, "sgd": _sgd_by_hand}[kind]
    for name, parameter in parameters.items():
        gradients = torch.stack([g.to(dtype).double() for g in _gradients(parameter.shape)]).flatten(1).T.tolist()
        expected = [
            by_hand(weight, column, name != "bias")
            for weight, column in zip(start[name].flatten().tolist(), gradients, strict=True)
        ]
        found = parameter.detach().double().flatten()
        torch.testing.assert_close(
            found, torch.tensor(expected, dtype=torch.float64), rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype]
        )
    assert optimizer.kernel == "fused", "torch's fused kernels run on the CPU since 2.4"


def test_an_idle_parameter_still_decays() -> None:
    """An expert without tokens has gradient 0, so its replicas all shrink alike. Reference: by hand."""
    parameters = _parameters(torch.float64)
    start = parameters["experts"].detach().clone()
    optimizer = build_optimizer(GradientBuffers(parameters, CTX))
    optimizer.step(0.1, 0.5)
    torch.testing.assert_close(parameters["experts"].detach(), start * (1 - 0.1 * 0.5))
    assert torch.equal(parameters["bias"].detach(), _parameters(torch.float64)["bias"].detach())


def test_sgd_with_rate_one_subtracts_the_gradient() -> None:
    parameters = _parameters(torch.float64)
    start = parameters["weight"].detach().clone()
    buffers = GradientBuffers(parameters, CTX)
    buffers.gradient_of("weight").fill_(0.25)
    build_optimizer(buffers, "sgd", sgd_momentum=0.0).step(1.0, 0.0)
    assert torch.equal(parameters["weight"].detach(), start - 0.25)


def test_without_a_fused_kernel_foreach_is_used() -> None:
    def make(groups: object, fused: bool = False) -> torch.optim.Optimizer:
        if fused:
            raise RuntimeError("`fused=True` requires all the params to be on a supported device")
        raise AssertionError("only the probe is expected")

    assert fastest_kernel(make, [torch.zeros(2)]) == "foreach"


def test_foreach_gives_the_same_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for kernel in ("fused", "foreach"):
        monkeypatch.setattr("megatron_parm.optim.build.fastest_kernel", lambda *_, kernel=kernel: kernel)
        parameters = _parameters(torch.float64)
        buffers = GradientBuffers(parameters, CTX)
        optimizer = build_optimizer(buffers)
        for step, (lr, decay) in enumerate(STEPS):
            buffers.gradient_of("weight").copy_(_gradients(parameters["weight"].shape)[step])
            optimizer.step(lr, decay)
        assert optimizer.kernel == kernel
        results.append(parameters["weight"].detach())
    torch.testing.assert_close(results[0], results[1], rtol=1e-13, atol=1e-13)


def test_a_model_without_decaying_parameters() -> None:
    bias = make_parameter((3,), decays=False, dtype=torch.float32, device=CTX.device)
    bias.data.fill_(1.0)
    build_optimizer(GradientBuffers({"bias": bias}, CTX)).step(0.1, 0.5)
    assert bias.tolist() == [1.0] * 3


def test_an_unknown_optimizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="--optimizer muon is not known; use adam or sgd"):
        build_optimizer(GradientBuffers(_parameters(torch.float32), CTX), "muon")
