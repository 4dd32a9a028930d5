"""Linear layers cut over tp: by columns (outputs) and by rows (inputs). Floor 4.

The communication stands beside the product, never in one function with it, so that a pipeline may split the backward of
the product. Source: Shoeybi et al. 2019, section 3 (column = f then product, row = product then g).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_parm.layers.initialise import ZEROS, Initialiser, attach
from megatron_parm.parallel.collectives import all_reduce, share
from megatron_parm.parallel.context import Axis
from megatron_parm.parallel.sharding import Cut, make_parameter


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b with the outputs cut over tp: [s, b, in] -> [s, b, out/tp]. Call on all ranks of tp.

    With `out_blocks` (2 for SwiGLU: gate, up) the weight is [blocks, out/blocks, in], each block is cut on its own, and
    the local outputs are the local parts of the blocks one after another.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp: Axis,
        bias: bool,
        initialiser: Initialiser,
        dtype: torch.dtype,
        device: torch.device,
        out_blocks: int = 1,
    ) -> None:
        super().__init__()
        self.tp = tp
        rows = (out_features,) if out_blocks == 1 else (out_blocks, out_features // out_blocks)
        cut = Cut(len(rows) - 1, tp)
        weight = make_parameter((*rows, in_features), cut, dtype=dtype, device=device)
        self.weight = attach(weight, initialiser)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = attach(make_parameter(rows, cut, decays=False, dtype=dtype, device=device), ZEROS)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, in], identical on tp -> [s, b, out/tp]."""
        weight = self.weight.flatten(0, -2)  # [out/tp, in]
        bias = None if self.bias is None else self.bias.flatten()  # [out/tp]
        return F.linear(share(x, self.tp), weight, bias)  # [s, b, out/tp]


class RowParallelLinear(nn.Module):
    """y = x W^T + b with the inputs cut over tp: [s, b, in/tp] -> [s, b, out], identical on tp.

    Call on all ranks of tp. The bias is whole on every rank and added once, after the sum.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp: Axis,
        bias: bool,
        initialiser: Initialiser,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.tp = tp
        weight = make_parameter((out_features, in_features), Cut(1, tp), dtype=dtype, device=device)
        self.weight = attach(weight, initialiser)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = attach(make_parameter((out_features,), decays=False, dtype=dtype, device=device), ZEROS)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, in/tp] -> [s, b, out]."""
        if self.tp.size == 1:
            return F.linear(x, self.weight, self.bias)  # [s, b, out]
        whole = all_reduce(F.linear(x, self.weight), self.tp)  # [s, b, out]
        return whole if self.bias is None else whole + self.bias
