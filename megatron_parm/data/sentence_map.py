"""Which sentences make sample number i of a BERT: runs of whole sentences inside one document. Floor 4.

Source: formats C.4. Same sentence lengths, documents, seed and request give Megatron's rows, in its order. The two
loops whose every step depends on the one before are compiled by numba when they are first called: nothing is kept on
disk, for numba keeps compiled code as pickles.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import floor
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from megatron_parm.data.mersenne import MersenneTwister64
from megatron_parm.errors import DataError

LONGEST_SENTENCE = 512  # a document with a longer one is left out, unless it is the only sentence
SPECIAL_TOKENS = 3  # [CLS] A [SEP] B [SEP]
_CHUNK = 1 << 20
_UINT32_MAX = 2**32 - 1


@dataclass(frozen=True)
class SentenceRules:
    """How samples are cut. `max_tokens` is the room for text; with `short_probability` a sample gets a smaller one.

    `min_sentences` is 2 where a head learns the order of two segments, else 1.
    """

    max_tokens: int
    short_probability: float
    min_sentences: int

    @property
    def short_ratio(self) -> int:
        """One sample in so many is short; 0 for none."""
        return floor(1.0 / self.short_probability + 0.5) if self.short_probability > 0 else 0


@dataclass(frozen=True)
class DocumentCounts:
    """The documents of a split, and why some of them give no sample."""

    documents: int
    sentences: int
    usable: int
    empty: int
    short: int
    long: int

    def __str__(self) -> str:
        return (
            f"{self.documents} documents, {self.sentences} sentences; left out: {self.empty} empty, {self.short} of "
            f"one sentence, {self.long} with a sentence of more than {LONGEST_SENTENCE} tokens"
        )


@dataclass(frozen=True)
class UsableDocuments:
    """The first sentence, and the one after the last, of every document that gives samples."""

    first: NDArray[np.int64]
    last: NDArray[np.int64]
    counts: DocumentCounts


def usable_documents(
    lengths: NDArray[np.int32], document_index: NDArray[np.int64], rules: SentenceRules
) -> UsableDocuments:
    """The documents between neighbours of `document_index` that can give a sample."""
    first, last = document_index[:-1], document_index[1:]
    counts = last - first
    begin, end = (int(document_index[0]), int(document_index[-1])) if len(document_index) else (0, 0)
    long_before = np.concatenate([[0], np.cumsum(lengths[begin:end] > LONGEST_SENTENCE)])
    is_long = (counts > 1) & (long_before[last - begin] > long_before[first - begin])
    is_short = (counts > 0) & (counts < rules.min_sentences)
    is_usable = (counts >= rules.min_sentences) & ~is_long
    return UsableDocuments(
        first[is_usable],
        last[is_usable],
        DocumentCounts(
            documents=len(counts),
            sentences=end - begin,
            usable=int(is_usable.sum()),
            empty=int((counts == 0).sum()),
            short=int(is_short.sum()),
            long=int(is_long.sum()),
        ),
    )


def require_usable(counts: DocumentCounts, rules: SentenceRules, source: str) -> None:
    """Raise DataError if no document of `source` can give a sample."""
    if counts.usable:
        return
    head = rules.min_sentences > 1
    needs = "a document needs two sentences for the sentence-order head" if head else "a document needs one sentence"
    remedy = (
        "preprocess with --split-sentences, so that a document is more than one sentence, or train without that head: "
        "--bert-no-binary-head"
        if head
        else "preprocess the text with --split-sentences"
    )
    raise DataError(f"{source} gives no sample ({counts}): {needs}, none longer than {LONGEST_SENTENCE}; {remedy}")


def build_sentence_map(
    lengths: NDArray[np.int32], documents: UsableDocuments, rules: SentenceRules, requested: int | None, seed: int
) -> NDArray[np.integer]:
    """Rows (first sentence, one after the last, room for text) in shuffled order.

    Whole epochs, so at least `requested` rows; None: one epoch. At least one document must be usable. 32-bit where
    sentence numbers fit, else 64-bit.
    """
    dtype = np.dtype(np.uint64 if len(lengths) > _UINT32_MAX else np.uint32)
    bound = int(((documents.last - documents.first) // rules.min_sentences + 1).sum())
    random, draws = np.random.RandomState(seed % 2**32), np.empty(0, dtype=np.uint32)
    epochs: list[NDArray[np.integer]] = []
    found, wanted = 0, 1 if requested is None else requested
    while found < wanted:
        if rules.short_ratio:
            missing = max(0, bound + len(documents.first) - len(draws))
            draws = np.concatenate([draws, random.randint(0, 2**32, missing, dtype=np.uint32)])
        rows = np.empty((bound, 3), dtype=dtype)
        num_rows, num_draws = _walk(
            documents.first,
            documents.last,
            np.ascontiguousarray(lengths),
            draws,
            rules.short_ratio,
            rules.max_tokens,
            rules.min_sentences,
            rows,
        )
        draws = draws[num_draws:]
        epochs.append(rows[:num_rows].copy())
        found += num_rows
    rows = np.concatenate(epochs)
    shuffle_rows(rows, seed + 1)
    return rows


def shuffle_rows(rows: NDArray[np.integer], seed: int) -> None:
    """Exchange rows in place from the last to the second, each with one not after it, drawn by MT19937-64."""
    random = MersenneTwister64(seed)
    last = len(rows) - 1
    while last > 0:
        draws = random.draw(min(last, _CHUNK))
        partners = (draws % np.arange(last + 1, last + 1 - len(draws), -1, dtype=np.uint64)).astype(np.int64)
        _exchange(rows, last, partners)
        last -= len(draws)


def _walk_documents(
    first: Any,
    last: Any,
    lengths: Any,
    draws: Any,
    short_ratio: int,
    max_tokens: int,
    min_sentences: int,
    rows: Any,
) -> tuple[int, int]:
    """One epoch into `rows`: the rows filled, the draws used. Every document and every sample draws a room."""
    num_rows = 0
    num_draws = 0
    for document in range(len(first)):
        target: Any = max_tokens
        if short_ratio > 0:
            draw: Any = np.int64(draws[num_draws])
            num_draws += 1
            if draw % short_ratio == 0:
                target = 2 + draw % (max_tokens - 1)
        start = first[document]
        tokens = 0
        for sentence in range(first[document], last[document]):
            tokens += lengths[sentence]
            left = last[document] - sentence - 1
            is_full = tokens >= target and left > 1 and sentence + 1 - start >= min_sentences
            if is_full or left == 0:
                rows[num_rows, 0] = start
                rows[num_rows, 1] = sentence + 1
                rows[num_rows, 2] = target
                num_rows += 1
                start = sentence + 1
                tokens = 0
                target = max_tokens
                if short_ratio > 0:
                    draw = np.int64(draws[num_draws])
                    num_draws += 1
                    if draw % short_ratio == 0:
                        target = 2 + draw % (max_tokens - 1)
    return num_rows, num_draws


def _exchange_rows(rows: Any, last: int, partners: Any) -> None:
    for step in range(len(partners)):
        here = last - step
        there = partners[step]
        for column in range(3):
            kept = rows[here, column]
            rows[here, column] = rows[there, column]
            rows[there, column] = kept


_walk: Callable[..., tuple[int, int]] = numba.njit(_walk_documents)
_exchange: Callable[..., None] = numba.njit(_exchange_rows)
