"""What --fp32-residual-connection and --attention-softmax-in-fp32 do to a 16-bit model. Reference: float64.

And that every layer runs in fp16 on a CPU, forward and backward.
"""

import pytest
import torch
from torch import Tensor

from megatron_parm.layers.attention import SelfAttention
from megatron_parm.layers.initialise import Initialiser
from megatron_parm.layers.rotary import make_rotation
from megatron_parm.models.block import residual_dtype
from tests.models.gpt_cases import CPU, SINGLE, batch_of, build, small_shape

NARROW = [torch.bfloat16, torch.float16]
FP32 = {"residual_in_fp32": True, "softmax_in_fp32": True}


def _attended(dtype: torch.dtype, softmax_in_fp32: bool, of: torch.dtype | None = None) -> Tensor:
    """The core of an attention of `dtype` on heads that were rounded to `of`."""
    shape = small_shape(softmax_in_fp32=softmax_in_fp32).attention
    normal = Initialiser("normal", 0.5)
    layer = SelfAttention(shape, tp=SINGLE, initialiser=normal, output_initialiser=normal, dtype=dtype, device=CPU)
    heads = torch.randn(3, 64, 2, 4, 8, generator=torch.Generator().manual_seed(1)).mul(2).to(of or dtype).to(dtype)
    return layer._attend(*heads.unbind(0), None)


@pytest.mark.parametrize("dtype", NARROW)
def test_attention_in_fp32_is_rounded_once(dtype: torch.dtype) -> None:
    """Half a unit in the last place of the result; the kernel of the narrow precision rounds the weights too."""
    exact = _attended(torch.float64, False, dtype)
    found = _attended(dtype, True)
    assert found.dtype == dtype
    limit = 1.01 * torch.finfo(dtype).eps / 2 * exact.abs() + 1e-6
    assert ((found.double() - exact).abs() <= limit).all()
    assert not ((_attended(dtype, False).double() - exact).abs() <= limit).all()


@pytest.mark.parametrize("kind", [{}, {"residual_is_normed": True}, {"normalisation": "RMSNorm", "positions": "rope"}])
@pytest.mark.parametrize("dtype", NARROW)
def test_a_residual_stream_in_fp32_does_not_round_its_sums(dtype: torch.dtype, kind: dict[str, object]) -> None:
    """16 layers of small updates: in 16 bits each sum is rounded, in fp32 only what the layers make."""
    hidden = {}
    for name, of, more in (("exact", torch.float64, {}), ("wide", dtype, FP32), ("narrow", dtype, {})):
        shape = small_shape(num_layers=16, initialiser=Initialiser("normal", 0.1), **kind, **more)
        model = build(shape, dtype=of)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(dtype).to(of))  # the same weights in each
        tokens, position_ids, _ = batch_of(shape)
        x = model.embedding(tokens, position_ids)
        assert x.dtype == residual_dtype(shape, of)
        for block in model.decoder.layers.values():
            rotation = None
            if shape.positions == "rope":
                rotation = make_rotation(shape.rotary, shape.head_dim, position_ids, of)
            x = block(x, rotation, None)
            assert x.dtype == residual_dtype(shape, of)
        hidden[name] = x.detach().double()
    errors = {name: float((hidden[name] - hidden["exact"]).square().mean()) ** 0.5 for name in ("wide", "narrow")}
    assert errors["wide"] < 0.8 * errors["narrow"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wider_models_are_left_as_they_are(dtype: torch.dtype) -> None:
    losses = [build(shape, dtype=dtype)(*batch_of(shape)) for shape in (small_shape(), small_shape(**FP32))]
    assert torch.equal(*losses)


@pytest.mark.parametrize("more", [{}, FP32], ids=["plain", "fp32"])
@pytest.mark.parametrize(
    "kind",
    [
        {"hidden_dropout": 0.1, "attention_dropout": 0.1},
        {"positions": "rope", "activation": "swiglu", "normalisation": "RMSNorm", "has_norm_of_heads": True},
    ],
)
def test_every_layer_runs_in_fp16(kind: dict[str, object], more: dict[str, object]) -> None:
    shape = small_shape(**kind, **more)
    model = build(shape, dtype=torch.float16)
    loss = model(*batch_of(shape))
    assert loss.dtype == torch.float32
    (loss.mean() * 1024).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == torch.float16 and parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name
