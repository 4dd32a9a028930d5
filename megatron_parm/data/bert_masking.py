"""One BERT sample from whole sentences: segments, truncation, whole-word n-gram masking, padding. Floor 4.

Source: formats C.4. Every draw comes from one numpy `RandomState`, in Megatron's order, so the same sentences and seed
give the same sample.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

Ids = list[int]

LONGEST_NGRAM = 3
_NGRAM_WEIGHTS = 1.0 / np.arange(1, LONGEST_NGRAM + 1)
_NGRAM_EDGES: list[float] = (_NGRAM_WEIGHTS / _NGRAM_WEIGHTS.sum()).cumsum().tolist()
_MASKED, _KEPT = 0.8, 0.5  # [MASK] for 80 %; of the others one half stays, one half becomes a random token
NO_LABEL = -1


class BertSample(TypedDict):
    """One sample, under Megatron's names; [s] each but `is_random` and `truncated`, which are 0 or 1.

    `labels` are the tokens under the mask, -1 elsewhere; `is_random` says that the segments are exchanged;
    `padding_mask` is 1 where there is text.
    """

    text: NDArray[np.int64]
    types: NDArray[np.int64]
    labels: NDArray[np.int64]
    is_random: NDArray[np.int64]
    loss_mask: NDArray[np.int64]
    padding_mask: NDArray[np.int64]
    truncated: NDArray[np.int64]


@dataclass(frozen=True)
class WordPieces:
    """What masking needs of a vocabulary: its special ids, all its ids, and which ids go on with a word (`##ing`)."""

    cls: int
    sep: int
    mask: int
    pad: int
    ids: tuple[int, ...]
    continuing: frozenset[int]


@dataclass(frozen=True)
class MaskingRules:
    """`probability` of a token to be masked; `length` of a padded sample; two segments or one."""

    length: int
    probability: float
    has_two_segments: bool


@dataclass(frozen=True)
class Segments:
    """Text before masking."""

    first: Ids
    second: Ids
    are_exchanged: bool
    are_truncated: bool


@dataclass(frozen=True)
class Masked:
    """Tokens with some of them masked; `labels` by place, in the order of the places."""

    tokens: Ids
    labels: dict[int, int]


def make_bert_sample(
    sentences: Sequence[Ids], target: int, rules: MaskingRules, pieces: WordPieces, random: np.random.RandomState
) -> BertSample:
    """The sample of some sentences of one document; `target` tokens of text at most."""
    segments = cut_segments(sentences, target, random, has_two=rules.has_two_segments)
    tokens = [pieces.cls, *segments.first, pieces.sep]
    types = [0] * len(tokens)
    if segments.second:
        tokens += [*segments.second, pieces.sep]
        types += [1] * (len(segments.second) + 1)
    masked = mask_tokens(tokens, rules.probability, rules.probability * target, pieces, random)
    text = np.full(rules.length, pieces.pad, dtype=np.int64)
    kinds = np.full(rules.length, pieces.pad, dtype=np.int64)
    labels = np.full(rules.length, NO_LABEL, dtype=np.int64)
    loss_mask = np.zeros(rules.length, dtype=np.int64)
    padding_mask = np.zeros(rules.length, dtype=np.int64)
    text[: len(tokens)], kinds[: len(tokens)], padding_mask[: len(tokens)] = masked.tokens, types, 1
    places = list(masked.labels)
    labels[places], loss_mask[places] = list(masked.labels.values()), 1
    return BertSample(
        text=text,
        types=kinds,
        labels=labels,
        is_random=np.array(segments.are_exchanged, dtype=np.int64),
        loss_mask=loss_mask,
        padding_mask=padding_mask,
        truncated=np.array(segments.are_truncated, dtype=np.int64),
    )


def cut_segments(sentences: Sequence[Ids], target: int, random: np.random.RandomState, *, has_two: bool) -> Segments:
    """Two segments, exchanged in one case of two, or one; cut at their ends down to `target` tokens together."""
    pivot = len(sentences)
    if has_two:
        pivot = random.randint(1, len(sentences)) if len(sentences) >= 3 else 1
    first = [token for sentence in sentences[:pivot] for token in sentence]
    second = [token for sentence in sentences[pivot:] for token in sentence]
    are_exchanged = has_two and random.random_sample() < 0.5
    if are_exchanged:
        first, second = second, first
    excess = len(first) + len(second) - target
    if excess > 0:
        first, second = _truncated(first, second, random.random_sample(excess) < 0.5)
    return Segments(first, second, bool(are_exchanged), excess > 0)


def _truncated(first: Ids, second: Ids, from_the_front: NDArray[np.bool_]) -> tuple[Ids, Ids]:
    """One token less for each draw: of the longer segment, of the second if they are as long."""
    ends = [[0, len(first)], [0, len(second)]]
    for is_front in from_the_front.tolist():
        longer = ends[0] if ends[0][1] - ends[0][0] > ends[1][1] - ends[1][0] else ends[1]
        longer[0 if is_front else 1] += 1 if is_front else -1
    return first[slice(*ends[0])], second[slice(*ends[1])]


def mask_tokens(
    tokens: Ids, probability: float, most: float, pieces: WordPieces, random: np.random.RandomState
) -> Masked:
    """Mask whole words in runs of one to three: about `probability` of the tokens, at most `most`.

    Pieces that go on with a word belong to it, also across a [SEP]: a word that begins before is masked with them.
    """
    if probability == 0:
        return Masked(tokens, {})
    words: list[Ids] = []
    for place, token in enumerate(tokens):
        if token in (pieces.cls, pieces.sep):
            continue
        if words and token in pieces.continuing:
            words[-1].append(place)
        else:
            words.append([place])
    count = min(most, max(1, round(len(tokens) * probability)))
    order = list(range(len(words)))
    random.shuffle(order)
    output, labels = list(tokens), dict[int, int]()
    for step, word in enumerate(order):
        room = count - len(labels)
        if room <= 0:
            break
        if room < 1:  # part of a token: Megatron goes on, draws for every word that is left, and masks none
            random.random_sample(len(order) - step)
            break
        places = _run_of_words(words, word, room, random)
        if places is None or any(place in labels for place in places):
            continue
        for place in places:
            output[place] = _replacement(tokens[place], pieces, random)
            labels[place] = tokens[place]
    random.shuffle(order)  # Megatron shuffles once more, for an option that is not offered
    return Masked(output, dict(sorted(labels.items())))


def _run_of_words(words: Sequence[Ids], word: int, room: float, random: np.random.RandomState) -> Ids | None:
    """The places of one to three words from `word` on, of fewer where there is no room; None if there is none for one.

    As numpy's `choice` of 1, 2 or 3 by weight draws: one number, looked up in the cumulated weights.
    """
    longest = 1 + bisect_right(_NGRAM_EDGES, random.random_sample())
    for size in range(longest, 0, -1):
        places = [place for run in words[word : word + size] for place in run]
        if len(places) <= room:
            return places
    return None


def _replacement(token: int, pieces: WordPieces, random: np.random.RandomState) -> int:
    if random.random_sample() < _MASKED:
        return pieces.mask
    if random.random_sample() < _KEPT:
        return token
    return pieces.ids[random.randint(0, len(pieces.ids))]
