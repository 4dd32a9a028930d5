"""Text that already is token ids: numbers separated by blanks. Floor 2. Source: Megatron's NullTokenizer."""

from collections.abc import Sequence

from megatron_parm.errors import DataError


class NullTokenizer:
    """`"3 4"` is [3, 4]. Ids 0..numbers-1 are text; one more id, `numbers`, is the end of a document."""

    def __init__(self, numbers: int, extra_ids: int = 0) -> None:
        self.name = f"NullTokenizer (--vocab-size {numbers})"
        self._numbers = numbers
        self.vocab_size = numbers + 1 + extra_ids
        self.eod = numbers
        self.special_tokens: dict[str, int] = {}
        self.unknown: int | None = None

    def encode(self, text: str) -> list[int]:
        """The numbers in `text`. Raises DataError for anything else, and for a number outside the vocabulary."""
        return [self._number(word) for word in text.split()]

    def encode_part(self, text: str) -> list[int]:
        """As `encode`, which puts nothing around a text."""
        return self.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The numbers of several texts."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The numbers as text."""
        return " ".join(str(number) for number in ids)

    def _number(self, word: str) -> int:
        if not (word.isascii() and word.isdigit()):
            raise DataError(f"{word[:40]!r} is not a token id; {self.name} reads whole numbers separated by blanks")
        number = int(word[:20])
        if number >= self._numbers:
            raise DataError(f"token id {word[:20]} must be below --vocab-size {self._numbers} of the NullTokenizer")
        return number
