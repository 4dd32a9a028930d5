"""Dispatch and combine. Reference: a loop over tokens and choices, written here."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_parm.moe.buckets import Ragged, combine, dispatch
from megatron_parm.moe.routing import Routing, place

HIDDEN = 3


def _routing(seed: int, tokens: int, experts: int, topk: int, capacity: int | None, segments: int = 1) -> Routing:
    generator = torch.Generator().manual_seed(seed)
    expert = torch.rand(tokens, experts, generator=generator).topk(topk).indices
    weight = torch.rand(tokens, topk, generator=generator, dtype=torch.float64)
    return place(expert, weight, experts, capacity, segments=segments)


def _tokens(tokens: int) -> Tensor:
    return torch.arange(1, tokens * HIDDEN + 1, dtype=torch.float64).view(tokens, HIDDEN)


def _twin_buckets(tokens: Tensor, routing: Routing) -> Tensor:
    rows = torch.zeros(routing.num_rows, HIDDEN, dtype=tokens.dtype)
    for t in range(tokens.shape[0]):
        for row, kept in zip(routing.row[t].tolist(), routing.kept[t].tolist(), strict=True):
            if kept:
                rows[row] = tokens[t]
    return rows


def _twin_output(rows: Tensor, routing: Routing) -> Tensor:
    output = torch.zeros(routing.row.shape[0], HIDDEN, dtype=rows.dtype)
    for t in range(output.shape[0]):
        for i in range(routing.row.shape[1]):
            if routing.kept[t, i]:
                output[t] += routing.weight[t, i] * rows[routing.row[t, i]]
    return output


@given(
    seed=st.integers(0, 10_000),
    part=st.integers(1, 10),
    segments=st.integers(1, 3),
    experts=st.integers(1, 4),
    capacity=st.one_of(st.none(), st.integers(1, 4)),
    data=st.data(),
)
def test_equal_the_loop(
    seed: int, part: int, segments: int, experts: int, capacity: int | None, data: st.DataObject
) -> None:
    topk = data.draw(st.integers(1, experts))
    tokens = _tokens(part * segments)
    routing = _routing(seed, part * segments, experts, topk, capacity, segments)
    buckets = dispatch(tokens, routing)
    rows = _twin_buckets(tokens, routing)
    if capacity is None:
        assert isinstance(buckets, Ragged)
        assert buckets.counts == (tuple(routing.counts.tolist()),) and buckets.splits == [routing.num_rows]
        assert torch.equal(buckets.rows, rows)
    else:
        assert isinstance(buckets, Tensor)
        assert buckets.shape == (experts, segments * capacity, HIDDEN)
        assert torch.equal(buckets.flatten(0, 1), rows), "kept rows hold their token, empty slots are zero"
    torch.testing.assert_close(combine(buckets, routing), _twin_output(rows, routing), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("capacity", [None, 2], ids=["dropless", "drops"])
def test_gradients(capacity: int | None) -> None:
    """Reference: finite differences (gradcheck), of dispatch and combine and through both in a row."""
    routing = _routing(5, 6, 4, 2, capacity)
    tokens = torch.rand(6, HIDDEN, dtype=torch.float64, requires_grad=True)
    weight = routing.weight.clone().requires_grad_()
    rows = torch.rand(routing.num_rows, HIDDEN, dtype=torch.float64, requires_grad=True)

    def dispatched(x: Tensor) -> Tensor:
        buckets = dispatch(x, routing)
        return buckets.rows if isinstance(buckets, Ragged) else buckets

    def combined(rows: Tensor, weight: Tensor) -> Tensor:
        with_weight = Routing(**{**vars(routing), "weight": weight * routing.kept})
        buckets = rows if capacity is None else rows.view(4, -1, HIDDEN)
        return combine(Ragged(buckets, ()) if capacity is None else buckets, with_weight)

    assert torch.autograd.gradcheck(dispatched, (tokens,))
    assert torch.autograd.gradcheck(combined, (rows, weight))
    assert torch.autograd.gradcheck(lambda x, w: combined(dispatched(x).square().view(-1, HIDDEN), w), (tokens, weight))


def test_a_token_dropped_by_all_its_experts_gives_and_gets_exactly_nothing() -> None:
    """FC-21, case 2: only the residual is left of it."""
    expert = torch.zeros(3, 1, dtype=torch.int64)
    weight = torch.tensor([[0.9], [0.5], [0.7]], requires_grad=True)
    tokens = torch.randn(3, HIDDEN, requires_grad=True)
    routing = place(expert, weight, 2, 2)
    assert routing.kept.flatten().tolist() == [True, False, True]
    buckets = dispatch(tokens, routing)
    assert isinstance(buckets, Tensor)
    output = combine(buckets + 1e30, routing)  # experts may answer anything in rows that are not this token's
    assert output[1].tolist() == [0.0] * HIDDEN
    output.sum().backward()
    assert tokens.grad is not None and weight.grad is not None
    assert tokens.grad[1].tolist() == [0.0] * HIDDEN and tokens.grad[0].abs().min() > 0
    assert weight.grad[1].item() == 0.0


def test_weights_of_higher_precision_meet_bf16_rows() -> None:
    """The router is float32 under a bf16 model. Reference: float64, one bf16 rounding (2^-8) of weight and sum each."""
    routing = _routing(7, 6, 4, 2, 4)
    rows = torch.randn(4, 4, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    output = combine(rows, routing)
    assert output.dtype == torch.bfloat16
    exact = _twin_output(rows.double().flatten(0, 1), routing)
    assert ((output.double() - exact).abs() <= 2**-7 * _twin_output(rows.double().abs().flatten(0, 1), routing)).all()
