"""The dense MLP against its formula, and cut over tp against one process in float64."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from megatron_parm.layers.feed_forward import Activation, FeedForward
from megatron_parm.layers.initialise import Initialiser, initialise_weights
from megatron_parm.parallel.context import Axis
from tests.harness.layouts import Layout
from tests.harness.pools import Pools
from tests.layers.parallel_check import TOLERANCE, TP_LAYOUTS, compare, randomise_vectors

X = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
ACTIVATIONS: tuple[Activation, ...] = ("gelu", "gelu_tanh", "squared_relu", "swiglu")


def make(tp: Axis, activation: Activation, bias: bool) -> FeedForward:
    normal = Initialiser("normal", 0.5)
    return FeedForward(
        8, 12, activation=activation, tp=tp, bias=bias, initialiser=normal, output_initialiser=normal,
        dtype=torch.float64, device=torch.device("cpu"),
    )  # fmt: skip


def formula(module: FeedForward, activation: Activation) -> Tensor:
    products = [
        X @ w.t() + b
        for w, b in zip(module.linear_fc1.weight.view(-1, 12, 8), module.linear_fc1.bias.view(-1, 12), strict=True)
    ]
    first = products[0]
    cubic = (2 / torch.pi) ** 0.5 * (first + 0.044715 * first**3)
    bent = {
        "gelu": first * (1 + torch.erf(first / 2**0.5)) / 2,
        "gelu_tanh": first * (1 + torch.tanh(cubic)) / 2,
        "squared_relu": first.clamp(min=0) ** 2,
        "swiglu": first / (1 + torch.exp(-first)) * products[-1],
    }[activation]
    return bent @ module.linear_fc2.weight.t() + module.linear_fc2.bias


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_formula(activation: Activation) -> None:
    module = make(Axis.single("tp"), activation, bias=True)
    initialise_weights(module, 1)
    randomise_vectors(module)
    torch.testing.assert_close(module(X), formula(module, activation), atol=TOLERANCE, rtol=0)


@pytest.mark.cover(layout=TP_LAYOUTS, activation=ACTIVATIONS, bias=(True, False))
def test_cut_over_tp_equals_one_process(pools: Pools, layout: Layout, activation: Activation, bias: bool) -> None:
    make_it: partial[nn.Module] = partial(make, activation=activation, bias=bias)
    found = compare(pools, layout, make_it, X)
    assert max(found.values()) < TOLERANCE, found
