"""Kernels of a built model. Reference: the model as it was built."""

import shutil

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_parm.accelerators import TORCH, NormKernels
from megatron_parm.models.kernels import use_kernels
from tests.models.gpt_cases import batch_of, build, small_shape

SHAPES = {
    "gpt2": small_shape(),
    "llama": small_shape(normalisation="RMSNorm", activation="swiglu", has_bias=False, has_norm_of_heads=True),
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_norm_computes_by_the_given_kernels(name: str) -> None:
    """Two norms a block, two more of heads, one at the end; the results are those of torch's kernels."""
    asked: list[torch.Size] = []

    def rms(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        asked.append(weight.shape)
        return F.rms_norm(x, weight.shape, weight, epsilon)

    def layer(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
        asked.append(weight.shape)
        return F.layer_norm(x, weight.shape, weight, bias, epsilon)

    model = build(SHAPES[name])
    tokens, positions, labels = batch_of(model.shape)
    before = model(tokens, positions, labels)
    use_kernels(model, NormKernels("counting", rms, layer), compiles=False)
    assert torch.equal(model(tokens, positions, labels), before)
    assert len(asked) == (5 if name == "gpt2" else 9)


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.timeout(600)
def test_a_compiled_model_gives_the_same_loss_and_gradients(name: str) -> None:
    """To float32's rounding: the compiler fuses, and sums in another order."""
    plain, compiled = build(SHAPES[name]), build(SHAPES[name])
    use_kernels(compiled, TORCH, compiles=True)
    tokens, positions, labels = batch_of(plain.shape)
    losses = [model(tokens, positions, labels).mean() for model in (plain, compiled)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    for loss in losses:
        loss.backward()
    for (parameter, ours), theirs in zip(compiled.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6, msg=parameter)
