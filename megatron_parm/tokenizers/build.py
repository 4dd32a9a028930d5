"""From the tokenizer flags to a tokenizer, and the padded vocabulary of the embedding. Floor 2."""

from pathlib import Path

from megatron_parm.errors import ConfigError
from megatron_parm.tokenizers.base import Tokenizer, require_file
from megatron_parm.tokenizers.gpt2_bpe import GPT2BPETokenizer
from megatron_parm.tokenizers.null import NullTokenizer
from megatron_parm.tokenizers.sentencepiece_model import SentencePieceTokenizer

TOKENIZER_TYPES = ("GPT2BPETokenizer", "SentencePieceTokenizer", "GPTSentencePieceTokenizer", "NullTokenizer")


def build_tokenizer(
    tokenizer_type: str,
    *,
    vocab_file: str | Path | None = None,
    merge_file: str | Path | None = None,
    tokenizer_model: str | Path | None = None,
    vocab_size: int | None = None,
) -> Tokenizer:
    """The tokenizer that the flags of the same names describe.

    `vocab_size` is for the NullTokenizer, which has one id more, its end of document. Raises ConfigError naming the
    flag and the path of a file that is missing, DataError for a file of another kind.
    """
    if tokenizer_type == "GPT2BPETokenizer":
        vocabulary = require_file(vocab_file, "--vocab-file", tokenizer_type)
        return GPT2BPETokenizer(vocabulary, require_file(merge_file, "--merge-file", tokenizer_type))
    if tokenizer_type in ("SentencePieceTokenizer", "GPTSentencePieceTokenizer"):
        return SentencePieceTokenizer(require_file(tokenizer_model, "--tokenizer-model", tokenizer_type))
    if tokenizer_type == "NullTokenizer":
        if vocab_size is None or vocab_size < 1:
            given = "not given" if vocab_size is None else str(vocab_size)
            raise ConfigError(f"--tokenizer-type NullTokenizer needs --vocab-size N, at least 1; it is {given}")
        return NullTokenizer(vocab_size)
    raise ConfigError(f"--tokenizer-type {tokenizer_type} is not known; use one of {', '.join(TOKENIZER_TYPES)}")


def padded_vocab_size(vocab_size: int, divisible_by: int, tp: int) -> int:
    """The rows of the embedding: `vocab_size` rounded up to a multiple of `divisible_by` * `tp`."""
    multiple = divisible_by * tp
    return -(-vocab_size // multiple) * multiple
