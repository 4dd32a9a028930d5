"""A vocabulary of numbers, and corpora of sentences, for tests of BERT."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_parm.data.bert_dataset import SpecialIds, word_pieces
from megatron_parm.data.indexed_writer import IndexedWriter

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PIECES = (*SPECIAL, *(f"##p{number}" if number % 3 == 0 else f"w{number}" for number in range(5, 60)))
VOCABULARY = word_pieces(SpecialIds(cls=2, sep=3, mask=4, pad=0), PIECES)


def write_vocabulary(path: Path) -> Path:
    """The pieces as a vocab.txt."""
    path.write_text("\n".join(PIECES) + "\n", encoding="utf-8")
    return path


def write_sentences(prefix: Path, documents: Sequence[Sequence[Sequence[int]]]) -> str:
    """A corpus of these documents of sentences of ids; returns the prefix."""
    with IndexedWriter(prefix, np.dtype("u2")) as writer:
        for sentences in documents:
            ids = np.array([token for sentence in sentences for token in sentence], dtype=np.int64)
            writer.add_document(ids, [len(sentence) for sentence in sentences])
    return str(prefix)


def random_sentences(num_documents: int, seed: int = 3) -> list[list[list[int]]]:
    """Documents of 1 to 9 sentences of 2 to 12 ids."""
    random = np.random.RandomState(seed)
    return [
        [random.randint(5, 60, random.randint(2, 13)).tolist() for _ in range(random.randint(1, 10))]
        for _ in range(num_documents)
    ]
