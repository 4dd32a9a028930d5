"""Byte-pair ranks as tiktoken has them, run by the `tokenizers` library. Floor 2. Source: Megatron-Core's TikTokenizer.

Three kinds of files: `.tiktoken` (a token in base64 and its rank on each line), Megatron's JSON list of {rank,
token_bytes, token_str}, and Mistral's tekken.json, which holds such a list beside its pattern and its sizes. The
special tokens come first in the vocabulary, so a token's id is its rank plus their number.
"""

import base64
import binascii
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from megatron_parm.errors import ConfigError, DataError
from megatron_parm.tokenizers.base import replace_lone_surrogates

PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
NEEDED = ("<unk>", "<s>", "</s>")
DEFAULT_VOCAB_SIZE = 1 << 17
DEFAULT_SPECIAL_TOKENS = 1000


@dataclass(frozen=True)
class _Ranks:
    """The tokens in the order of their ranks, and what the file says of itself."""

    tokens: list[bytes]
    pattern: str | None = None
    num_special: int | None = None
    vocab_size: int | None = None


class TikTokenizer:
    """Byte-level BPE by ranks: every text comes back exactly.

    `pattern` is "v1", "v2" or a regular expression; None: the file's own, else v2. `vocab_size` counts the special
    tokens too, and cuts the ranks that are too many. `special_tokens` are the first names; the rest are <SPECIAL_n>.
    """

    def __init__(
        self,
        path: Path,
        pattern: str | None = None,
        vocab_size: int | None = None,
        num_special_tokens: int | None = None,
        special_tokens: Sequence[str] = NEEDED,
        extra_ids: int = 0,
    ) -> None:
        self.name = f"TikTokenizer ({path})"
        ranks = _read_ranks(path)
        count = num_special_tokens if num_special_tokens is not None else (ranks.num_special or DEFAULT_SPECIAL_TOKENS)
        names = _special_names(special_tokens, count)
        size = vocab_size or ranks.vocab_size or min(DEFAULT_VOCAB_SIZE, count + len(ranks.tokens))
        if not count + 256 <= size <= count + len(ranks.tokens):
            raise ConfigError(
                f"--vocab-size {size}: {self.name} has {len(ranks.tokens)} tokens beside its {count} special ones "
                f"(--tiktoken-num-special-tokens); use a size from {count + 256} to {count + len(ranks.tokens)}"
            )
        self.special_tokens = {name: number for number, name in enumerate(names)}
        self.unknown: int | None = None  # every byte is known
        self.eod, self.bos = self.special_tokens["</s>"], self.special_tokens["<s>"]
        self._size, self._num_special = size, count
        self.vocab_size = size + extra_ids
        self._special_names = names
        self._tokens = ranks.tokens[: size - count]
        self._engine = _engine(self._tokens, PATTERNS.get(pattern or "", pattern) or ranks.pattern or PATTERNS["v2"])

    def encode(self, text: str) -> list[int]:
        """The ids of one text."""
        return self.encode_batch([text])[0]

    def encode_part(self, text: str) -> list[int]:
        """As `encode`, which puts nothing around a text."""
        return self.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of several texts, on one thread: the caller decides how many processes work."""
        encode, shift = self._engine.encode_batch_fast, self._num_special
        return [
            [number + shift for number in encode([replace_lone_surrogates(text)], add_special_tokens=False)[0].ids]
            for text in texts
        ]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; ids beyond the vocabulary (its padding) give nothing."""
        parts = (
            self._special_names[number].encode()
            if number < self._num_special
            else self._tokens[number - self._num_special]
            for number in ids
            if 0 <= number < self._size
        )
        return b"".join(parts).decode("utf-8", errors="replace")


def _engine(tokens: Sequence[bytes], pattern: str) -> FastTokenizer:
    """The BPE whose merges are all ways to make a token of two known ones, in the order of the ranks."""
    letters = _byte_letters()
    names = {token: token.decode("latin-1").translate(letters) for token in tokens}
    rank_of = {token: rank for rank, token in enumerate(tokens)}
    merges: list[tuple[str, str]] = []
    for token in tokens:
        ways = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        ways = [(left, right) for left, right in ways if left in names and right in names]
        ways.sort(key=lambda way: (rank_of[way[0]], rank_of[way[1]]))
        merges += [(names[left], names[right]) for left, right in ways]
    vocabulary = {names[token]: rank for token, rank in rank_of.items()}
    engine = FastTokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    engine.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    engine.decoder = decoders.ByteLevel()
    return engine


def _byte_letters() -> dict[int, str]:
    """The letter that stands for each byte in a byte-level BPE (GPT-2's): printable ones stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + place) for place, byte in enumerate(others)}


def _special_names(given: Sequence[str], count: int) -> list[str]:
    missing = [name for name in NEEDED if name not in given]
    if missing or len(set(given)) < len(given) or len(given) > count:
        raise ConfigError(
            f"--tokenizer-special-tokens {' '.join(given)}: {len(given)} names, --tiktoken-num-special-tokens {count}; "
            f"each once, no more than that, and {', '.join(NEEDED)} among them"
        )
    return [*given, *(f"<SPECIAL_{number}>" for number in range(len(given), count))]


def _read_ranks(path: Path) -> _Ranks:
    content = path.read_bytes()
    try:
        found = _from_json(content) if content.lstrip()[:1] in (b"[", b"{") else _Ranks(_from_lines(content))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, binascii.Error) as error:
        raise DataError(f"--tokenizer-model {path}: not a file of tiktoken ranks ({error!r:.200})") from error
    tokens = found.tokens
    single = {token for token in tokens if len(token) == 1}
    if len(single) != 256 or len(set(tokens)) < len(tokens):
        raise DataError(
            f"--tokenizer-model {path}: {len(tokens)} tokens, {len(set(tokens))} of them different, {len(single)} of "
            "the 256 bytes; every token must be there once and every byte be a token"
        )
    return found


def _from_json(content: bytes) -> _Ranks:
    fields = json.loads(content)
    config: dict[str, object] = {}
    if isinstance(fields, dict):
        config, fields = fields["config"], fields["vocab"]
    pattern, special, size = (
        config.get(key) for key in ("pattern", "default_num_special_tokens", "default_vocab_size")
    )
    tokens = [base64.b64decode(entry["token_bytes"], validate=True) for entry in fields]
    if [entry["rank"] for entry in fields] != list(range(len(fields))):
        raise ValueError("the ranks must be 0, 1, 2, ... in order")
    return _Ranks(
        tokens,
        pattern if isinstance(pattern, str) else None,
        special if isinstance(special, int) else None,
        size if isinstance(size, int) else None,
    )


def _from_lines(content: bytes) -> list[bytes]:
    rows = [line.split() for line in content.splitlines() if line.strip()]
    tokens = {int(rank): base64.b64decode(token, validate=True) for token, rank in rows}
    if sorted(tokens) != list(range(len(rows))):
        raise ValueError("the ranks must be 0, 1, 2, ... each once")
    return [tokens[rank] for rank in range(len(rows))]
