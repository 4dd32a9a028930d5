"""Layers on slices of the sequence against one process in float64: outputs, input gradients, every weight's gradient.

Slices go in and come out; the parts of norm weights, row biases and positions are summed as grads/finish.py does.
"""

from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from megatron_parm.layers import linear
from megatron_parm.layers.attention import AttentionShape, SelfAttention
from megatron_parm.layers.embedding import PositionEmbedding, VocabularyEmbedding
from megatron_parm.layers.feed_forward import FeedForward
from megatron_parm.layers.initialise import Initialiser, initialise_weights
from megatron_parm.layers.linear import ColumnParallelLinear, RowParallelLinear
from megatron_parm.layers.norm import Norm
from megatron_parm.layers.rotary import RotaryShape, make_rotation
from megatron_parm.parallel.collectives import split
from megatron_parm.parallel.context import Axis, ParallelContext
from tests.harness.collectives import counted
from tests.harness.layouts import Layout
from tests.harness.pools import Pools
from tests.layers.parallel_check import (
    TOLERANCE,
    TP_LAYOUTS,
    Box,
    boxes_of,
    compare_sliced,
    gradient_differences,
    randomise_vectors,
)

CPU = torch.device("cpu")
NORMAL = Initialiser("normal", 0.5)
SETTINGS = {"dtype": torch.float64, "device": CPU}
X = torch.randn(8, 2, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Pair(nn.Module):
    """Norm, column, a bend, row: what every half of a block is made of."""

    def __init__(self, tp: Axis, blocks: int, bias: bool) -> None:
        super().__init__()
        self.norm = Norm(16, kind="LayerNorm", epsilon=1e-5, shared_over=Axis.single("tp"), is_partial_on_tp=True,
                         **SETTINGS)  # fmt: skip
        common = {"tp": tp, "bias": bias, "initialiser": NORMAL, "sequence_parallel": True, **SETTINGS}
        self.column = ColumnParallelLinear(16, 8 * blocks, out_blocks=blocks, **common)
        self.row = RowParallelLinear(8, 16, **common)
        self.blocks = blocks

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.column(self.norm(x)).chunk(self.blocks, dim=-1)
        for other in others:
            first = first * other
        return self.row(torch.tanh(first))


class Attention(nn.Module):
    """Rotated attention with norms of heads and two documents in the second sample."""

    def __init__(self, tp: Axis, groups: int) -> None:
        super().__init__()
        shape = AttentionShape(16, 8, groups, 4, True, True, True, norm_of_heads="RMSNorm")
        self.inner = SelfAttention(
            shape, tp=tp, initialiser=NORMAL, output_initialiser=NORMAL, sequence_parallel=True, **SETTINGS
        )
        self.rotation = make_rotation(RotaryShape(), 4, torch.arange(8).expand(2, 8), torch.float64)
        self.may_attend = torch.ones(2, 1, 8, 8, dtype=torch.bool).tril()
        self.may_attend[1, :, 4:, :4] = False

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, self.rotation, self.may_attend)


def make_pair(tp: Axis, blocks: int, bias: bool = True) -> nn.Module:
    return Pair(tp, blocks, bias)


def make_attention(tp: Axis, groups: int) -> nn.Module:
    return Attention(tp, groups)


def make_feed_forward(tp: Axis) -> nn.Module:
    return FeedForward(
        16, 12, activation="swiglu", tp=tp, bias=True, initialiser=NORMAL, output_initialiser=NORMAL,
        sequence_parallel=True, **SETTINGS,
    )  # fmt: skip


CASES: dict[str, Callable[[Axis], nn.Module]] = {
    "pair": partial(make_pair, blocks=1),
    "gated pair": partial(make_pair, blocks=2),
    "without bias": partial(make_pair, blocks=1, bias=False),
    "attention": partial(make_attention, groups=4),
    "every head": partial(make_attention, groups=8),
    "feed-forward": make_feed_forward,
}


@pytest.mark.cover(layout=TP_LAYOUTS, name=list(CASES))
def test_slices_equal_one_process(pools: Pools, layout: Layout, name: str) -> None:
    found = compare_sliced(pools, layout, CASES[name], X)
    assert max(found.values()) < TOLERANCE, found


def test_without_the_sum_over_tp_norms_and_row_biases_are_parts(pools: Pools) -> None:
    """The negative control: only their gradients see it."""
    found = compare_sliced(pools, Layout(2, tp=2), CASES["pair"], X, sums_parts=False)
    parts = {"norm.weight", "norm.bias", "row.bias"}
    assert min(found[name] for name in parts) > 1e-3
    assert max(found[name] for name in found.keys() - parts) < TOLERANCE, found


def _collectives(ctx: ParallelContext) -> tuple[list[str], list[str], list[str]]:
    """Those of a forward, of its backward, and the sizes that the graph of the column product keeps."""
    pair, forward, backward = Pair(ctx.tp, 1, True), [], []
    initialise_weights(pair, 3)
    with counted(forward):
        output = pair(X.chunk(ctx.tp.size)[ctx.tp.rank].clone().requires_grad_())
    with counted(backward):
        output.sum().backward()
    kept: list[str] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(str(list(t.shape))) or t, lambda t: t):
        pair.column(X.chunk(ctx.tp.size)[ctx.tp.rank].clone().requires_grad_())
    return forward, backward, kept


def test_communication_is_that_of_one_all_reduce_a_pass_and_the_slice_alone_is_kept(pools: Pools) -> None:
    """AllGather and ReduceScatter each way, and backward one AllGather more in place of the kept activation."""
    for forward, backward, kept in pools.run(Layout(4, tp=4), _collectives):
        assert forward == ["start_gather_stack", "start_scatter_sum"]
        assert backward == ["start_gather_stack", "start_gather_stack", "start_scatter_sum"]
        assert "[2, 2, 16]" in kept and "[8, 2, 16]" not in kept and "[16, 16]" not in kept


def _bf16(ctx: ParallelContext) -> Tensor:
    pair = Pair(ctx.tp, 1, True).to(torch.bfloat16)
    initialise_weights(pair, 3)
    randomise_vectors(pair)
    x = X.to(torch.bfloat16).chunk(ctx.tp.size)[ctx.tp.rank].clone().requires_grad_()
    output = pair(x)
    output.sum().backward()
    return torch.stack([output.detach(), x.grad])


def test_bf16_stays_within_its_rounding(pools: Pools) -> None:
    """Two parts of 8 products are rounded to 8 bits before they are added; one process rounds once."""
    whole = pools.run(Layout(1), _bf16)[0]
    joined = torch.cat(pools.run(Layout(2, tp=2), _bf16), dim=1)
    assert joined.dtype == torch.bfloat16
    torch.testing.assert_close(joined, whole, atol=2**-7 * float(whole.abs().max()), rtol=0)


TOKENS = torch.tensor([[0, 3], [6, 3], [5, 4], [2, 1]])  # [s, b], every word of 7
POSITIONS = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]])


def _embed(ctx: ParallelContext) -> tuple[Tensor, dict[str, Box]]:
    common = {"initialiser": Initialiser("normal", 1.0), "dtype": torch.float64, "device": CPU}
    words = VocabularyEmbedding(8, 4, tp=ctx.tp, sequence_parallel=True, **common)
    positions = PositionEmbedding(4, 4, is_partial_on_tp=True, **common)
    module = nn.ModuleDict({"words": words, "positions": positions})
    initialise_weights(module, 1)
    found = words(TOKENS) + positions(split(POSITIONS, ctx.tp, 0))  # [s/tp, b, h]
    weights = torch.arange(32.0, dtype=torch.float64).view(4, 2, 4).chunk(ctx.tp.size)[ctx.tp.rank]
    (found * weights).sum().backward()
    return found.detach(), boxes_of(module, ctx.tp)


@pytest.mark.parametrize("layout", [Layout(2, tp=2), Layout(4, tp=4)], ids=str)
def test_embeddings_give_slices_and_whole_gradients(pools: Pools, layout: Layout) -> None:
    whole, gradients = pools.run(Layout(1), _embed)[0]
    parts = pools.run(layout, _embed)
    assert torch.equal(torch.cat([found for found, _ in parts]), whole), "one summand a word: no rounding at all"
    found = gradient_differences(gradients, [boxes for _, boxes in parts])
    assert max(found.values()) < TOLERANCE


def test_one_rank_takes_the_plain_product() -> None:
    with patch.object(linear, "_GatheredProduct", None):
        column = ColumnParallelLinear(
            16, 8, tp=Axis.single("tp"), bias=True, initialiser=NORMAL, sequence_parallel=True, **SETTINGS
        )
        initialise_weights(column, 1)
        torch.testing.assert_close(column(X), nn.functional.linear(X, column.weight, column.bias))
