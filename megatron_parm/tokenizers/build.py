"""From the tokenizer flags to a tokenizer, and the padded vocabulary of the embedding. Floor 2."""

from collections.abc import Sequence
from pathlib import Path

from megatron_parm.errors import ConfigError
from megatron_parm.tokenizers.base import Tokenizer, require_file
from megatron_parm.tokenizers.gpt2_bpe import GPT2BPETokenizer
from megatron_parm.tokenizers.null import NullTokenizer
from megatron_parm.tokenizers.sentencepiece_model import SentencePieceTokenizer
from megatron_parm.tokenizers.tiktoken_ranks import NEEDED, TikTokenizer
from megatron_parm.tokenizers.tokenizer_json import HuggingFaceTokenizer
from megatron_parm.tokenizers.wordpiece import WordPieceTokenizer

TOKENIZER_TYPES = (
    "GPT2BPETokenizer",
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "HuggingFaceTokenizer",
    "SFTTokenizer",
    "TikTokenizer",
    "NullTokenizer",
)


def build_tokenizer(
    tokenizer_type: str,
    *,
    vocab_file: str | Path | None = None,
    merge_file: str | Path | None = None,
    tokenizer_model: str | Path | None = None,
    vocab_size: int | None = None,
    vocab_extra_ids: int = 0,
    tiktoken_pattern: str | None = None,
    tiktoken_num_special_tokens: int | None = None,
    tokenizer_special_tokens: Sequence[str] = (),
) -> Tokenizer:
    """The tokenizer that the flags of the same names describe.

    `vocab_size` is for the NullTokenizer, which has one id more, its end of document, and for TikTokenizer. Raises
    ConfigError naming the flag and the path of a file that is missing, DataError for a file of another kind.
    """
    if tokenizer_type == "GPT2BPETokenizer":
        vocabulary = require_file(vocab_file, "--vocab-file", tokenizer_type)
        merges = require_file(merge_file, "--merge-file", tokenizer_type)
        return GPT2BPETokenizer(vocabulary, merges, vocab_extra_ids)
    if tokenizer_type in ("BertWordPieceLowerCase", "BertWordPieceCase"):
        vocabulary = require_file(vocab_file, "--vocab-file", tokenizer_type)
        return WordPieceTokenizer(vocabulary, tokenizer_type == "BertWordPieceLowerCase", vocab_extra_ids)
    if tokenizer_type in ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"):
        model = require_file(tokenizer_model, "--tokenizer-model", tokenizer_type)
        return SentencePieceTokenizer(model, tokenizer_type == "Llama2Tokenizer", vocab_extra_ids)
    if tokenizer_type in ("HuggingFaceTokenizer", "SFTTokenizer"):
        if not tokenizer_model:
            raise ConfigError(f"--tokenizer-type {tokenizer_type} needs --tokenizer-model FOLDER; it is not given")
        return HuggingFaceTokenizer(Path(tokenizer_model), vocab_extra_ids)
    if tokenizer_type == "TikTokenizer":
        return TikTokenizer(
            require_file(tokenizer_model, "--tokenizer-model", tokenizer_type),
            tiktoken_pattern,
            vocab_size,
            tiktoken_num_special_tokens,
            tokenizer_special_tokens or NEEDED,
            vocab_extra_ids,
        )
    if tokenizer_type == "NullTokenizer":
        if vocab_size is None or vocab_size < 1:
            given = "not given" if vocab_size is None else str(vocab_size)
            raise ConfigError(f"--tokenizer-type NullTokenizer needs --vocab-size N, at least 1; it is {given}")
        return NullTokenizer(vocab_size, vocab_extra_ids)
    raise ConfigError(f"--tokenizer-type {tokenizer_type} is not known; use one of {', '.join(TOKENIZER_TYPES)}")


def padded_vocab_size(vocab_size: int, divisible_by: int, tp: int) -> int:
    """The rows of the embedding: `vocab_size` rounded up to a multiple of `divisible_by` * `tp`."""
    multiple = divisible_by * tp
    return -(-vocab_size // multiple) * multiple
