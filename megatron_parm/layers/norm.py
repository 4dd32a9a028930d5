"""LayerNorm and RMSNorm over the last dim, by torch's kernels or those of `accelerators.py`. Floor 4."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_parm.accelerators import TORCH
from megatron_parm.layers.initialise import ONES, ZEROS, attach
from megatron_parm.parallel.collectives import all_reduce_summing, share
from megatron_parm.parallel.context import Axis
from megatron_parm.parallel.sharding import Cut, make_parameter

NormKind = Literal["LayerNorm", "RMSNorm"]


class Norm(nn.Module):
    """Normalise the last dim, then scale (and, for LayerNorm, shift). Weights are whole on every rank.

    `is_zero_centred` stores weight - 1 (Megatron's `--apply-layernorm-1p`). `shared_over` is the axis whose ranks see
    different values, such as their own heads: the gradient of the weights is summed over it in the backward. With
    `is_partial_on_tp` they see their own slice of the sequence, and the gradients are summed once a step instead.
    An input wider than the weights (a residual stream in fp32) is normalised in its own precision, then rounded to
    theirs.
    """

    def __init__(
        self,
        size: int,
        *,
        kind: NormKind,
        epsilon: float,
        dtype: torch.dtype,
        device: torch.device,
        shared_over: Axis,
        is_zero_centred: bool = False,
        is_partial_on_tp: bool = False,
    ) -> None:
        super().__init__()
        self.size, self.epsilon, self.is_zero_centred, self.shared_over = size, epsilon, is_zero_centred, shared_over
        self.kernels = TORCH

        def vector() -> nn.Parameter:
            return make_parameter((size,), decays=False, is_partial_on_tp=is_partial_on_tp, dtype=dtype, device=device)

        self.weight = attach(vector(), ZEROS if is_zero_centred else ONES)
        self.bias: nn.Parameter | None = None
        if kind == "LayerNorm":
            self.bias = attach(vector(), ZEROS)

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        weight = share(self.weight, self.shared_over).to(x.dtype)
        if self.is_zero_centred:
            weight = weight + 1
        if self.bias is None:
            return self.kernels.rms_norm(x, weight, self.epsilon).to(self.weight.dtype)
        bias = share(self.bias, self.shared_over).to(x.dtype)
        return self.kernels.layer_norm(x, weight, bias, self.epsilon).to(self.weight.dtype)


class RowNorm(nn.Module):
    """RMSNorm over a last dim that is cut over tp, as is the weight: each rank adds its sum of squares.

    Call on all ranks of tp. Source: OLMoE's norm of queries and keys over all heads.
    """

    def __init__(self, size: int, epsilon: float, tp: Axis, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.size, self.epsilon, self.tp = size, epsilon, tp
        self.weight = attach(make_parameter((size,), Cut(0, tp), decays=False, dtype=dtype, device=device), ONES)

    def forward(self, x: Tensor) -> Tensor:
        """[..., size/tp] -> [..., size/tp]."""
        if self.tp.size == 1:
            return F.rms_norm(x, (self.size,), self.weight, self.epsilon)
        wide = x if x.dtype == torch.float64 else x.float()
        squares = all_reduce_summing(wide.square().sum(-1, keepdim=True), self.tp)  # [..., 1], each uses its own part
        normed = wide * torch.rsqrt(squares / self.size + self.epsilon)
        return normed.to(x.dtype) * self.weight
