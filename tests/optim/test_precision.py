"""Master weights and the optimizer's state. References: float32 training of the same numbers; the uninterrupted run."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_parm.errors import CheckpointError
from megatron_parm.grads.buffer import GradientBuffers
from megatron_parm.optim.build import build_optimizer
from megatron_parm.optim.precision import MasterWeights, Optimizer
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.sharding import make_parameter

CTX = ParallelContext.single()
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


class _Run:
    """A model of two parameters, trained on gradients that depend only on the step."""

    def __init__(self, dtype: torch.dtype, kind: str, **options: float) -> None:
        self.parameters: dict[str, nn.Parameter] = {}
        generator = torch.Generator().manual_seed(0)
        for name, shape in (("weight", (7, 5)), ("bias", (7,))):
            self.parameters[name] = make_parameter(shape, decays=name != "bias", dtype=dtype, device=CTX.device)
            self.parameters[name].data.copy_(torch.randn(shape, generator=generator))
        self.buffers = GradientBuffers(self.parameters, CTX)
        self.optimizer: Optimizer = build_optimizer(self.buffers, kind, **options)

    def train(self, steps: range) -> None:
        for step in steps:
            self.buffers.zero()
            generator = torch.Generator().manual_seed(100 + step)
            x = torch.randn(4, 5, generator=generator).to(self.parameters["weight"].dtype)
            nn.functional.linear(x, self.parameters["weight"], self.parameters["bias"]).tanh().sum().backward()
            self.optimizer.step(1e-2 / (step + 1), 0.1)

    def everything(self) -> dict[str, Tensor]:
        found = {name: parameter.detach() for name, parameter in self.parameters.items()}
        for kind, tensors in self.optimizer.state_tensors().items():
            found |= {f"{kind}.{name}": tensor for name, tensor in tensors.items()}
        return found

    def load(self, saved: dict[str, Tensor], scalars: dict[str, Any]) -> None:
        for name, tensor in self.everything().items():
            tensor.copy_(saved[name])
        self.optimizer.load_state_scalars(scalars)


def _save(run: _Run) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = {name: tensor.clone() for name, tensor in run.everything().items()}
    return tensors, json.loads(json.dumps(run.optimizer.state_scalars()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_resume_is_bitwise(kind: str, dtype: torch.dtype) -> None:
    straight = _Run(dtype, kind)
    straight.train(range(6))
    first = _Run(dtype, kind)
    first.train(range(3))
    resumed = _Run(dtype, kind)
    resumed.load(*_save(first))
    assert resumed.optimizer.state_scalars() == {"kind": kind, "step": 3}
    resumed.train(range(3, 6))
    for name, tensor in straight.everything().items():
        assert torch.equal(resumed.everything()[name], tensor), name


@pytest.mark.parametrize("forgotten", ["step", "exp_avg.weight", "exp_avg_sq.bias", "master.weight"])
def test_control_a_forgotten_piece_of_state_is_detected(forgotten: str) -> None:
    straight = _Run(torch.bfloat16, "adam")
    straight.train(range(6))
    first = _Run(torch.bfloat16, "adam")
    first.train(range(3))
    tensors, scalars = _save(first)
    if forgotten == "step":
        scalars["step"] = 0
    elif forgotten.startswith("master"):
        tensors[forgotten] = tensors["weight"].float()
    else:
        tensors[forgotten].zero_()
    resumed = _Run(torch.bfloat16, "adam")
    resumed.load(tensors, scalars)
    resumed.train(range(3, 6))
    wrong = [
        name for name, tensor in straight.everything().items() if not torch.equal(resumed.everything()[name], tensor)
    ]
    assert wrong


@pytest.mark.parametrize(
    ("kind", "dtype", "names"),
    [
        ("adam", torch.float32, {"exp_avg", "exp_avg_sq"}),
        ("adam", torch.bfloat16, {"exp_avg", "exp_avg_sq", "master"}),
        ("sgd", torch.float64, {"momentum_buffer"}),
        ("sgd", torch.bfloat16, {"momentum_buffer", "master"}),
    ],
)
def test_all_state_exists_before_the_first_step(kind: str, dtype: torch.dtype, names: set[str]) -> None:
    run = _Run(dtype, kind)
    state = run.optimizer.state_tensors()
    assert set(state) == names
    for tensors in state.values():
        assert {name: tensor.shape for name, tensor in tensors.items()} == {
            name: parameter.shape for name, parameter in run.parameters.items()
        }
        assert all(tensor.dtype == (dtype if dtype.itemsize >= 4 else torch.float32) for tensor in tensors.values())
        assert not any(tensor.requires_grad for tensor in tensors.values())
    assert all(torch.count_nonzero(t) == 0 for name in names - {"master"} for t in state[name].values())
    run.train(range(1))
    after = run.optimizer.state_tensors()
    assert set(after) == names
    assert all(after[kind][name] is state[kind][name] for kind in names for name in state[kind]), "live, not copies"


def test_sgd_without_momentum_has_no_state() -> None:
    run = _Run(torch.float32, "sgd", sgd_momentum=0.0)
    assert run.optimizer.state_tensors() == {}
    run.train(range(2))
    assert run.optimizer.state_tensors() == {}


def test_small_updates_add_up_in_the_master() -> None:
    """Reference: by hand; 64 steps of 2^-12 from 1. A bfloat16 weight alone would never leave 1."""
    weight = make_parameter((4,), dtype=torch.bfloat16, device=CTX.device)
    weight.data.fill_(1.0)
    buffers = GradientBuffers({"weight": weight}, CTX)
    optimizer = build_optimizer(buffers, "sgd", sgd_momentum=0.0)
    buffers.gradient_of("weight").fill_(1.0)
    for _ in range(64):
        optimizer.step(2.0**-12, 0.0)
    assert optimizer.state_tensors()["master"]["weight"].tolist() == [1 - 2.0**-6] * 4
    assert weight.tolist() == [1 - 2.0**-6] * 4
    assert (torch.ones(4, dtype=torch.bfloat16) - 2.0**-12).tolist() == [1.0] * 4


def test_parameters_are_their_masters_rounded() -> None:
    run = _Run(torch.bfloat16, "adam")
    run.train(range(3))
    for name, master in run.optimizer.state_tensors()["master"].items():
        assert torch.equal(run.parameters[name].detach(), master.bfloat16())


def test_float32_parameters_are_their_own_masters() -> None:
    run = _Run(torch.float32, "adam")
    masters = MasterWeights(run.parameters)
    assert masters.separate == {}
    assert all(masters.weights[name] is parameter for name, parameter in run.parameters.items())


def test_masters_follow_weights_that_came_without_masters() -> None:
    run = _Run(torch.bfloat16, "adam")
    run.parameters["bias"].data.fill_(3.0)
    run.optimizer.masters.refresh()
    assert run.optimizer.state_tensors()["master"]["bias"].tolist() == [3.0] * 7


def test_scalars_of_another_optimizer_are_refused() -> None:
    run = _Run(torch.float32, "adam")
    with pytest.raises(CheckpointError, match=r"--optimizer sgd .* --optimizer adam"):
        run.optimizer.load_state_scalars(_Run(torch.float32, "sgd").optimizer.state_scalars())


@pytest.mark.parametrize("step", [None, -1, 1.5, True, "3"])
def test_a_damaged_step_is_refused(step: object) -> None:
    with pytest.raises(CheckpointError, match="step"):
        _Run(torch.float32, "adam").optimizer.load_state_scalars({"kind": "adam", "step": step})
