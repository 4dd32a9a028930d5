"""Numbers as text. Reference: Megatron's NullTokenizer, whose vocabulary has one id more than --vocab-size."""

import pytest

from megatron_parm.errors import DataError
from megatron_parm.tokenizers.null import NullTokenizer


def test_numbers_are_ids_and_one_more_ends_a_document() -> None:
    tokenizer = NullTokenizer(100)
    assert tokenizer.encode(" 3 4\n99 ") == [3, 4, 99]
    assert tokenizer.encode_batch(["1", ""]) == [[1], []]
    assert tokenizer.decode([3, 4, 100]) == "3 4 100"
    assert (tokenizer.vocab_size, tokenizer.eod) == (101, 100)


@pytest.mark.parametrize("text", ["3 x", "-1", "100", "1.5", "\u0663", "9" * 5000])
def test_anything_else_is_refused(text) -> None:
    with pytest.raises(DataError, match="token id"):
        NullTokenizer(100).encode(text)
