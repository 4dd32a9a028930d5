"""Capacity and places. References: exact rational arithmetic, and a twin that queues choices one by one."""

import math
from fractions import Fraction
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_parm.moe.routing import DropPolicy, Routing, capacity_of, count_values, place


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


def _check_places(routing: Routing, kept: list[set[int]], slots: int, segments: int) -> None:
    """Each kept choice has a row of its own among the first rows of its owner; each other one is past the end."""
    rows = routing.row.flatten().tolist()
    for owner, choices in enumerate(kept):
        assert sorted(rows[choice] for choice in choices) == [owner * slots + i for i in range(len(choices))]
    dropped = set(range(len(rows))).difference(*kept)
    assert all(rows[choice] == routing.num_rows for choice in dropped)
    assert {i for i, is_kept in enumerate(routing.kept.flatten().tolist()) if is_kept} == set().union(*kept)
    assert routing.num_rows == len(kept) * slots and routing.slots == slots and routing.segments == segments


@given(
    seed=st.integers(0, 10_000),
    part=st.integers(1, 12),
    segments=st.integers(1, 3),
    experts=st.integers(1, 5),
    capacity=st.integers(1, 6),
    policy=st.sampled_from(["probs", "position"]),
    multiple=st.integers(1, 4),
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
    ties: bool,
    data: st.DataObject,
) -> None:
    topk = data.draw(st.integers(1, experts))
    expert, weight = _random_choices(seed, part * segments, experts, topk, ties)
    routing = place(expert, weight, experts, capacity, policy=policy, segments=segments, slots_multiple_of=multiple)
    slots = math.ceil(capacity / multiple) * multiple
    _check_places(routing, _twin(expert, weight, experts, capacity, policy, segments), slots, segments)
    assert torch.equal(routing.weight, torch.where(routing.kept, weight, 0.0))
    assert torch.equal(routing.counts, torch.bincount(expert.flatten(), minlength=experts)), "counts are before drops"


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_a_segment_is_routed_as_if_alone(policy: DropPolicy) -> None:
    """What the baseline needs to drop as s2 does: same kept choices, same place within the own slots."""
    expert, weight = _random_choices(3, 12, 4, 2, ties=True)
    together = place(expert, weight, 4, 2, policy=policy, segments=3)
    for segment in range(3):
        own = slice(segment * 4, segment * 4 + 4)
        alone, part = place(expert[own], weight[own], 4, 2, policy=policy), together.of_segment(segment)
        assert torch.equal(part.kept, alone.kept) and torch.equal(part.weight, alone.weight)
        assert torch.equal(part.expert, alone.expert) and part.segments == 1
        owner, slot = part.row // 2, part.row % 2
        assert torch.equal(torch.where(part.kept, owner, -1), torch.where(part.kept, part.expert * 3 + segment, -1))
        assert torch.equal(torch.where(part.kept, slot, -1), torch.where(alone.kept, alone.row % 2, -1))
        assert part.num_rows == together.num_rows


def test_dropless_rows_are_sorted_by_expert_in_token_order() -> None:
    expert = torch.tensor([[2, 0], [0, 2], [2, 3]])
    routing = place(expert, torch.ones(3, 2), 4, None)
    assert routing.row.tolist() == [[2, 0], [1, 3], [4, 5]]
    assert routing.counts.tolist() == [2, 0, 3, 1]
    assert routing.kept.all() and routing.slots is None and routing.num_rows == 6


def test_weights_carry_the_gradient_of_kept_choices_only() -> None:
    weight = torch.tensor([[0.9], [0.1], [0.5]], requires_grad=True)
    routing = place(torch.zeros(3, 1, dtype=torch.int64), weight, 1, 2)
    assert routing.kept.tolist() == [[True], [False], [True]]
    routing.weight.sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [[1.0], [0.0], [1.0]]
