"""Gradients accumulate in the buffers. Reference: torch.autograd.grad of the summed loss, which touches no `.grad`."""

import pytest
import torch
from torch import Tensor, nn

from megatron_parm.grads.buffer import ALIGNMENT_ELEMENTS, GradientBuffers
from megatron_parm.grads.reduce import reduce_gradients
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.sharding import make_parameter, tie

CTX = ParallelContext.single()


def _parameters(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    made = {
        "weight": make_parameter((5, 3), dtype=dtype, device=CTX.device),
        "bias": make_parameter((5,), decays=False, dtype=dtype, device=CTX.device),
        "experts": make_parameter((2, 3, 7), role="expert", dtype=dtype, device=CTX.device),
        "idle": make_parameter((2, 4), role="expert", dtype=dtype, device=CTX.device),
    }
    for parameter in made.values():
        nn.init.normal_(parameter)
    return made


def _loss(parameters: dict[str, nn.Parameter], x: Tensor) -> Tensor:
    hidden = torch.nn.functional.linear(x, parameters["weight"], parameters["bias"]).square().sum()
    return hidden + (x @ parameters["experts"]).tanh().sum()


def _micro_batches(dtype: torch.dtype, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 3, generator=generator).to(dtype) for _ in range(count)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_backward_accumulates_into_the_buffer(dtype: torch.dtype) -> None:
    parameters = _parameters(dtype)
    buffers = GradientBuffers(parameters, CTX)
    for step in range(2):  # after zero() the second step must not remember the first
        buffers.zero()
        batches = _micro_batches(dtype, 3)[step:]
        for x in batches:
            _loss(parameters, x).backward()
        total = sum(_loss(parameters, x) for x in batches)
        expected = torch.autograd.grad(total, list(parameters.values()), allow_unused=True, materialize_grads=True)
        for name, reference in zip(parameters, expected, strict=True):
            assert parameters[name].grad is buffers.gradient_of(name)
            torch.testing.assert_close(buffers.gradient_of(name), reference)
            assert any(_shares_memory(buffers.gradient_of(name), buffer.data) for buffer in buffers.buffers)
    buffers.expect_attached()


def test_a_tied_parameter_has_a_buffer_of_its_own() -> None:
    """So that the first and the last stage, whose other parameters differ, reduce it as one and the same tensor."""
    parameters = _parameters(torch.float32)
    tie(parameters["weight"])
    buffers = GradientBuffers(parameters, CTX).buffers
    assert [(b.role, b.is_tied, [slot.name for slot in b.slots]) for b in buffers] == [
        ("dense", False, ["bias"]),
        ("dense", True, ["weight"]),
        ("expert", False, ["idle", "experts"]),
    ]


def _shares_memory(view: Tensor, whole: Tensor) -> bool:
    return view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_an_idle_parameter_has_gradient_zero_and_not_none(dtype: torch.dtype) -> None:
    parameters = _parameters(dtype)
    buffers = GradientBuffers(parameters, CTX)
    _loss(parameters, _micro_batches(dtype, 1)[0]).backward()
    assert buffers.gradient_of("idle").shape == (2, 4)
    assert torch.count_nonzero(buffers.gradient_of("idle")) == 0
    reduce_gradients(buffers, CTX)
    assert torch.count_nonzero(buffers.gradient_of("idle")) == 0


def test_bfloat16_gradients_accumulate_in_float32() -> None:
    """Reference: each bfloat16 gradient on its own, added in float32; a sum in bfloat16 is far from it."""
    parameters = _parameters(torch.bfloat16)
    batches = _micro_batches(torch.bfloat16, 200)
    expected = torch.zeros(5, 3)
    rounded = torch.zeros(5, 3, dtype=torch.bfloat16)
    for x in batches:
        (gradient,) = torch.autograd.grad(_loss(parameters, x), [parameters["weight"]])
        expected += gradient.float()
        rounded += gradient
    buffers = GradientBuffers(parameters, CTX)
    for x in batches:
        _loss(parameters, x).backward()
        assert parameters["weight"].grad is None
    assert buffers.gradient_of("weight").dtype == torch.float32
    assert torch.equal(buffers.gradient_of("weight"), expected)
    assert (rounded.float() - expected).abs().max() > 1e-2  # what accumulating in bfloat16 would lose
    buffers.zero()
    assert torch.count_nonzero(buffers.gradient_of("weight")) == 0


def test_a_tied_parameter_has_one_slot() -> None:
    parameters = _parameters(torch.float64)
    named = {**parameters, "output.weight": parameters["weight"]}
    buffers = GradientBuffers(named, CTX)
    assert list(buffers.parameters) == list(parameters)
    assert [slot.name for buffer in buffers.buffers for slot in buffer.slots].count("weight") == 1
    assert buffers.gradient_of("output.weight") is buffers.gradient_of("weight")
    (named["output.weight"].sum() + 2 * parameters["weight"].sum()).backward()
    assert torch.equal(buffers.gradient_of("weight"), torch.full((5, 3), 3.0, dtype=torch.float64))


def test_one_buffer_per_role_and_dtype_filled_from_the_front() -> None:
    parameters = _parameters(torch.float32)
    parameters["double"] = make_parameter((3,), dtype=torch.float64, device=CTX.device)
    parameters["half"] = make_parameter((3,), dtype=torch.bfloat16, device=CTX.device)
    found = {
        (buffer.role, buffer.data.dtype): [slot.name for slot in buffer.slots]
        for buffer in GradientBuffers(parameters, CTX).buffers
    }
    assert found == {
        ("dense", torch.float32): ["half", "bias", "weight"],
        ("dense", torch.float64): ["double"],
        ("expert", torch.float32): ["idle", "experts"],
    }
    for buffer in GradientBuffers(_parameters(torch.float32), CTX).buffers:
        assert all(slot.start % ALIGNMENT_ELEMENTS == 0 for slot in buffer.slots)


def test_scale() -> None:
    buffers = GradientBuffers(_parameters(torch.float32), CTX)
    buffers.gradient_of("bias").fill_(3.0)
    buffers.gradient_of("experts").fill_(2.0)
    buffers.scale(0.5)
    assert buffers.gradient_of("bias").tolist() == [1.5] * 5
    assert torch.equal(buffers.gradient_of("experts"), torch.ones(2, 3, 7))


@pytest.mark.parametrize("replacement", [None, torch.zeros(5)], ids=["none", "another tensor"])
def test_a_gradient_that_left_the_buffer_is_found(replacement: Tensor | None) -> None:
    parameters = _parameters(torch.float32)
    buffers = GradientBuffers(parameters, CTX)
    parameters["bias"].grad = replacement
    with pytest.raises(AssertionError, match="gradient of bias was replaced"):
        reduce_gradients(buffers, CTX)
