"""Samples of a BERT: runs of sentences of one document, masked anew for each number. Floor 4. Source: formats C.4."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_parm.data.bert_masking import BertSample, MaskingRules, WordPieces, make_bert_sample
from megatron_parm.data.indexed_dataset import TokenSource

CONTINUES_A_WORD = "##"


@dataclass(frozen=True)
class SpecialIds:
    """The ids of [CLS], [SEP], [MASK] and the padding."""

    cls: int
    sep: int
    mask: int
    pad: int


def word_pieces(special: SpecialIds, pieces: Iterable[str]) -> WordPieces:
    """From a vocabulary in the order of its ids, special and added tokens included."""
    texts = list(pieces)
    continuing = frozenset(number for number, text in enumerate(texts) if text.startswith(CONTINUES_A_WORD))
    return WordPieces(special.cls, special.sep, special.mask, special.pad, tuple(range(len(texts))), continuing)


class BertDataset:
    """One sample for each row (first sentence, one after the last, room for text) of a sentence map.

    A number always gives the same sample: its draws start from a seed of its own.
    """

    def __init__(
        self,
        source: TokenSource,
        rows: NDArray[np.integer],
        rules: MaskingRules,
        pieces: WordPieces,
        seed: int,
    ) -> None:
        self.source = source
        self.rows = rows
        self.rules = rules
        self.pieces = pieces
        self.seed = seed
        self._random = np.random.RandomState()  # seeding one is several times as fast as making one

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> BertSample:
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {self.source.name}, which has {len(self)}")
        first, last, target = self.rows[number].tolist()
        sentences = [self.source.read(sentence).tolist() for sentence in range(first, last)]
        self._random.seed((self.seed + number) % 2**32)
        return make_bert_sample(sentences, target, self.rules, self.pieces, self._random)
