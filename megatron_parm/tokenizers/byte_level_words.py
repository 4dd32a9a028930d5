"""Byte-level BPE word by word, remembering the ids of every word. Floor 2.

GPT-2's rule first cuts a text into words, whose ids do not depend on their neighbours; text repeats its words, so most
are looked up. The cut is Python's: by an expression of ASCII classes, or by `regex`, whose classes of a character are
compared with those of the library the first time that it appears.
"""

import re
from collections.abc import Callable, Sequence
from itertools import chain

import regex

_ASCII_WORDS = re.compile(
    r"'(?:s|t|re|ve|m|ll|d)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+",
    re.ASCII,
)
_WORDS = regex.compile(r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
_MOST_WORDS = 1 << 18  # some 60 MB
_LONGEST_WORD = 64  # characters; longer ones hardly repeat


class ByteLevelWords:
    """encode_word: the ids of a text that is one word. cut: the words of a text, as the library cuts it.

    What the library cuts otherwise than `regex` (a character of a newer Unicode) is left to it: `encode` gives None.
    """

    def __init__(self, encode_word: Callable[[str], Sequence[int]], cut: Callable[[str], Sequence[str]]) -> None:
        self._ids = _Memory(encode_word)
        self._cut = cut
        self._known: set[str] = set()  # characters of which both say the same

    def encode(self, text: str) -> list[int] | None:
        """The ids of `text`, which holds no lone surrogate."""
        if text.isascii():
            words = _ASCII_WORDS.findall(text)
        else:
            new = set(text) - self._known
            if new and not all(map(self._is_known, new)):
                return None
            words = _WORDS.findall(text)
        return list(chain.from_iterable(map(self._ids.__getitem__, words)))

    def _is_known(self, character: str) -> bool:
        """Whether both cut the character alike, between letters, numbers, marks and blanks."""
        probe = f"a{character}a1{character}1!{character}! {character} "
        if _WORDS.findall(probe) != list(self._cut(probe)):
            return False
        self._known.add(character)
        return True


class _Memory(dict[str, tuple[int, ...]]):
    """Word -> ids, found when first asked for. It begins anew when it is full."""

    def __init__(self, encode_word: Callable[[str], Sequence[int]]) -> None:
        super().__init__()
        self._encode_word = encode_word

    def __missing__(self, word: str) -> tuple[int, ...]:
        ids = tuple(self._encode_word(word))
        if len(word) <= _LONGEST_WORD:
            if len(self) >= _MOST_WORDS:
                self.clear()
            self[word] = ids
        return ids
