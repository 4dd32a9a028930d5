"""The dense feed-forward layer (MLP), its hidden width cut over tp. Floor 4."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_parm.layers.initialise import Initialiser
from megatron_parm.layers.linear import ColumnParallelLinear, RowParallelLinear
from megatron_parm.layers.recompute import Recomputation
from megatron_parm.parallel.context import Axis

Activation = Literal["gelu", "gelu_tanh", "squared_relu", "swiglu"]


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)  # [..., f/tp] each
    return F.silu(gate) * up


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "squared_relu": _squared_relu,
    "swiglu": _swiglu,
}


def gates_of(activation: Activation) -> int:
    """Blocks of width f that the first product makes: 2 for a gated activation, else 1."""
    return 2 if activation == "swiglu" else 1


class FeedForward(nn.Module):
    """[s, b, h] -> [s, b, f/tp] -> activation -> [s, b, h]. Call on all ranks of tp.

    With `sequence_parallel` both ends are this rank's slice, [s/tp, b, h]. `recompute` runs the products again in
    backward, all but the sum over tp; under sequence parallelism with their AllGather.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        activation: Activation,
        tp: Axis,
        bias: bool,
        initialiser: Initialiser,
        output_initialiser: Initialiser,
        dtype: torch.dtype,
        device: torch.device,
        sequence_parallel: bool = False,
        recompute: Recomputation | None = None,
    ) -> None:
        super().__init__()
        self._recompute = recompute
        self.activate = ACTIVATIONS[activation]
        blocks = gates_of(activation)
        self.linear_fc1 = ColumnParallelLinear(
            hidden_size,
            blocks * ffn_hidden_size,
            tp=tp,
            bias=bias,
            initialiser=initialiser,
            dtype=dtype,
            device=device,
            out_blocks=blocks,
            sequence_parallel=sequence_parallel,
        )
        self.linear_fc2 = RowParallelLinear(
            ffn_hidden_size,
            hidden_size,
            tp=tp,
            bias=bias,
            initialiser=output_initialiser,
            dtype=dtype,
            device=device,
            sequence_parallel=sequence_parallel,
        )

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h]; with `sequence_parallel` [s/tp, b, h] -> [s/tp, b, h]."""
        part = self._part(x) if self._recompute is None else self._recompute(self._part, x)  # [s, b, h]
        return self.linear_fc2.join(part)

    def _part(self, x: Tensor) -> Tensor:
        return self.linear_fc2.product(self.activate(self.linear_fc1(x)))  # [s, b, h], to be summed over tp
