"""BERT's sentence map. References: Megatron's known answers (formats C.4) and a walk written sentence by sentence."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_parm.data.mersenne import MersenneTwister64
from megatron_parm.data.sentence_map import (
    DocumentCounts,
    SentenceRules,
    build_sentence_map,
    require_usable,
    shuffle_rows,
    usable_documents,
)
from megatron_parm.errors import DataError

DOCUMENTS = np.array([0, 3, 4, 9, 11, 11, 16], dtype=np.int64)
LENGTHS = np.array([5, 9, 4, 12, 3, 7, 8, 2, 6, 10, 11, 4, 4, 5, 6, 520], dtype=np.int32)
KNOWN = {
    # (request, short probability, seed, least sentences): rows
    (10, 0.1, 1234, 2): (
        "(9,11,20)(0,3,20)(4,9,20)(9,11,20)(9,11,20)(4,9,20)(4,9,20)(9,11,6)(0,3,20)(4,9,20)(0,3,20)(0,3,20)"
    ),
    (10, 0.1, 1234, 1): (
        "(3,4,20)(3,4,20)(4,9,20)(4,9,20)(0,3,20)(3,4,20)(9,11,20)(9,11,6)(0,3,20)(0,3,20)(4,9,20)(9,11,20)"
    ),
    (12, 0.5, 7, 2): (
        "(0,3,15)(6,9,5)(0,3,20)(9,11,20)(0,3,20)(4,9,20)(9,11,20)(4,6,10)(0,3,20)(9,11,20)(6,9,20)(4,9,20)(4,6,2)"
        "(9,11,19)"
    ),
}


def _map(
    lengths: np.ndarray, documents: np.ndarray, rules: SentenceRules, request: int | None, seed: int
) -> np.ndarray:
    return build_sentence_map(lengths, usable_documents(lengths, documents, rules), rules, request, seed)


def _text(rows: np.ndarray) -> str:
    return "".join(f"({first},{last},{room})" for first, last, room in rows.tolist())


@pytest.mark.parametrize("case", KNOWN, ids=str)
def test_known_answers(case: tuple[int, float, int, int]) -> None:
    request, probability, seed, least = case
    rows = _map(LENGTHS, DOCUMENTS, SentenceRules(20, probability, least), request, seed)
    assert _text(rows) == KNOWN[case] and rows.dtype == np.uint32


def _naive(lengths: list[int], documents: list[int], rules: SentenceRules, request: int | None, seed: int) -> list:
    """The rule of C.4, one sentence after the other."""
    random = np.random.RandomState(seed)

    def room() -> int:
        if rules.short_ratio == 0:
            return rules.max_tokens
        draw = int(random.randint(0, 2**32, dtype=np.uint32))
        return 2 + draw % (rules.max_tokens - 1) if draw % rules.short_ratio == 0 else rules.max_tokens

    rows: list[list[int]] = []
    while len(rows) < (1 if request is None else request):
        for first, last in pairwise(documents):
            inside = lengths[first:last]
            if len(inside) < rules.min_sentences or (len(inside) > 1 and max(inside) > 512):
                continue
            target, start, tokens = room(), first, 0
            for sentence in range(first, last):
                tokens += lengths[sentence]
                left = last - sentence - 1
                if (tokens >= target and left > 1 and sentence + 1 - start >= rules.min_sentences) or left == 0:
                    rows.append([start, sentence + 1, target])
                    start, tokens, target = sentence + 1, 0, room()
    generator = MersenneTwister64(seed + 1)
    for place in range(len(rows) - 1, 0, -1):
        other = int(generator.draw(1)[0]) % (place + 1)
        rows[place], rows[other] = rows[other], rows[place]
    return rows


@given(
    st.lists(st.lists(st.sampled_from([1, 2, 3, 7, 30, 512, 513]), max_size=7), min_size=1, max_size=8),
    st.sampled_from([0.0, 0.1, 0.3, 1.0]),
    st.integers(1, 2),
    st.sampled_from([None, 1, 40]),
    st.integers(1, 5000),
)
def test_any_map_equals_the_walk_by_hand_and_stays_in_range(
    texts: list[list[int]], probability: float, least: int, request: int | None, seed: int
) -> None:
    lengths = np.array([length for text in texts for length in text], dtype=np.int32)
    documents = np.cumsum([0, *(len(text) for text in texts)])
    rules = SentenceRules(20, probability, least)
    usable = usable_documents(lengths, documents, rules)
    if not usable.counts.usable:
        with pytest.raises(DataError):
            require_usable(usable.counts, rules, "text")
        return
    rows = build_sentence_map(lengths, usable, rules, request, seed)
    assert rows.tolist() == _naive(lengths.tolist(), documents.tolist(), rules, request, seed)
    first, last, room = rows.T.astype(np.int64)
    assert ((first >= 0) & (first + least <= last) & (last <= len(lengths)) & (room >= 2) & (room <= 20)).all()
    assert len(rows) >= (request or 1)


def test_a_part_of_the_documents_keeps_the_numbers_of_the_file() -> None:
    """Documents 2 and 3 alone, as a split takes them."""
    rows = _map(LENGTHS, DOCUMENTS[2:5], SentenceRules(20, 0.0, 2), None, 1)
    assert sorted(rows.tolist()) == [[4, 9, 20], [9, 11, 20]]


def test_why_documents_are_left_out_is_counted() -> None:
    counts = usable_documents(LENGTHS, DOCUMENTS, SentenceRules(20, 0.1, 2)).counts
    assert counts == DocumentCounts(documents=6, sentences=16, usable=3, empty=1, short=1, long=1)
    assert usable_documents(LENGTHS, DOCUMENTS, SentenceRules(20, 0.1, 1)).counts.usable == 4


@pytest.mark.parametrize(("least", "words"), [(2, ("--bert-no-binary-head", "two sentences")), (1, ("one sentence",))])
def test_documents_that_give_nothing_are_an_error_at_once(least: int, words: tuple[str, ...]) -> None:
    """FC-02: the next step would walk epochs without end."""
    rules = SentenceRules(20, 0.1, least)
    documents = np.arange(21) if least == 2 else np.zeros(4, dtype=np.int64)
    counts = usable_documents(np.full(20, 5, dtype=np.int32), documents, rules).counts
    with pytest.raises(DataError, match="the train split of corpus gives no sample") as error:
        require_usable(counts, rules, "the train split of corpus")
    assert all(word in str(error.value) for word in words)


def test_a_shuffle_of_many_rows_goes_on_over_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.arange(3000, dtype=np.uint32).reshape(1000, 3)
    whole, chunked = rows.copy(), rows.copy()
    shuffle_rows(whole, 5)
    monkeypatch.setattr("megatron_parm.data.sentence_map._CHUNK", 7)
    shuffle_rows(chunked, 5)
    assert (whole == chunked).all() and not (whole == rows).all()
    assert sorted(map(tuple, whole.tolist())) == list(map(tuple, rows.tolist()))


def test_more_sentences_than_32_bits_hold_get_wider_rows() -> None:
    """By an array that only looks that long."""
    many = np.broadcast_to(np.array([4], dtype=np.int32), (2**32,))
    rules = SentenceRules(20, 0.0, 2)
    usable = usable_documents(many[:8], np.array([0, 3, 8]), rules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "ascontiguousarray", lambda array: array[:8].copy())
        assert build_sentence_map(many, usable, rules, None, 1).dtype == np.uint64
