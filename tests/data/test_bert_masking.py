"""One BERT sample. References: Megatron's known answers and its rules written out (formats C.4)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_parm.data.bert_masking import (
    BertSample,
    MaskingRules,
    WordPieces,
    cut_segments,
    make_bert_sample,
    mask_tokens,
)
from tests.data.bert_texts import PIECES, VOCABULARY

SENTENCES = [[10, 11, 12, 13], [20, 21, 22], [30, 31, 32, 33, 34], [40, 41]]
# (number, room, length): text, labels by place, where the second segment begins, is_random, truncated
KNOWN = {
    (0, 20, 32): ("2 4 11 12 13 20 21 22 30 4 32 33 34 3 40 4 3", {1: 10, 9: 31, 15: 41}, 14, 0, 0),
    (1, 20, 32): ("2 10 11 12 13 20 21 22 30 4 15 4 34 3 40 41 3", {9: 31, 10: 32, 11: 33}, 14, 0, 0),
    (2, 20, 32): ("2 4 4 32 33 34 40 4 3 10 11 12 13 20 21 22 3", {1: 30, 2: 31, 7: 41}, 9, 1, 0),
    (5, 8, 16): ("2 17 11 12 13 3 30 31 32 33 3", {1: 10}, 6, 0, 1),
}


def _sample(number: int, room: int, length: int, probability: float = 0.15, two: bool = True) -> BertSample:
    random = np.random.RandomState(1234 + number)
    return make_bert_sample(SENTENCES, room, MaskingRules(length, probability, two), VOCABULARY, random)


@pytest.mark.parametrize("case", KNOWN, ids=str)
def test_known_answers(case: tuple[int, int, int]) -> None:
    text, labels, change, is_random, truncated = KNOWN[case]
    sample = _sample(*case)
    ids = [int(word) for word in text.split()]
    size = len(ids)
    assert sample["text"].tolist() == ids + [0] * (case[2] - size)
    assert sample["types"].tolist() == [0] * change + [1] * (size - change) + [0] * (case[2] - size)
    assert sample["labels"].tolist() == [labels.get(place, -1) for place in range(case[2])]
    assert sample["loss_mask"].tolist() == [int(place in labels) for place in range(case[2])]
    assert sample["padding_mask"].tolist() == [1] * size + [0] * (case[2] - size)
    assert (int(sample["is_random"]), int(sample["truncated"])) == (is_random, truncated)
    assert {column.dtype for column in sample.values()} == {np.dtype(np.int64)}


def _joined(lists: list[list[int]]) -> list[int]:
    return [token for inner in lists for token in inner]


def _masked_as_megatron_does(
    tokens: list[int], probability: float, most: float, pieces: WordPieces, random: np.random.RandomState
) -> tuple[list[int], dict[int, int]]:
    """The draws as the reference takes them: lists of n-grams, numpy's `choice` and `shuffle` on them."""
    words: list[list[int]] = []
    for place, token in enumerate(tokens):
        if token in (pieces.cls, pieces.sep):
            continue
        if words and PIECES[token].startswith("##"):
            words[-1].append(place)
        else:
            words.append([place])
    count = min(most, max(1, round(len(tokens) * probability)))
    sizes = np.arange(1, 4, dtype=np.int64)
    weights = 1.0 / np.arange(1, 4)
    weights /= weights.sum(keepdims=True)
    ngrams = [[words[start : start + size] for size in sizes] for start in range(len(words))]
    random.shuffle(ngrams)
    output, covered = list(tokens), set[int]()
    for choices in ngrams:
        if len(covered) >= count:
            break
        number = random.choice(sizes[: len(choices)], p=weights[: len(choices)] / weights[: len(choices)].sum())
        places = _joined(choices[number - 1])
        number -= 1
        while len(covered) + len(places) > count:
            if number == 0:
                break
            places = _joined(choices[number - 1])
            number -= 1
        if len(covered) + len(places) > count or any(place in covered for place in places):
            continue
        for place in places:
            covered.add(place)
            if random.random_sample() < 0.8:
                output[place] = pieces.mask
            elif random.random_sample() >= 0.5:
                output[place] = pieces.ids[random.randint(0, len(pieces.ids))]
    random.shuffle(ngrams)
    return output, {place: tokens[place] for place in sorted(covered)}


@given(st.lists(st.integers(2, 59), min_size=1, max_size=40), st.floats(0.01, 0.9), st.integers(0, 9999))
def test_masking_draws_as_the_reference_does(tokens: list[int], probability: float, seed: int) -> None:
    """The same result and the same state of the generator at the end."""
    ours, theirs = np.random.RandomState(seed), np.random.RandomState(seed)
    most = probability * 30
    found = mask_tokens(tokens, probability, most, VOCABULARY, ours)
    assert (found.tokens, found.labels) == _masked_as_megatron_does(tokens, probability, most, VOCABULARY, theirs)
    assert ours.randint(2**31) == theirs.randint(2**31)


@given(st.lists(st.integers(1, 9), min_size=2, max_size=6), st.integers(2, 20), st.integers(0, 9999))
def test_truncation_takes_single_draws_from_the_longer_segment(sizes: list[int], room: int, seed: int) -> None:
    sentences = [[10 * number + place for place in range(size)] for number, size in enumerate(sizes)]
    found = cut_segments(sentences, room, np.random.RandomState(seed), has_two=True)
    random = np.random.RandomState(seed)
    pivot = random.randint(1, len(sizes)) if len(sizes) >= 3 else 1
    first, second = (_joined(part) for part in (sentences[:pivot], sentences[pivot:]))
    exchanged = random.random_sample() < 0.5
    if exchanged:
        first, second = second, first
    truncated = len(first) + len(second) > room
    while len(first) + len(second) > room:
        longer = first if len(first) > len(second) else second
        longer.pop(0 if random.random_sample() < 0.5 else -1)
    assert (found.first, found.second) == (first, second)
    assert (found.are_exchanged, found.are_truncated) == (exchanged, truncated)


def test_one_segment_draws_nothing_and_has_one_type() -> None:
    random = np.random.RandomState(1)
    found = cut_segments(SENTENCES, 20, random, has_two=False)
    assert found.first == _joined(SENTENCES) and found.second == [] and not found.are_exchanged
    assert random.randint(2**31) == np.random.RandomState(1).randint(2**31)
    sample = _sample(0, 20, 32, two=False)
    assert not sample["types"].any() and int(sample["padding_mask"].sum()) == 14 + 2


def test_a_sample_of_the_largest_room_fills_its_length_exactly() -> None:
    sample = make_bert_sample(
        [list(range(5, 40)), list(range(5, 40))], 29, MaskingRules(32, 0.15, True), VOCABULARY, np.random.RandomState(3)
    )
    assert sample["padding_mask"].all() and sample["text"][[0, -1]].tolist() == [2, 3]


def test_a_short_text_may_have_nothing_masked() -> None:
    """FC-10: 0.01 of a room of 4 is less than a token."""
    assert not _sample(0, 4, 16, probability=0.01)["loss_mask"].any()


def test_the_parts_of_masked_tokens() -> None:
    """80 % [MASK], 10 % as they were, 10 % random; 15 % in all."""
    masked = kept = total = 0
    for number in range(400):
        sample = _sample(number, 20, 32)
        chosen = sample["loss_mask"] == 1
        total += int(chosen.sum())
        masked += int((sample["text"][chosen] == VOCABULARY.mask).sum())
        kept += int((sample["text"][chosen] == sample["labels"][chosen]).sum())
    assert total == 400 * 3  # round(0.15 * 17) each
    assert 0.76 < masked / total < 0.84 and 0.07 < kept / total < 0.14
