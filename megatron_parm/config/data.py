"""Corpus and tokenizer. Floor 1."""

# ruff: noqa: RUF009 - flag() is dataclasses.field

import math
from dataclasses import dataclass
from typing import Literal

from megatron_parm.config.fields import flag
from megatron_parm.errors import ConfigError

SplitRounding = Literal["mcore", "classic"]
TokenizerType = Literal[
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
]
PromptFormatName = Literal["nemotron-h-aligned", "nemotron-nano-v2", "chatml", "sections", "identity"]
TiktokenPattern = Literal["v1", "v2"]
DataloaderType = Literal["single", "cyclic"]
DataImpl = Literal["infer", "mmap"]

_DATA_IMPL = "this old format is not read; convert the text again with tools/preprocess_data.py and use mmap"


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is read, how it is cut into samples, and the vocabulary it is written in."""

    seq_length: int = flag(help="length of a sample", unit="tokens", at_least=1)
    data_path: tuple[str, ...] = flag(
        (), help="corpus: path prefix of a .bin and .idx pair; several, or weights and prefixes in turn, are blended"
    )
    data_args_path: str | None = flag(None, help="text file with the words of --data-path", none_means="none")
    train_data_path: tuple[str, ...] = flag((), help="as --data-path, for training alone; --split is not applied")
    valid_data_path: tuple[str, ...] = flag((), help="the same for validation")
    test_data_path: tuple[str, ...] = flag((), help="the same for the test")
    per_split_data_args_path: str | None = flag(
        None, help="JSON file with the words of the three flags above under train, valid and test", none_means="none"
    )
    split: str = flag("969, 30, 1", help="parts for training, validation and test")
    split_rounding: SplitRounding = flag(
        "mcore", help="where the parts end; classic: as Megatron of 2021, to resume old runs"
    )
    data_cache_path: str | None = flag(
        None, help="folder for index files", none_means="a folder cache/ beside the corpus"
    )
    no_mmap_bin_files: bool = flag(
        False, help="read tokens from the .bin files with plain reads in place of memory maps"
    )
    mock_data: bool = flag(False, help="made-up documents in place of --data-path")
    num_workers: int = flag(2, help="processes that prepare batches", unit="processes", at_least=0)
    tokenizer_type: TokenizerType = flag("GPT2BPETokenizer", help="kind of tokenizer; its files are local")
    vocab_file: str | None = flag(None, help="vocabulary of GPT2BPETokenizer (vocab.json) or BERT (vocab.txt)")
    merge_file: str | None = flag(None, help="merges of GPT2BPETokenizer (merges.txt)")
    tokenizer_model: str | None = flag(
        None, help="SentencePiece model, folder with tokenizer.json (HuggingFaceTokenizer), or file of tiktoken ranks"
    )
    vocab_size: int | None = flag(
        None,
        help="vocabulary of NullTokenizer or TikTokenizer, before padding",
        unit="tokens",
        at_least=1,
        none_means="the tokenizer's",
    )
    vocab_extra_ids: int = flag(0, help="extra tokens at the end of the vocabulary", unit="tokens", at_least=0)
    tiktoken_pattern: TiktokenPattern | None = flag(
        None, help="how TikTokenizer cuts text into words", none_means="the file's own, else v2"
    )
    tiktoken_num_special_tokens: int | None = flag(
        None, help="special tokens before the ranks of TikTokenizer", unit="tokens", at_least=3, none_means="1000"
    )
    tokenizer_special_tokens: tuple[str, ...] = flag(
        (), help="names of the first special tokens of TikTokenizer, <unk>, <s> and </s> among them"
    )
    sft: bool = flag(False, help="the corpus is files of conversations (JSON lines); loss on the answers alone")
    sft_tokenizer_prompt_format: PromptFormatName = flag(
        "nemotron-h-aligned", help="what stands around the turns of a conversation"
    )
    reset_position_ids: bool = flag(False, help="count positions anew after each end of document")
    reset_attention_mask: bool = flag(False, help="no attention across an end of document")
    eod_mask_loss: bool = flag(False, help="no loss on end-of-document tokens")
    dataloader_type: DataloaderType = flag(
        "single",
        help="samples in index order once (single), or shuffled anew each epoch (cyclic)",
        refused={"external": "a data loader of your own cannot be passed by flag; use single or cyclic"},
    )
    data_impl: DataImpl = flag(
        "infer", help="format of the corpus, always mmap", refused=dict.fromkeys(("lazy", "cached"), _DATA_IMPL)
    )

    @property
    def split_weights(self) -> tuple[float, float, float]:
        """The three parts of `split` as numbers; missing ones are 0. Raises ConfigError."""
        words = self.split.replace("/", ",").split(",")
        try:
            weights = [float(word) for word in words]
        except ValueError:
            weights = []
        are_weights = all(math.isfinite(weight) and weight >= 0 for weight in weights)
        if not 1 <= len(weights) <= 3 or not are_weights or sum(weights) == 0:
            raise ConfigError(
                f"--split {self.split}: expected one to three numbers, none negative and not all zero, "
                'for training, validation and test; for instance "969, 30, 1"'
            )
        train, valid, test = weights + [0.0] * (3 - len(weights))
        return train, valid, test
