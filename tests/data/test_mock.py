"""Made-up documents. Reference: Megatron-Core's rule: default_rng(0), lengths 1..4095, 1, 2, 3, ... and EOD."""

import numpy as np

from megatron_parm.data.mock import MockDocuments


def test_documents_count_up_and_end() -> None:
    mock = MockDocuments(50257, 50256)
    lengths = np.random.default_rng(0).integers(1, 4096, 100_000, dtype=np.int32)
    assert np.array_equal(mock.lengths, lengths)
    for number in (0, 1, 99_999):
        expected = [*range(1, int(lengths[number])), 50256]
        assert mock.read(number).tolist() == expected
        assert mock.read(number, 2, 5).tolist() == expected[2:5]
        assert mock.read(number, 3).tolist() == expected[3:]


def test_a_small_vocabulary_is_never_left() -> None:
    for vocab_size, eod in ((10, 9), (10, 0), (2, 1), (4096, 4095)):
        mock = MockDocuments(vocab_size, eod)
        document = mock.read(int(np.argmax(mock.lengths)))
        assert document[-1] == eod and eod not in document[:-1]
        assert set(document.tolist()) == set(range(vocab_size)) or vocab_size == 4096
        assert document.max() < vocab_size
