"""Capacity and places. References: exact rational arithmetic, and a twin that queues choices one by one."""

import math
from fractions import Fraction
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_parm.moe.routing import DropPolicy, Routing, capacity_of, chunk_counts, count_values, place


def test_capacity_is_the_exact_ceiling() -> None:
    """f as a user types it: 1.1 is eleven tenths. In floats 117 of these cases come out one slot too large."""
    for hundredths, topk, experts, tokens in product(
        range(5, 405, 5), (1, 2, 6), (4, 8, 10), (1, 5, 20, 4096, 100_000)
    ):
        exact = math.ceil(Fraction(hundredths, 100) * topk * tokens / experts)
        assert capacity_of(tokens, experts, topk, float(f"{hundredths / 100:.2f}"), 1) == exact


def test_no_expert_can_overflow_and_none_has_a_slot_too_many() -> None:
    for experts, topk, tokens in product(range(1, 130), range(1, 9), (1, 7, 1000, 8192, 999_999)):
        assert capacity_of(tokens, experts, topk, experts / topk, 1) == tokens


def test_capacity_has_a_minimum_and_may_be_absent() -> None:
    assert capacity_of(8, 64, 1, 1.0, 1) == 1
    assert capacity_of(8, 64, 1, 1.0, 4) == 4
    assert capacity_of(64, 4, 2, 1.25, 4) == 40
    assert capacity_of(64, 4, 2, None, 4) is None


@given(values=st.lists(st.integers(0, 6)))
def test_count_values_is_bincount(values: list[int]) -> None:
    index = torch.tensor(values, dtype=torch.int64)
    assert torch.equal(count_values(index, 7), torch.bincount(index, minlength=7))


def _twin(
    expert: Tensor, weight: Tensor, num_experts: int, capacity: int, policy: str, segments: int
) -> list[set[int]]:
    """For each (expert, segment) the flat numbers of the choices that it keeps."""
    topk, part = expert.shape[1], expert.shape[0] // segments
    kept = []
    for owner in range(num_experts):
        for segment in range(segments):
            tokens = range(segment * part, (segment + 1) * part)
            queue = [t * topk + i for t in tokens for i in range(topk) if expert[t, i] == owner]
            if policy == "probs":
                queue.sort(key=lambda choice: -weight.flatten()[choice].item())  # stable: the first of equals stays
            kept.append(set(queue[:capacity]))
    return kept


def _random_choices(seed: int, tokens: int, experts: int, topk: int, ties: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    expert = torch.rand(tokens, experts, generator=generator).topk(topk).indices
    weight = torch.rand(tokens, topk, generator=generator)
    return expert, (weight * 3).ceil() / 3 if ties else weight


def _check_places(routing: Routing, kept: list[set[int]], slots: int, segments: int, chunks: int) -> None:
    """Each kept choice has a row of its own: an owner's first `slots` in chunk 0, then its next in chunk 1; the others
    are past the end."""
    rows = routing.row.flatten().tolist()
    for owner, choices in enumerate(kept):
        places = [(i // slots * len(kept) + owner) * slots + i % slots for i in range(len(choices))]
        assert sorted(rows[choice] for choice in choices) == places
    dropped = set(range(len(rows))).difference(*kept)
    assert all(rows[choice] == routing.num_rows for choice in dropped)
    assert {i for i, is_kept in enumerate(routing.kept.flatten().tolist()) if is_kept} == set().union(*kept)
    assert routing.num_rows == chunks * len(kept) * slots
    assert (routing.slots, routing.segments, routing.chunks) == (slots, segments, chunks)


def _kept_of_experts(kept: list[set[int]], segments: int) -> list[list[int]]:
    """For each expert its kept choices in token order."""
    return [sorted(set().union(*kept[at : at + segments])) for at in range(0, len(kept), segments)]


def _check_packed_places(routing: Routing, kept: list[list[int]], chunks: int) -> None:
    """The kept choices alone, sorted by (chunk, expert, token); each chunk has an even part of every expert's."""
    wanted: list[int] = []
    for chunk in range(chunks):
        for choices in kept:
            mine = [choice for rank, choice in enumerate(choices) if rank * chunks // len(choices) == chunk]
            assert len(mine) == chunk_counts(len(choices), chunks)[chunk], "what dispatch cuts the chunks by"
            wanted += mine
    rows = routing.row.flatten().tolist()
    assert [rows[choice] for choice in wanted] == list(range(len(wanted)))
    dropped = set(range(len(rows))).difference(wanted)
    assert all(rows[choice] == routing.num_rows for choice in dropped)
    assert routing.num_rows == len(rows) and routing.slots is None and routing.chunks == chunks


@given(count=st.integers(0, 50), chunks=st.integers(1, 6))
def test_chunks_of_an_expert_are_as_even_as_can_be(count: int, chunks: int) -> None:
    sizes = chunk_counts(count, chunks)
    assert len(sizes) == chunks and sum(sizes) == count and max(sizes) - min(sizes) <= 1


@given(
    seed=st.integers(0, 10_000),
    part=st.integers(1, 12),
    segments=st.integers(1, 3),
    experts=st.integers(1, 5),
    capacity=st.integers(1, 6),
    policy=st.sampled_from(["probs", "position"]),
    multiple=st.integers(1, 4),
    chunks=st.integers(1, 4),
    ties=st.booleans(),
    data=st.data(),
)
def test_places_are_those_of_the_twin(
    seed: int,
    part: int,
    segments: int,
    experts: int,
    capacity: int,
    policy: DropPolicy,
    multiple: int,
    chunks: int,
    ties: bool,
    data: st.DataObject,
) -> None:
    """Padded and packed buckets keep the same choices; a chunk has slots enough and a multiple of what was asked."""
    topk = data.draw(st.integers(1, experts))
    expert, weight = _random_choices(seed, part * segments, experts, topk, ties)
    kept = _twin(expert, weight, experts, capacity, policy, segments)
    common: dict[str, Any] = {"policy": policy, "segments": segments, "chunks": chunks}
    padded = place(expert, weight, experts, capacity, slots_multiple_of=multiple, **common)
    slots = math.ceil(Fraction(capacity, multiple * chunks)) * multiple
    assert slots * chunks >= capacity
    _check_places(padded, kept, slots, segments, chunks)
    packed = place(expert, weight, experts, capacity, padded=False, **common)
    _check_packed_places(packed, _kept_of_experts(kept, segments), chunks)
    for routing in (padded, packed):
        assert torch.equal(routing.weight, torch.where(routing.kept, weight, 0.0))
        assert torch.equal(routing.counts, torch.bincount(expert.flatten(), minlength=experts)), "before drops"
        assert routing.kept_counts.tolist() == [len(choices) for choices in _kept_of_experts(kept, segments)]


@given(
    seed=st.integers(0, 10_000),
    tokens=st.integers(1, 12),
    experts=st.integers(1, 5),
    chunks=st.integers(1, 4),
    data=st.data(),
)
def test_dropless_places_are_those_of_the_twin(
    seed: int, tokens: int, experts: int, chunks: int, data: st.DataObject
) -> None:
    """Whatever `padded` says: without a capacity nothing bounds the slots."""
    topk = data.draw(st.integers(1, experts))
    expert, weight = _random_choices(seed, tokens, experts, topk, ties=False)
    kept = _twin(expert, weight, experts, expert.numel(), "position", 1)
    for padded in (True, False):
        routing = place(expert, weight, experts, None, padded=padded, chunks=chunks)
        _check_packed_places(routing, _kept_of_experts(kept, 1), chunks)
        assert routing.kept.all() and torch.equal(routing.weight, weight)
        assert torch.equal(routing.kept_counts, routing.counts)


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_a_segment_is_routed_as_if_alone(policy: DropPolicy) -> None:
    """What the baseline needs to drop as s2 does: same kept choices, same place within the own slots."""
    expert, weight = _random_choices(3, 12, 4, 2, ties=True)
    together = place(expert, weight, 4, 2, policy=policy, segments=3)
    for segment in range(3):
        own = slice(segment * 4, segment * 4 + 4)
        alone, part = place(expert[own], weight[own], 4, 2, policy=policy), together.of_segment(segment)
        assert torch.equal(part.kept, alone.kept) and torch.equal(part.weight, alone.weight)
        assert torch.equal(part.expert, alone.expert)
        owner, slot = part.row // 2, part.row % 2
        assert torch.equal(torch.where(part.kept, owner, -1), torch.where(part.kept, part.expert * 3 + segment, -1))
        assert torch.equal(torch.where(part.kept, slot, -1), torch.where(alone.kept, alone.row % 2, -1))
        assert part.num_rows == together.num_rows


@pytest.mark.parametrize("chunks", [1, 3])
def test_a_segment_of_packed_buckets_is_routed_as_if_alone(chunks: int) -> None:
    """Same kept choices; its rows lie among those of the other segments, dropped ones past the end of all."""
    expert, weight = _random_choices(3, 12, 4, 2, ties=True)
    together = place(expert, weight, 4, 2, segments=3, padded=False, chunks=chunks)
    for segment in range(3):
        own = slice(segment * 4, segment * 4 + 4)
        alone, part = place(expert[own], weight[own], 4, 2, padded=False), together.of_segment(segment)
        assert torch.equal(part.kept, alone.kept) and torch.equal(part.weight, alone.weight)
        assert torch.equal(part.row, together.row[own]) and part.num_rows == together.num_rows == 24
        assert not part.kept.all() and (part.row[~part.kept] == 24).all()


def test_dropless_rows_are_sorted_by_expert_in_token_order() -> None:
    expert = torch.tensor([[2, 0], [0, 2], [2, 3]])
    routing = place(expert, torch.ones(3, 2), 4, None)
    assert routing.row.tolist() == [[2, 0], [1, 3], [4, 5]]
    assert routing.counts.tolist() == [2, 0, 3, 1]
    assert routing.kept.all() and routing.slots is None and routing.num_rows == 6


def test_packed_rows_with_drops_and_chunks_by_hand() -> None:
    """Expert 0 keeps tokens 0, 1 and 3 (not 2), of which chunk 0 gets two; expert 1 has one, expert 2 none."""
    expert, weight = torch.tensor([[0], [0], [0], [0], [1]]), torch.tensor([[0.9], [0.5], [0.1], [0.7], [0.2]])
    routing = place(expert, weight, 3, 3, padded=False, chunks=2)
    assert routing.row.flatten().tolist() == [0, 1, 5, 3, 2]
    assert routing.counts.tolist() == [4, 1, 0] and routing.kept_counts.tolist() == [3, 1, 0]


def test_weights_carry_the_gradient_of_kept_choices_only() -> None:
    weight = torch.tensor([[0.9], [0.1], [0.5]], requires_grad=True)
    routing = place(torch.zeros(3, 1, dtype=torch.int64), weight, 1, 2)
    assert routing.kept.tolist() == [[True], [False], [True]]
    routing.weight.sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [[1.0], [0.0], [1.0]]
