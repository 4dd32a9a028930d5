"""The experts of this rank as one batched product, each cut over esp along its hidden width. Floor 5.

A rank holds E / ep experts and f / esp of each one's width, so what it computes is one esp-th of each sum: the schedule
adds the parts. The second bias is added by the first rank of esp only. Source: parm.md sections 1 and 3.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from megatron_parm.layers.feed_forward import ACTIVATIONS, Activation, gates_of
from megatron_parm.layers.initialise import ZEROS, Initialiser, attach
from megatron_parm.moe.buckets import Buckets, Packed
from megatron_parm.parallel.collectives import share
from megatron_parm.parallel.context import Axis
from megatron_parm.parallel.sharding import Cut, make_parameter

GROUPED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GROUPED_ROW_BYTES = 16  # grouped_mm takes only matrices whose rows are a multiple of this


class _DivideGradient(Function):
    @staticmethod
    def forward(saved: Any, x: Tensor, divisor: int) -> Tensor:
        saved.divisor = divisor
        return x.view_as(x)

    @staticmethod
    def backward(saved: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient / saved.divisor, None


def _divide_gradient(x: Tensor, divisor: int) -> Tensor:
    if divisor == 1:
        return x
    result = _DivideGradient.apply(x, divisor)  # type: ignore[no-untyped-call]
    assert isinstance(result, Tensor)
    return result


class _ContiguousGradient(Function):
    @staticmethod
    def forward(saved: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(saved: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


class Experts(nn.Module):
    """weight1 `[E/ep, (2,) f/esp, h]`, weight2 `[E/ep, h, f/esp]`, biases `[E/ep, (2,) f/esp]` and `[E/ep, h]`."""

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_experts: int,
        *,
        activation: Activation,
        bias: bool,
        ep: Axis,
        esp: Axis,
        initialiser: Initialiser,
        output_initialiser: Initialiser,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._activate = ACTIVATIONS[activation]
        self._esp = esp
        blocks = (2,) if gates_of(activation) == 2 else ()
        width = 1 + len(blocks)  # the dim of weight1 that is the feed-forward width

        def parameter(
            shape: tuple[int, ...], wide: int | None, start: Initialiser, decays: bool = True
        ) -> nn.Parameter:
            cuts = [Cut(0, ep)] + ([Cut(wide, esp)] if wide is not None else [])
            made = make_parameter(shape, *cuts, role="expert", decays=decays, dtype=dtype, device=device)
            return attach(made, start)

        first = (num_experts, *blocks, ffn_hidden_size)
        self.weight1 = parameter((*first, hidden_size), width, initialiser)
        self.weight2 = parameter((num_experts, hidden_size, ffn_hidden_size), 2, output_initialiser)
        self.bias1 = parameter(first, width, ZEROS, decays=False) if bias else None
        self.bias2 = parameter((num_experts, hidden_size), None, ZEROS, decays=False) if bias else None

    def forward(self, inbox: Buckets, *, copies: int = 1) -> Buckets:
        """One esp-th of each expert's output, in the layout of `inbox`: `[peers, e, c, h]` or `Packed`.

        copies: how many times each token arrives in all; the weights' gradient is divided by it.
        """
        weight1 = _divide_gradient(self.weight1, copies).flatten(1, -2)  # [e, (2 *) f/esp, h]
        weight2 = _divide_gradient(self.weight2, copies)
        bias1 = None if self.bias1 is None else _divide_gradient(self.bias1, copies).flatten(1)
        bias2 = None if self.bias2 is None else self._bias_of_first(_divide_gradient(self.bias2, copies))
        if isinstance(inbox, Packed):
            return self._packed(inbox, weight1, weight2, bias1, bias2)
        peers, num_local, slots, hidden = inbox.shape
        x = inbox.transpose(0, 1).reshape(num_local, peers * slots, hidden)  # [e, peers * c, h]
        x = _add(torch.bmm(x, weight1.transpose(1, 2)), bias1)  # [e, peers * c, (2 *) f/esp]
        x = _add(torch.bmm(self._activate(x), weight2.transpose(1, 2)), bias2)  # [e, peers * c, h]
        return x.view(num_local, peers, slots, hidden).transpose(0, 1)  # [peers, e, c, h]

    def _bias_of_first(self, bias: Tensor) -> Tensor:
        return share(bias, self._esp) * (self._esp.rank == 0)

    def _packed(
        self, inbox: Packed, weight1: Tensor, weight2: Tensor, bias1: Tensor | None, bias2: Tensor | None
    ) -> Packed:
        by_expert = tuple(zip(*inbox.counts, strict=True))  # [e][peers]
        counts = [sum(peers) for peers in by_expert]
        ends = _row_ends(counts, inbox.rows.device)
        x = _regroup(inbox.rows, inbox.counts)  # from (peer, expert) to (expert, peer)
        x = _add_grouped(_grouped_linear(x, weight1, counts, ends), bias1, counts)  # [r, (2 *) f/esp]
        x = _add_grouped(_grouped_linear(self._activate(x), weight2, counts, ends), bias2, counts)  # [r, h]
        return replace(inbox, rows=_regroup(x, by_expert))


def _add(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias.unsqueeze(1)


def _add_grouped(x: Tensor, bias: Tensor | None, counts: list[int]) -> Tensor:
    if bias is None:
        return x
    return x + torch.cat([row.expand(count, -1) for row, count in zip(bias.unbind(0), counts, strict=True)])


def _regroup(rows: Tensor, sizes: Sequence[Sequence[int]]) -> Tensor:
    """Blocks of rows in the order (outer, inner), `sizes[outer][inner]` rows each, into the order (inner, outer)."""
    outer, inner = len(sizes), len(sizes[0])
    if outer == 1 or inner == 1:
        return rows
    blocks = torch.split(rows, list(chain(*sizes)))
    return torch.cat([blocks[o * inner + i] for i in range(inner) for o in range(outer)])


def _row_ends(counts: list[int], device: torch.device) -> Tensor:
    """Where each expert's rows end; copied without waiting for the device."""
    on_host = torch.tensor(list(accumulate(counts)), dtype=torch.int32, pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True)


def _grouped_linear(x: Tensor, weight: Tensor, counts: list[int], ends: Tensor) -> Tensor:
    """Rows of x `[r, in]`, sorted by expert, each times its expert's weight `[e, out, in]`: `[r, out]`."""
    grouped: Callable[..., Tensor] | None = getattr(F, "grouped_mm", None)
    if grouped is not None and x.shape[0] and _fits_grouped(weight):
        product = grouped(x, weight.transpose(1, 2), offs=ends)
        written: Tensor = _ContiguousGradient.apply(product)  # type: ignore[no-untyped-call]  # all that it takes
        return written
    blocks = zip(torch.split(x, counts), weight.unbind(0), strict=True)
    return torch.cat([F.linear(rows, matrix) for rows, matrix in blocks])  # [r, out]


def _fits_grouped(weight: Tensor) -> bool:
    """Whether grouped_mm takes `weight` and both of its gradients' operands, whose rows are as wide as its sides."""
    sides = (size * weight.element_size() for size in weight.shape[1:])
    return weight.dtype in GROUPED_DTYPES and all(side % GROUPED_ROW_BYTES == 0 for side in sides)
