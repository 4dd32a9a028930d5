"""BERT's heads: the word under a mask, and the order of two segments. Floor 6.

Their own weights are whole on every rank; of the word head only the tied embedding and its bias are cut over tp.
Source: Devlin et al. 2018; Lan et al. 2019 (sentence order); names as in Megatron-Core.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_parm.layers.initialise import ZEROS, Initialiser, attach
from megatron_parm.models.block import make_norm
from megatron_parm.models.shape import ModelShape
from megatron_parm.parallel.context import Axis
from megatron_parm.parallel.sharding import Cut, make_parameter


class WholeLinear(nn.Module):
    """y = x W^T + b on activations that are identical on tp; weights are whole on every rank."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        initialiser: Initialiser,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.weight = attach(make_parameter((out_features, in_features), dtype=dtype, device=device), initialiser)
        self.bias = attach(make_parameter((out_features,), decays=False, dtype=dtype, device=device), ZEROS)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return F.linear(x, self.weight, self.bias)  # [..., out]


class WordHead(nn.Module):
    """dense, GELU, norm: what stands between the encoder and the tied embedding."""

    def __init__(self, shape: ModelShape, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        size = shape.hidden_size
        self.dense = WholeLinear(size, size, initialiser=shape.initialiser, dtype=dtype, device=device)
        self.layer_norm = make_norm(shape, dtype=dtype, device=device)

    def forward(self, hidden: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h]."""
        output: Tensor = self.layer_norm(F.gelu(self.dense(hidden)))
        return output


class WordBias(nn.Module):
    """The bias of the tied output layer, its rows cut over tp as those of the embedding."""

    def __init__(self, shape: ModelShape, *, tp: Axis, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        bias = make_parameter((shape.padded_vocab_size,), Cut(0, tp), decays=False, dtype=dtype, device=device)
        self.bias = attach(bias, ZEROS)


class Pooler(nn.Module):
    """tanh(dense(the first token)): one vector for each sample."""

    def __init__(self, shape: ModelShape, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        size = shape.hidden_size
        self.dense = WholeLinear(size, size, initialiser=shape.initialiser, dtype=dtype, device=device)

    def forward(self, hidden: Tensor) -> Tensor:
        """[s, b, h] -> [b, h]."""
        return torch.tanh(self.dense(hidden[0]))  # [b, h]


def order_loss(logits: Tensor, is_random: Tensor) -> Tensor:
    """Cross-entropy [b] of `logits` [b, 2] for the labels `is_random` [b], in float32 (float64 stays)."""
    precision = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return F.cross_entropy(logits.to(precision), is_random, reduction="none")  # [b]
