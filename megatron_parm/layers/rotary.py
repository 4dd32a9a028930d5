"""Rotary positions: pairs of channels of queries and keys turned by an angle that grows with the position. Floor 4.

Source: Su et al. 2021 (RoFormer). "Halves" pairs channel i with i + d/2 (GPT-NeoX, Llama), "interleaved" 2i and 2i + 1.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class RotaryShape:
    """Which channels turn and how fast: the first `percent` of the head's channels, angle position / base^(2i/d).

    `interpolation` divides the positions (Megatron's `--rotary-seq-len-interpolation-factor`).
    """

    base: float = 10000.0
    percent: float = 1.0
    is_interleaved: bool = False
    interpolation: float = 1.0


@dataclass(frozen=True)
class Rotation:
    """Cosine and sine of every angle, [s, b, 1, d_turned/2], made once a step for all layers of a stage."""

    cosine: Tensor
    sine: Tensor
    is_interleaved: bool


def make_rotation(shape: RotaryShape, head_dim: int, position_ids: Tensor, dtype: torch.dtype) -> Rotation:
    """The rotation of `position_ids` [b, s] for heads of `head_dim` channels. Angles are taken in float64."""
    turned = int(head_dim * shape.percent)
    pairs = torch.arange(0, turned, 2, dtype=torch.float64, device=position_ids.device)
    speed = shape.base ** (-pairs / turned)  # [d_turned/2]
    angle = (position_ids.t() / shape.interpolation)[..., None, None] * speed  # [s, b, 1, d_turned/2]
    return Rotation(angle.cos().to(dtype), angle.sin().to(dtype), shape.is_interleaved)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn the first channels of every head of `x` [s, b, heads, d]; the others pass. The result is contiguous."""
    turned: Tensor = _Rotate.apply(x, rotation.cosine, rotation.sine, rotation.is_interleaved)  # type: ignore[no-untyped-call]
    return turned


class _Rotate(torch.autograd.Function):
    """A rotation; its adjoint is the rotation by the opposite angles."""

    @staticmethod
    def forward(saved: Any, x: Tensor, cosine: Tensor, sine: Tensor, is_interleaved: bool) -> Tensor:
        saved.save_for_backward(cosine, sine)
        saved.is_interleaved = is_interleaved
        return _turn(x, cosine, sine, is_interleaved)

    @staticmethod
    @once_differentiable
    def backward(saved: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        cosine, sine = saved.saved_tensors
        return _turn(gradient, cosine, -sine, saved.is_interleaved), None, None, None


def _turn(x: Tensor, cosine: Tensor, sine: Tensor, is_interleaved: bool) -> Tensor:
    turned = 2 * cosine.shape[-1]
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    first, second = _pairs(x[..., :turned], is_interleaved)
    to_first, to_second = _pairs(result[..., :turned], is_interleaved)
    torch.mul(first, cosine, out=to_first)
    to_first.addcmul_(second, sine, value=-1)
    torch.mul(second, cosine, out=to_second)
    to_second.addcmul_(first, sine)
    result[..., turned:] = x[..., turned:]
    return result


def _pairs(x: Tensor, is_interleaved: bool) -> tuple[Tensor, Tensor]:
    if is_interleaved:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]
