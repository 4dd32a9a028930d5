"""Rotary positions: pairs of channels of queries and keys turned by an angle that grows with the position. Floor 4.

Source: Su et al. 2021 (RoFormer). "Halves" pairs channel i with i + d/2 (GPT-NeoX, Llama), "interleaved" 2i and 2i + 1.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class Llama3Scaling:
    """Long waves turn `factor` times slower, short ones as before, those between by degrees (Llama 3.1).

    Long: longer than original_positions / low; short: shorter than original_positions / high.
    """

    factor: float = 8.0
    low: float = 1.0
    high: float = 4.0
    original_positions: int = 8192

    def slowed(self, speed: Tensor) -> Tensor:
        """The speeds [pairs] of the channel pairs, scaled."""
        turns = self.original_positions * speed / (2 * math.pi)  # of each pair over the original context
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)  # 1: a short wave
        return speed * (kept + (1 - kept) / self.factor)


@dataclass(frozen=True)
class YarnScaling:
    """Pairs of few turns over the original context slow down by `factor`, those of many stay, with a ramp between.

    `magnitude` multiplies cosine and sine, and so the attention scores; None: 0.1 ln(factor) + 1. Source: Peng et al.
    2023 (YaRN).
    """

    factor: float
    original_positions: int
    fast: float = 32.0
    slow: float = 1.0
    magnitude: float | None = None

    def slowed(self, speed: Tensor, base: float) -> Tensor:
        """The speeds [pairs] of the channel pairs, scaled."""
        turned = 2 * speed.shape[0]

        def pair_of(turns: float) -> float:
            return turned * math.log(self.original_positions / (turns * 2 * math.pi)) / (2 * math.log(base))

        first = max(math.floor(pair_of(self.fast)), 0)
        last = min(math.ceil(pair_of(self.slow)), turned - 1)
        place = torch.arange(speed.shape[0], dtype=speed.dtype, device=speed.device)
        slowed = ((place - first) / max(last - first, 0.001)).clamp(0, 1)  # 1: a pair of few turns
        return speed * (1 - slowed + slowed / self.factor)

    @property
    def scale(self) -> float:
        """What cosine and sine are multiplied by."""
        if self.magnitude is not None:
            return self.magnitude
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


@dataclass(frozen=True)
class RotaryShape:
    """Which channels turn and how fast: the first `percent` of the head's channels, angle position / base^(2i/d).

    `interpolation` divides the positions (Megatron's `--rotary-seq-len-interpolation-factor`). `scaling` stretches the
    context by wave length.
    """

    base: float = 10000.0
    percent: float = 1.0
    is_interleaved: bool = False
    interpolation: float = 1.0
    scaling: Llama3Scaling | YarnScaling | None = None


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
    scale = 1.0
    if isinstance(shape.scaling, Llama3Scaling):
        speed = shape.scaling.slowed(speed)
    elif isinstance(shape.scaling, YarnScaling):
        speed, scale = shape.scaling.slowed(speed, shape.base), shape.scaling.scale
    angle = (position_ids.t() / shape.interpolation)[..., None, None] * speed  # [s, b, 1, d_turned/2]
    return Rotation((scale * angle.cos()).to(dtype), (scale * angle.sin()).to(dtype), shape.is_interleaved)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn the first channels of every head of `x` [s, b, heads, d]; the others pass. The result is contiguous."""
    turned: Tensor = _Rotate.apply(x, rotation.cosine, rotation.sine, rotation.is_interleaved)  # type: ignore[no-untyped-call]
    return turned


class _Rotate(torch.autograd.Function):
    """A rotation, times a number; its adjoint is that of the opposite angles, times the same number."""

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
