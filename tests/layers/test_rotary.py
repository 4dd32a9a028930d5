"""Rotary positions against the complex product, Hugging Face's Llama, and the rule that only distances count."""

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from megatron_parm.layers.rotary import RotaryShape, make_rotation, rotate

X = torch.randn(5, 2, 3, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)  # [s, b, heads, d]
POSITIONS = torch.stack([torch.arange(5), torch.tensor([0, 1, 0, 1, 2])])  # [b, s], the second starts anew


def by_complex_numbers(x: Tensor, shape: RotaryShape) -> Tensor:
    turned = int(8 * shape.percent)
    speed = shape.base ** (-torch.arange(0, turned, 2, dtype=torch.float64) / turned)
    angle = POSITIONS.t()[:, :, None, None] / shape.interpolation * speed
    first, second = (
        (x[..., 0:turned:2], x[..., 1:turned:2])
        if shape.is_interleaved
        else (x[..., : turned // 2], x[..., turned // 2 : turned])
    )
    product = torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle)
    parts = [product.real, product.imag]
    joined = torch.stack(parts, -1).flatten(-2) if shape.is_interleaved else torch.cat(parts, -1)
    return torch.cat([joined, x[..., turned:]], -1)


@pytest.mark.parametrize(
    "shape",
    [
        RotaryShape(),
        RotaryShape(is_interleaved=True),
        RotaryShape(base=500.0, percent=0.5),
        RotaryShape(percent=0.5, is_interleaved=True, interpolation=4.0),
    ],
)
def test_equals_the_complex_product_with_its_gradient(shape: RotaryShape) -> None:
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    weights = torch.randn(X.shape, dtype=torch.float64)
    found = rotate(x, make_rotation(shape, 8, POSITIONS, torch.float64))
    expected = by_complex_numbers(y, shape)
    torch.testing.assert_close(found, expected)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    assert found.is_contiguous()


def test_halves_equal_hugging_face() -> None:
    rotation = make_rotation(RotaryShape(), 8, POSITIONS, torch.float64)
    cosine, sine = (torch.cat([t.squeeze(2)] * 2, -1).transpose(0, 1) for t in (rotation.cosine, rotation.sine))
    expected, _ = apply_rotary_pos_emb(X.permute(1, 2, 0, 3), X.permute(1, 2, 0, 3), cosine, sine)
    torch.testing.assert_close(rotate(X, rotation).permute(1, 2, 0, 3), expected)


def test_only_the_distance_counts() -> None:
    query, key = X[:1, :1], X[1:2, :1]

    def score(q: int, k: int) -> float:
        q_turn, k_turn = (make_rotation(RotaryShape(), 8, torch.tensor([[at]]), torch.float64) for at in (q, k))
        return float((rotate(query, q_turn) * rotate(key, k_turn)).sum())

    assert score(3, 1) == pytest.approx(score(1002, 1000), rel=1e-9)
    assert score(3, 1) != pytest.approx(score(4, 1), rel=1e-3)
