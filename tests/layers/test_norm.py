"""Norms against the written formula, and the gradient of weights shared by ranks that see different values."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from megatron_parm.layers.initialise import initialise_weights
from megatron_parm.layers.norm import Norm, NormKind
from megatron_parm.parallel.collectives import share, split
from megatron_parm.parallel.context import Axis
from tests.harness.layouts import Layout
from tests.harness.pools import Pools
from tests.layers.parallel_check import TOLERANCE, compare

SETTINGS = {"epsilon": 1e-3, "dtype": torch.float64, "device": torch.device("cpu")}
SINGLE = Axis.single("tp")
X = torch.randn(4, 2, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def formula(x: Tensor, kind: NormKind, weight: Tensor, bias: Tensor | None) -> Tensor:
    centred = x - x.mean(-1, keepdim=True) if kind == "LayerNorm" else x
    scaled = weight * centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-3)
    return scaled if bias is None else scaled + bias


@pytest.mark.parametrize("is_zero_centred", [False, True])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_formula(kind: NormKind, is_zero_centred: bool) -> None:
    norm = Norm(6, kind=kind, shared_over=SINGLE, is_zero_centred=is_zero_centred, **SETTINGS)
    initialise_weights(norm, 1)
    torch.testing.assert_close(norm(X), formula(X, kind, torch.ones(6), None))  # both kinds start as weight 1, bias 0
    nn.init.normal_(norm.weight)
    if norm.bias is not None:
        nn.init.normal_(norm.bias)
    torch.testing.assert_close(norm(X), formula(X, kind, norm.weight + is_zero_centred, norm.bias))


class OwnRows(nn.Module):
    """Each rank normalises its own rows, as the heads of an attention are."""

    def __init__(self, tp: Axis, shared_over: Axis) -> None:
        super().__init__()
        self.tp = tp
        self.norm = Norm(6, kind="LayerNorm", shared_over=shared_over, **SETTINGS)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(split(x, self.tp, 0))


def make_own_rows(tp: Axis, is_shared: bool) -> nn.Module:
    return OwnRows(tp, tp if is_shared else SINGLE)


def test_weights_shared_by_ranks_get_the_whole_gradient(pools: Pools) -> None:
    found = compare(pools, Layout(2, tp=2), partial(make_own_rows, is_shared=True), X, joined_dim=0)
    assert max(found.values()) < TOLERANCE, found


def test_without_sharing_the_gradient_is_a_part(pools: Pools) -> None:
    """The negative control."""
    found = compare(pools, Layout(2, tp=2), partial(make_own_rows, is_shared=False), X, joined_dim=0)
    assert found["output"] < TOLERANCE
    assert min(found["norm.weight"], found["norm.bias"]) > 1e-3


def test_share_of_a_single_axis_costs_nothing() -> None:
    assert share(X, SINGLE) is X
