"""GPT-2's byte-level BPE from vocab.json and merges.txt, run by the `tokenizers` library. Floor 2."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from megatron_parm.errors import ConfigError, DataError
from megatron_parm.tokenizers.base import replace_lone_surrogates
from megatron_parm.tokenizers.byte_level_words import ByteLevelWords

END_OF_TEXT = "<|endoftext|>"


class GPT2BPETokenizer:
    """Byte-level BPE: every text comes back exactly, blanks and newlines included.

    `<|endoftext|>` is known to `eod` alone: the same characters inside a document are encoded as plain text.
    """

    def __init__(self, vocab_file: Path, merge_file: Path, extra_ids: int = 0) -> None:
        self.name = f"GPT2BPETokenizer ({vocab_file})"
        vocabulary = _read_vocabulary(vocab_file)
        merges = _read_merges(merge_file, vocabulary, vocab_file)
        self.vocab_size = len(vocabulary) + extra_ids
        self._eod = vocabulary.get(END_OF_TEXT)
        self.special_tokens = {} if self._eod is None else {END_OF_TEXT: self._eod}
        self.unknown: int | None = None  # every byte is known
        self._engine = FastTokenizer(models.BPE(vocab=vocabulary, merges=merges))
        self._engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._engine.decoder = decoders.ByteLevel()
        self._words = ByteLevelWords(self._encode_fast, self._cut)

    @property
    def eod(self) -> int:
        """The id of `<|endoftext|>`."""
        if self._eod is None:
            raise ConfigError(f"{self.name} has no end-of-document token: {END_OF_TEXT} is not in its vocabulary")
        return self._eod

    def encode(self, text: str) -> list[int]:
        """The ids of one text."""
        ids: list[int] = self._engine.encode(replace_lone_surrogates(text)).ids
        return ids

    def encode_part(self, text: str) -> list[int]:
        """As `encode`, which puts nothing around a text."""
        return self.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of several texts, some times as fast as by `encode`: the ids of words are remembered."""
        return [self._encode_words(replace_lone_surrogates(text)) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; ids beyond the vocabulary (its padding) give nothing."""
        text: str = self._engine.decode(list(ids), skip_special_tokens=False)
        return text

    def _encode_words(self, text: str) -> list[int]:
        ids = self._words.encode(text)
        return self._encode_fast(text) if ids is None else ids

    def _encode_fast(self, text: str) -> list[int]:
        """As `encode`; no places of characters are kept, and one text a call keeps the library on one thread."""
        ids: list[int] = self._engine.encode_batch_fast([text])[0].ids
        return ids

    def _cut(self, text: str) -> list[str]:
        """The words that the library cuts `text` into."""
        places = [place for _, place in self._engine.pre_tokenizer.pre_tokenize_str(text)]
        return [text[start:stop] for start, stop in places]


def _read_vocabulary(path: Path) -> dict[str, int]:
    try:
        vocabulary: dict[str, int] = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"--vocab-file {path}: not JSON in UTF-8 ({error}); GPT2BPETokenizer needs vocab.json"
        ) from error
    good = isinstance(vocabulary, dict) and all(type(number) is int for number in vocabulary.values())
    if not good:
        raise DataError(f"--vocab-file {path}: must be a JSON object of token: id, as GPT-2's vocab.json is")
    if set(vocabulary.values()) != set(range(len(vocabulary))):
        raise DataError(
            f"--vocab-file {path}: the ids of {len(vocabulary)} tokens must be 0..{len(vocabulary) - 1}, each once; "
            f"found {min(vocabulary.values(), default=0)}..{max(vocabulary.values(), default=0)} with gaps or repeats"
        )
    return vocabulary


def _read_merges(path: Path, vocabulary: dict[str, int], vocab_file: Path) -> list[tuple[str, str]]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(
            f"--merge-file {path}: not text in UTF-8 ({error}); GPT2BPETokenizer needs merges.txt"
        ) from error
    merges = []
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#version"):
            continue
        pieces = line.strip("\r").split(" ")
        if len(pieces) != 2:
            raise DataError(f"--merge-file {path} line {number}: two pieces and one blank wanted, found {line!r}")
        left, right = pieces
        missing = [piece for piece in (left, right, left + right) if piece not in vocabulary]
        if missing:
            raise DataError(
                f"--merge-file {path} line {number}: {missing[0]!r} is not in --vocab-file {vocab_file}; "
                "the two files must come from the same tokenizer"
            )
        merges.append((left, right))
    return merges
