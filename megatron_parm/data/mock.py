"""Documents of counting numbers, for runs without data (--mock-data). Floor 4. Source: Megatron-Core's mock data."""

import numpy as np
from numpy.typing import NDArray

NUM_DOCUMENTS = 100_000
MAX_LENGTH = 4096


class MockDocuments:
    """100,000 documents of 1 to 4095 tokens: 1, 2, 3, ... and the end of document. Made when read, never stored.

    Where the vocabulary is smaller than that, the numbers begin again before its end.
    """

    def __init__(self, vocab_size: int, eod: int) -> None:
        self.name = "mock data"
        self.vocab_size = vocab_size
        self.eod = eod
        random = np.random.default_rng(0)
        self.lengths: NDArray[np.int32] = random.integers(1, MAX_LENGTH, NUM_DOCUMENTS, dtype=np.int32)
        words = np.delete(np.arange(vocab_size), eod) if vocab_size <= MAX_LENGTH else np.arange(MAX_LENGTH)
        self._words = np.resize(np.roll(words, -1), MAX_LENGTH) if len(words) > 1 else np.zeros(MAX_LENGTH, np.int64)

    def read(self, sequence: int, start: int = 0, stop: int | None = None) -> NDArray[np.integer]:
        """The ids [start, stop) of one document."""
        length = int(self.lengths[sequence])
        document = np.append(self._words[: length - 1], self.eod)
        return document[start : length if stop is None else stop]
