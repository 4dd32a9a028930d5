"""Self-attention against a naive loop over heads, and cut over tp against one process in float64 (FC-17: row order)."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from megatron_parm.layers.attention import AttentionShape, SelfAttention
from megatron_parm.layers.initialise import Initialiser, initialise_weights
from megatron_parm.layers.rotary import RotaryShape, make_rotation, rotate
from megatron_parm.parallel.context import Axis
from tests.harness.layouts import Layout
from tests.harness.pools import Pools
from tests.layers.parallel_check import TOLERANCE, TP_LAYOUTS, compare, randomise_vectors

SETTINGS = {"dtype": torch.float64, "device": torch.device("cpu")}
SINGLE = Axis.single("tp")
X = torch.randn(6, 2, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
POSITIONS = torch.arange(6).expand(2, 6)
# Rows of two documents of 3, for the second sample only
DOCUMENTS = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
DOCUMENTS[1, :, 3:, :3] = False


def shape_of(groups: int = 4, **changes: object) -> AttentionShape:
    fields: dict[str, object] = {
        "hidden_size": 16, "num_heads": 8, "num_query_groups": groups, "head_dim": 4, "has_qkv_bias": True,
        "has_output_bias": True, "is_causal": True,
    }  # fmt: skip
    return AttentionShape(**(fields | changes))  # type: ignore[arg-type]


class Attention(nn.Module):
    """An attention with its rotation and mask fixed, so that it maps x to y."""

    def __init__(self, shape: AttentionShape, tp: Axis, is_rotated: bool, may_attend: Tensor | None) -> None:
        super().__init__()
        normal = Initialiser("normal", 0.5)
        self.inner = SelfAttention(shape, tp=tp, initialiser=normal, output_initialiser=normal, **SETTINGS)
        rotation = make_rotation(RotaryShape(), shape.head_dim, POSITIONS, torch.float64)
        self.rotation = rotation if is_rotated else None
        self.may_attend = may_attend

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, self.rotation, self.may_attend)


def make(tp: Axis, shape: AttentionShape, is_rotated: bool = False, may_attend: Tensor | None = None) -> nn.Module:
    return Attention(shape, tp, is_rotated, may_attend)


def naive(attention: Attention, x: Tensor) -> Tensor:
    """Head by head with rows picked one at a time from Megatron's order [groups, (q heads, k, v), d]."""
    inner, shape = attention.inner, attention.inner.shape
    per_group, d = shape.num_heads // shape.num_query_groups, shape.head_dim
    bias = inner.linear_qkv.bias if inner.linear_qkv.bias is not None else torch.zeros(1)
    fused = x @ inner.linear_qkv.weight.t() + bias
    may_attend = torch.ones(6, 6, dtype=torch.bool).tril() if shape.is_causal else torch.ones(6, 6, dtype=torch.bool)
    may_attend = may_attend.expand(2, 6, 6) if attention.may_attend is None else attention.may_attend[:, 0]
    heads = []
    for head in range(shape.num_heads):
        group, place = divmod(head, per_group)
        start = group * (per_group + 2)
        q, k, v = (
            fused[..., row * d : (row + 1) * d] for row in (start + place, start + per_group, start + per_group + 1)
        )
        q, k = inner.q_layernorm(q), inner.k_layernorm(k)
        if attention.rotation is not None:
            q, k = (rotate(t.unsqueeze(2), attention.rotation).squeeze(2) for t in (q, k))
        scores = torch.einsum("qbd,kbd->bqk", q, k) / d**0.5
        heads.append(torch.einsum("bqk,kbd->qbd", scores.masked_fill(~may_attend, -torch.inf).softmax(-1), v))
    return torch.cat(heads, -1) @ inner.linear_proj.weight.t() + inner.linear_proj.bias


CASES = {
    "heads": (shape_of(8), False, None),
    "groups": (shape_of(4), False, None),
    "rotated": (shape_of(4), True, None),
    "norms": (shape_of(4, norm_of_heads="RMSNorm"), True, None),
    "documents": (shape_of(8), False, DOCUMENTS),
    "grouped documents": (shape_of(4), True, DOCUMENTS),
    "both ways": (shape_of(8, is_causal=False, has_qkv_bias=False), False, None),
    "wide heads": (shape_of(4, head_dim=6), False, None),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_naive_loop_with_all_gradients(name: str) -> None:
    attention = Attention(CASES[name][0], SINGLE, *CASES[name][1:])
    initialise_weights(attention, 1)
    randomise_vectors(attention)
    weights = torch.randn(X.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    gradients = []
    outputs = [attention(X), naive(attention, X)]
    torch.testing.assert_close(*outputs, atol=TOLERANCE, rtol=0)
    for output in outputs:
        gradients.append(torch.autograd.grad((output * weights).sum(), list(attention.parameters())))
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.cover(layout=TP_LAYOUTS, name=list(CASES))
def test_cut_over_tp_equals_one_process(pools: Pools, layout: Layout, name: str) -> None:
    shape, is_rotated, may_attend = CASES[name]
    found = compare(pools, layout, partial(make, shape=shape, is_rotated=is_rotated, may_attend=may_attend), X)
    assert max(found.values()) < TOLERANCE, found


def test_dropout_draws_only_in_training() -> None:
    attention = Attention(shape_of(8, dropout=0.5), SINGLE, False, None)
    initialise_weights(attention, 1)
    without = Attention(shape_of(8), SINGLE, False, None)
    without.load_state_dict(attention.state_dict())
    assert torch.equal(attention.eval()(X), without(X))
    torch.manual_seed(1)
    first = attention.train()(X)
    assert not torch.equal(first, without(X))
    torch.manual_seed(1)
    assert torch.equal(attention(X), first)
