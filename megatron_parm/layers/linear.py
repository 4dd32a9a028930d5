"""Linear layers cut over tp: by columns (outputs) and by rows (inputs). Floor 4.

The communication stands beside the product, never in one function with it, so that a pipeline may split the backward of
the product. The one exception is the column product under sequence parallelism, whose backward overlaps both: a
pipeline that splits it runs its communication twice, with the same gradients.
Source: Shoeybi et al. 2019, section 3 (column = f then product, row = product then g); Korthikanti et al. 2022, section
4.2 (sequence parallelism).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from megatron_parm.layers.initialise import ZEROS, Initialiser, attach
from megatron_parm.parallel import transport
from megatron_parm.parallel.collectives import all_reduce, reduce_scatter, share
from megatron_parm.parallel.context import Axis
from megatron_parm.parallel.sharding import Cut, make_parameter


class _GatheredProduct(Function):
    """x W^T + b of the joined slices of x: AllGather, product; its adjoint: product, ReduceScatter.

    Only the slice is kept. Backward gathers it again while it takes the gradient of the inputs, and sums that over the
    axis while it takes the gradient of the weight.
    """

    @staticmethod
    def forward(saved: Any, x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis) -> Tensor:
        saved.axis, saved.has_bias = axis, bias is not None
        saved.save_for_backward(x, weight)
        whole = transport.gather_stack(x, axis).flatten(0, 1)  # [s, b, in]
        return F.linear(whole, weight, bias)  # [s, b, out/tp]

    @staticmethod
    @once_differentiable
    def backward(saved: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = saved.saved_tensors
        gathering = transport.start_gather_stack(x, saved.axis)
        of_whole = gradient.matmul(weight)  # [s, b, in], this rank's part
        scattering = transport.start_scatter_sum(of_whole.reshape(saved.axis.size, *x.shape), saved.axis)
        rows = gradient.flatten(0, -2)  # [n, out/tp]
        of_weight = rows.t().matmul(gathering.land().view(-1, x.shape[-1]))  # [out/tp, in]
        of_bias = rows.sum(0) if saved.has_bias else None
        return scattering.land(), of_weight, of_bias, None


def column_product(x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, *, sequence_parallel: bool) -> Tensor:
    """x W^T + b with this rank's rows of W. Call on all ranks of tp.

    `x` is [s, b, in] and identical on tp; with `sequence_parallel` this rank's slice [s/tp, b, in]. The result is
    [s, b, out/tp] either way.
    """
    if sequence_parallel and tp.size > 1:
        product = _GatheredProduct.apply(x, weight, bias, tp)  # type: ignore[no-untyped-call]
        assert isinstance(product, Tensor)
        return product
    return F.linear(share(x, tp), weight, bias)  # [s, b, out/tp]


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b with the outputs cut over tp: [s, b, in] -> [s, b, out/tp]. Call on all ranks of tp.

    With `out_blocks` (2 for SwiGLU: gate, up) the weight is [blocks, out/blocks, in], each block is cut on its own, and
    the local outputs are the local parts of the blocks one after another. With `sequence_parallel` the input is this
    rank's slice, [s/tp, b, in].
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
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.tp, self.sequence_parallel = tp, sequence_parallel
        rows = (out_features,) if out_blocks == 1 else (out_blocks, out_features // out_blocks)
        cut = Cut(len(rows) - 1, tp)
        weight = make_parameter((*rows, in_features), cut, dtype=dtype, device=device)
        self.weight = attach(weight, initialiser)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = attach(make_parameter(rows, cut, decays=False, dtype=dtype, device=device), ZEROS)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, in], identical on tp, or [s/tp, b, in] -> [s, b, out/tp]."""
        weight = self.weight.flatten(0, -2)  # [out/tp, in]
        bias = None if self.bias is None else self.bias.flatten()  # [out/tp]
        return column_product(x, weight, bias, self.tp, sequence_parallel=self.sequence_parallel)  # [s, b, out/tp]


class RowParallelLinear(nn.Module):
    """y = x W^T + b with the inputs cut over tp: [s, b, in/tp] -> [s, b, out], identical on tp.

    Call on all ranks of tp. The bias is whole on every rank and added once, after the sum. With `sequence_parallel` the
    result is this rank's slice of it, [s/tp, b, out].
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
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.tp, self.sequence_parallel = tp, sequence_parallel
        weight = make_parameter((out_features, in_features), Cut(1, tp), dtype=dtype, device=device)
        self.weight = attach(weight, initialiser)
        self.bias: nn.Parameter | None = None
        if bias:
            rows = make_parameter(
                (out_features,), decays=False, is_partial_on_tp=sequence_parallel, dtype=dtype, device=device
            )
            self.bias = attach(rows, ZEROS)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, in/tp] -> [s, b, out], or [s/tp, b, out]."""
        return self.join(self.product(x))

    def product(self, x: Tensor) -> Tensor:
        """The local part, [s, b, in/tp] -> [s, b, out]: what `join` is to sum."""
        return F.linear(x, self.weight, self.bias if self.tp.size == 1 else None)  # [s, b, out]

    def join(self, part: Tensor) -> Tensor:
        """The sum of the parts over tp, with the bias: [s, b, out], or this rank's slice [s/tp, b, out]."""
        if self.tp.size == 1:
            return part
        whole = reduce_scatter(part, self.tp, 0) if self.sequence_parallel else all_reduce(part, self.tp)
        return whole if self.bias is None else whole + self.bias
