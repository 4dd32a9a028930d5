"""What every tokenizer offers, and the one repair that text needs before any of them. Floor 2."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from megatron_parm.errors import ConfigError

_SURROGATE = re.compile("[\ud800-\udfff]")


class Tokenizer(Protocol):
    """Text to token ids and back. Text never becomes a control id: only `eod` itself marks the end of a document."""

    @property
    def name(self) -> str:
        """The tokenizer in the user's words: its type and file."""

    @property
    def vocab_size(self) -> int:
        """Number of ids with the extra ones (--vocab-extra-ids), before any padding."""

    @property
    def eod(self) -> int:
        """The end-of-document id. Raises ConfigError naming the tokenizer and the missing token if there is none."""

    @property
    def unknown(self) -> int | None:
        """The id that stands for what the vocabulary lacks; None if it lacks nothing."""

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """The control tokens by name. Templates put them into a text by id; text itself never becomes one."""

    def encode(self, text: str) -> list[int]:
        """The ids of one text, without an end-of-document id."""

    def encode_part(self, text: str) -> list[int]:
        """The ids of a part of a text: nothing that the tokenizer puts around a whole one."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of several texts, each as `encode` gives them."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`."""


def replace_lone_surrogates(text: str) -> str:
    """`text` with every lone surrogate, which no encoding of Unicode can hold, replaced by U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return _SURROGATE.sub("\ufffd", text)
    return text


def extra_id_names(count: int) -> list[str]:
    """The names of the ids that --vocab-extra-ids adds."""
    return [f"<extra_id_{number}>" for number in range(count)]


def require_file(path: str | Path | None, flag: str, tokenizer_type: str) -> Path:
    """The path behind `flag`, or a ConfigError that names the flag and the path when it is not given or no file."""
    if path is None or not str(path):
        raise ConfigError(f"--tokenizer-type {tokenizer_type} needs {flag} FILE; it is not given")
    found = Path(path)
    if not found.is_file():
        reason = "is a folder" if found.is_dir() else "does not exist"
        raise ConfigError(f"{flag} {path}: this file {reason}; give the file that belongs to {tokenizer_type}")
    return found
