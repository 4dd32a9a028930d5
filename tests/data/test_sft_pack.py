"""Packing. Reference: samples worked by hand, and every conversation found again once in each epoch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_parm.data.sft_pack import Conversations, PackedConversations, pack


def conversations(*parts):
    """Each part is (ids, marks of answers)."""
    starts = np.cumsum([0, *(len(ids) for ids, _ in parts)])
    ids, marks = (np.concatenate([np.array(part[place]) for part in parts]) for place in (0, 1))
    return Conversations(ids.astype(np.int32), marks.astype(np.uint8), starts)


def test_two_conversations_in_one_sample_worked_by_hand() -> None:
    two = conversations(([1, 2, 3, 9], [0, 0, 1, 1]), ([4, 5, 9], [0, 1, 1]))
    (sample,) = PackedConversations(two, range(2), 7, pad=9, num_samples=None, seed=0)
    assert sample["tokens"].tolist() == [1, 2, 3, 4, 5, 9, 9]
    assert sample["labels"].tolist() == [2, 3, 9, 5, 9, 9, 9]
    assert sample["loss_mask"].tolist() == [0, 1, 1, 1, 1, 0, 0]
    assert sample["position_ids"].tolist() == [0, 1, 2, 0, 1, 0, 1]
    sees = ~sample["attention_mask"][0]
    assert sees.astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [0, 0, 0, 1, 0, 0, 0],
        [0, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1, 1],
    ]


def test_what_is_too_long_is_cut_at_the_end() -> None:
    (sample,) = PackedConversations(conversations(([1, 2, 3, 4, 5], [0, 1, 1, 1, 1])), range(1), 3, 0, None, 0)
    assert (sample["tokens"].tolist(), sample["labels"].tolist()) == ([1, 2, 3], [2, 3, 4])
    assert sample["loss_mask"].tolist() == [1, 1, 1]


@given(st.lists(st.integers(1, 30), max_size=150), st.integers(1, 20))
def test_every_conversation_is_in_one_pack_that_has_room(places, capacity) -> None:
    packs = pack(places, capacity)
    assert sorted(number for group in packs for number in group) == list(range(len(places)))
    fills = [sum(min(places[number], capacity) for number in group) for group in packs]
    assert all(0 < fill <= capacity for fill in fills)
    if len(packs) <= 64:  # first fit: no two of them would have gone into one
        assert sum(fill <= capacity / 2 for fill in fills) <= 1


@pytest.mark.parametrize("asked", [3, 10, 25])
def test_every_epoch_holds_every_pack_once_in_another_order(asked) -> None:
    many = conversations(*(([number, number, 99], [0, 1, 1]) for number in range(10)))
    dataset = PackedConversations(many, range(2, 10), 4, 99, asked, seed=5)
    first = [int(dataset[number]["tokens"][0]) for number in range(asked)]
    assert len(dataset) == asked and len(dataset.packs) == 4
    epochs = [first[start : start + 4] for start in range(0, asked - asked % 4, 4)]
    assert all(sorted(epoch) == [2, 4, 6, 8] for epoch in epochs)
    assert len(epochs) < 3 or len({tuple(epoch) for epoch in epochs}) > 1
    again = PackedConversations(many, range(2, 10), 4, 99, asked, seed=5)
    assert [int(again[number]["tokens"][0]) for number in range(asked)] == first
