"""Column- and row-parallel linear: against torch's linear, and cut over tp against one process in float64."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_parm.layers import linear
from megatron_parm.layers.initialise import Initialiser
from megatron_parm.layers.linear import ColumnParallelLinear, RowParallelLinear
from megatron_parm.parallel.context import Axis, ParallelContext
from tests.harness.layouts import Layout
from tests.harness.pools import Pools
from tests.layers.parallel_check import TOLERANCE, TP_LAYOUTS, Outcome, compare, differences, run_layer

SETTINGS = {"initialiser": Initialiser("normal", 0.5), "dtype": torch.float64, "device": torch.device("cpu")}
X = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Pair(nn.Module):
    """Column, a bend, row: the pair as every block uses it."""

    def __init__(self, tp: Axis, blocks: int) -> None:
        super().__init__()
        self.column = ColumnParallelLinear(8, 8 * blocks, tp=tp, bias=True, out_blocks=blocks, **SETTINGS)
        self.row = RowParallelLinear(8, 8, tp=tp, bias=True, **SETTINGS)
        self.blocks = blocks

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.column(x).chunk(self.blocks, dim=-1)
        for other in others:
            first = first * other
        return self.row(torch.tanh(first))


def make_pair(tp: Axis, blocks: int) -> nn.Module:
    return Pair(tp, blocks)


def make_column(tp: Axis) -> nn.Module:
    return ColumnParallelLinear(8, 12, tp=tp, bias=False, **SETTINGS)


@pytest.mark.parametrize("layout", TP_LAYOUTS, ids=str)
@pytest.mark.parametrize("blocks", [1, 2])
def test_pair_equals_one_process(pools: Pools, layout: Layout, blocks: int) -> None:
    found = compare(pools, layout, partial(make_pair, blocks=blocks), X)
    assert max(found.values()) < TOLERANCE, found


def test_column_outputs_join_to_the_whole(pools: Pools) -> None:
    found = compare(pools, Layout(4, tp=4), make_column, X, joined_dim=2)
    assert max(found.values()) < TOLERANCE, found


def _without_share(ctx: ParallelContext, x: Tensor) -> Outcome:
    kept = linear.share
    linear.share = lambda value, axis: value
    try:
        return run_layer(ctx, partial(make_pair, blocks=1), x)
    finally:
        linear.share = kept


def test_without_the_sum_of_share_the_input_gradient_is_wrong(pools: Pools) -> None:
    """The negative control: only what lies before the column layer can see it."""
    whole = pools.run(Layout(1), _without_share, X)[0]
    found = differences(whole, pools.run(Layout(2, tp=2), _without_share, X))
    assert found.pop("input") > 1e-3
    assert max(found.values()) < TOLERANCE, found


def test_one_process_is_torch_linear() -> None:
    pair = Pair(Axis.single("tp"), 2)
    for parameter in pair.parameters():
        nn.init.normal_(parameter)
    gate, up = (F.linear(X, w, b) for w, b in zip(pair.column.weight, pair.column.bias, strict=True))
    expected = F.linear(torch.tanh(gate * up), pair.row.weight, pair.row.bias)
    torch.testing.assert_close(pair(X), expected)
