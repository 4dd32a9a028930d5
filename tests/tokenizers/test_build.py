"""From flags to a tokenizer. Reference: padded vocabulary = ceil(V / (divisor * tp)) * divisor * tp (Megatron)."""

import pytest

from megatron_parm.errors import ConfigError
from megatron_parm.tokenizers.build import build_tokenizer, padded_vocab_size


@pytest.mark.parametrize(
    ("size", "divisor", "tp", "padded"),
    [(50257, 128, 1, 50304), (50257, 128, 8, 51200), (128, 128, 1, 128), (1, 1, 3, 3), (129, 64, 2, 256)],
)
def test_padded_vocabulary(size, divisor, tp, padded) -> None:
    assert padded_vocab_size(size, divisor, tp) == padded


def test_the_null_tokenizer_and_gpt2(gpt2_files) -> None:
    assert build_tokenizer("NullTokenizer", vocab_size=7).eod == 7
    gpt2 = build_tokenizer("GPT2BPETokenizer", vocab_file=str(gpt2_files[0]), merge_file=str(gpt2_files[1]))
    assert gpt2.eod == 50256


@pytest.mark.parametrize(
    ("kind", "flags", "message"),
    [
        ("GPT2BPETokenizer", {}, "--vocab-file"),
        ("GPT2BPETokenizer", {"vocab_file": "/no/such.json"}, r"--vocab-file /no/such.json.*does not exist"),
        ("GPT2BPETokenizer", {"vocab_file": "/"}, "--vocab-file /.*is a folder"),
        ("GPT2BPETokenizer", {"vocab_file": __file__, "merge_file": "/no/m.txt"}, "--merge-file /no/m.txt"),
        ("SentencePieceTokenizer", {}, "--tokenizer-model"),
        ("GPTSentencePieceTokenizer", {"tokenizer_model": "/no/m.model"}, "--tokenizer-model /no/m.model"),
        ("NullTokenizer", {}, "--vocab-size"),
        ("NullTokenizer", {"vocab_size": 0}, "--vocab-size"),
        ("GPT2Tokenizer", {}, "GPT2Tokenizer is not known; use one of GPT2BPETokenizer"),
    ],
)
def test_what_is_missing_is_named(kind, flags, message) -> None:
    with pytest.raises(ConfigError, match=message):
        build_tokenizer(kind, **flags)
