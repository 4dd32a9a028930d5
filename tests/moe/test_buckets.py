"""Dispatch, announce and combine. Reference: a loop over tokens and choices, written here."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_parm.moe.buckets import Buckets, Packed, announce, combine, dispatch
from megatron_parm.moe.routing import Routing, chunk_counts, place
from megatron_parm.parallel.context import Axis, ParallelContext
from tests.harness.layouts import Layout
from tests.harness.pools import Pools

HIDDEN = 3


def _routing(
    seed: int,
    tokens: int,
    experts: int,
    topk: int,
    capacity: int | None,
    segments: int = 1,
    padded: bool = True,
    chunks: int = 1,
) -> Routing:
    generator = torch.Generator().manual_seed(seed)
    expert = torch.rand(tokens, experts, generator=generator).topk(topk).indices
    weight = torch.rand(tokens, topk, generator=generator, dtype=torch.float64)
    return place(expert, weight, experts, capacity, segments=segments, padded=padded, chunks=chunks)


def _tokens(tokens: int) -> Tensor:
    return torch.arange(1, tokens * HIDDEN + 1, dtype=torch.float64).view(tokens, HIDDEN)


def _twin_buckets(tokens: Tensor, routing: Routing) -> Tensor:
    """The rows of all chunks, the empty ones zero; packed ones have as many as are kept."""
    size = routing.num_rows if routing.slots is not None else int(routing.kept.sum())
    rows = torch.zeros(size, HIDDEN, dtype=tokens.dtype)
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


def _rows_of(parts: Sequence[Buckets]) -> Tensor:
    return torch.cat([part.rows if isinstance(part, Packed) else part.flatten(0, 1) for part in parts])


def _with_rows(parts: Sequence[Buckets], rows: Tensor) -> list[Buckets]:
    """The same buckets with other rows."""
    sizes = [part.rows.shape[0] if isinstance(part, Packed) else part.shape[0] * part.shape[1] for part in parts]
    return [
        replace(part, rows=block) if isinstance(part, Packed) else block.view_as(part)
        for part, block in zip(parts, rows.split(sizes), strict=True)
    ]


@given(
    seed=st.integers(0, 10_000),
    part=st.integers(1, 10),
    segments=st.integers(1, 3),
    experts=st.integers(1, 4),
    capacity=st.one_of(st.none(), st.integers(1, 4)),
    padded=st.booleans(),
    chunks=st.integers(1, 4),
    data=st.data(),
)
def test_equal_the_loop(
    seed: int,
    part: int,
    segments: int,
    experts: int,
    capacity: int | None,
    padded: bool,
    chunks: int,
    data: st.DataObject,
) -> None:
    topk = data.draw(st.integers(1, experts))
    tokens = _tokens(part * segments)
    routing = _routing(seed, part * segments, experts, topk, capacity, segments, padded, chunks)
    parts = dispatch(tokens, routing)
    assert len(parts) == chunks
    assert torch.equal(_rows_of(parts), _twin_buckets(tokens, routing)), "kept rows hold their token, empty ones zero"
    if capacity is None or not padded:
        for chunk, packed in enumerate(parts):
            assert isinstance(packed, Packed) and packed.loads == ()
            counts = [chunk_counts(count, chunks)[chunk] for count in routing.kept_counts.tolist()]
            assert packed.counts == (tuple(counts),) and packed.splits == [sum(counts)] == [packed.rows.shape[0]]
    else:
        for slots in parts:
            assert isinstance(slots, Tensor) and slots.is_contiguous()
            assert slots.shape == (experts, segments * -(-capacity // chunks), HIDDEN)
    expected = _twin_output(_rows_of(parts), routing)
    torch.testing.assert_close(combine(parts, routing), expected, rtol=1e-14, atol=1e-14)
    for segment in range(segments):
        own = slice(segment * part, (segment + 1) * part)
        found = combine(parts, routing.of_segment(segment))
        torch.testing.assert_close(found, expected[own], rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize(
    ("capacity", "padded"), [(None, False), (2, True), (2, False)], ids=["dropless", "drops, padded", "drops, packed"]
)
def test_gradients(capacity: int | None, padded: bool, chunks: int) -> None:
    """Reference: finite differences (gradcheck), of dispatch and combine and through both in a row."""
    routing = _routing(5, 6, 4, 2, capacity, padded=padded, chunks=chunks)
    assert capacity is None or not routing.kept.all()
    tokens = torch.rand(6, HIDDEN, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(6, 2, dtype=torch.float64, requires_grad=True)
    parts = dispatch(tokens.detach(), routing)
    rows = torch.rand_like(_rows_of(parts)).requires_grad_()

    def dispatched(x: Tensor) -> Tensor:
        return _rows_of(dispatch(x, routing))

    def combined(rows: Tensor, weight: Tensor) -> Tensor:
        return combine(_with_rows(parts, rows), replace(routing, weight=weight * routing.kept))

    assert torch.autograd.gradcheck(dispatched, (tokens,))
    assert torch.autograd.gradcheck(combined, (rows, weight))
    assert torch.autograd.gradcheck(lambda x, w: combined(dispatched(x).square(), w), (tokens, weight))


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("padded", [True, False], ids=["padded", "packed"])
def test_a_token_dropped_by_all_its_experts_gives_and_gets_exactly_nothing(padded: bool, chunks: int) -> None:
    """FC-21, case 2: only the residual is left of it."""
    expert = torch.zeros(3, 1, dtype=torch.int64)
    weight = torch.tensor([[0.9], [0.5], [0.7]], requires_grad=True)
    tokens = torch.randn(3, HIDDEN, requires_grad=True)
    routing = place(expert, weight, 2, 2, padded=padded, chunks=chunks)
    assert routing.kept.flatten().tolist() == [True, False, True]
    parts = dispatch(tokens, routing)
    # experts may answer anything in rows that are not this token's
    output = combine(_with_rows(parts, _rows_of(parts) + 1e30), routing)
    assert output[1].tolist() == [0.0] * HIDDEN
    output.sum().backward()
    assert tokens.grad is not None and weight.grad is not None
    assert tokens.grad[1].tolist() == [0.0] * HIDDEN and tokens.grad[0].abs().min() > 0
    assert weight.grad[1].item() == 0.0


def test_buckets_without_a_row_still_take_part_in_backward() -> None:
    """Every choice dropped, in more chunks than one: outputs and gradients are zero, and they are there.

    A rank that autograd does not lead to a collective's adjoint would leave the others waiting for it.
    """
    routing = Routing(
        expert=torch.zeros(4, 2, dtype=torch.int64),
        row=torch.full((4, 2), 8),
        weight=torch.zeros(4, 2, requires_grad=True),
        kept=torch.zeros(4, 2, dtype=torch.bool),
        counts=torch.tensor([8, 0]),
        kept_counts=torch.tensor([0, 0]),
        slots=None,
        segments=1,
        chunks=2,
        num_rows=8,
    )
    tokens = torch.randn(4, HIDDEN, requires_grad=True)
    parts = dispatch(tokens, routing)
    blocks = [part.rows for part in parts if isinstance(part, Packed)]
    assert len(blocks) == 2 and all(block.shape == (0, HIDDEN) and block.requires_grad for block in blocks)
    for block in blocks:
        block.retain_grad()
    output = combine(parts, routing)
    assert torch.equal(output, torch.zeros(4, HIDDEN))
    output.sum().backward()
    assert all(block.grad is not None and block.grad.shape == (0, HIDDEN) for block in blocks)
    for leaf in (tokens, routing.weight):
        assert leaf.grad is not None and torch.equal(leaf.grad, torch.zeros_like(leaf))


@pytest.mark.parametrize("is_taken", [0, 1, 2])
def test_backward_reaches_the_chunks_without_a_row(is_taken: int) -> None:
    """One row in three chunks: the other two chunks are empty and yet get a gradient each."""
    routing = place(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1), 2, None, chunks=3)
    parts = dispatch(torch.randn(1, HIDDEN, requires_grad=True), routing)
    blocks = [part.rows for part in parts if isinstance(part, Packed)]
    assert [block.shape[0] for block in blocks] == [1, 0, 0]
    blocks[is_taken].retain_grad()
    combine(parts, routing).sum().backward()
    assert blocks[is_taken].grad is not None


def test_weights_of_higher_precision_meet_bf16_rows() -> None:
    """The router is float32 under a bf16 model. Reference: float64, one bf16 rounding (2^-8) of weight and sum each."""
    routing = _routing(7, 6, 4, 2, 4)
    rows = torch.randn(4, 4, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    output = combine([rows], routing)
    assert output.dtype == torch.bfloat16
    exact = _twin_output(rows.double().flatten(0, 1), routing)
    assert ((output.double() - exact).abs() <= 2**-7 * _twin_output(rows.double().abs().flatten(0, 1), routing)).all()


def _counts_of(rank: int, chunk: int) -> tuple[int, int, int]:
    """Nobody has the same, and rank 0 has nothing in chunk 1."""
    return (0, 0, 0) if (rank, chunk) == (0, 1) else (rank, chunk, 10 * rank + chunk)


def _packed_of(rank: int, chunks: int) -> list[Buckets]:
    made: list[Buckets] = []
    for chunk in range(chunks):
        counts = _counts_of(rank, chunk)
        made.append(Packed(torch.zeros(sum(counts), HIDDEN), (counts,)))
    return made


def _announced(ctx: ParallelContext, axis: str, chunks: int) -> list[list[list[int]]]:
    parts = _packed_of(ctx.rank, chunks)
    told = announce(parts, ctx.axis(axis))
    for before, after in zip(parts, told, strict=True):
        assert isinstance(before, Packed) and isinstance(after, Packed)
        assert after.rows is before.rows and after.counts == before.counts
    return [[list(counts) for counts in part.loads] for part in told if isinstance(part, Packed)]


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("axis", ["ep", "ep_esp"])
@pytest.mark.parametrize("layout", [Layout(1), Layout(2, ep=2), Layout(4, ep=2, esp=2), Layout(4, esp=2)], ids=str)
def test_announced_loads_are_those_of_every_rank(pools: Pools, layout: Layout, axis: str, chunks: int) -> None:
    for rank, found in enumerate(pools.run(layout, _announced, axis, chunks)):
        ranks = _ranks_of(layout, axis, rank)
        assert found == [[list(_counts_of(peer, chunk)) for peer in ranks] for chunk in range(chunks)]


def _ranks_of(layout: Layout, axis: str, rank: int) -> list[int]:
    """The ranks of an axis of the MoE part: esp fastest, then ep."""
    fused = layout.ep * layout.esp
    first = rank // fused * fused
    if axis == "ep_esp":
        return list(range(first, first + fused))
    return [first + place * layout.esp + rank % layout.esp for place in range(layout.ep)]


def test_padded_buckets_need_no_word() -> None:
    parts: list[Buckets] = [torch.zeros(2, 3, HIDDEN)] * 2
    never = Axis("ep", 2, 0, (0, 1), None)  # without a group a collective would fail
    assert announce(parts, never) is parts
