"""Cuts text into sentences by rules on Unicode classes: no model, no download. Floor 4.

A sentence ends after a mark of Unicode's class Sentence_Terminal with the quotes and brackets that close behind it, if
blank space follows; after CJK full stops without any; and at a blank line. Not after an abbreviation, an initial, the
number of a list item or an ellipsis within a sentence, and not before a small letter, unless the whole text is in small
letters. The order of the characters never changes.
"""

from collections.abc import Iterator

import regex

from megatron_parm.data.abbreviations import LANGUAGES, Language
from megatron_parm.errors import ConfigError

_WIDE = "\u3002\uff01\uff1f\uff61\ufe12\ufe52\ufe56\ufe57"
_CLOSERS = r"""[\p{Pe}\p{Pf}\p{Pi}"'\uff02\uff07]"""
_MARKS = rf"[[\p{{Sentence_Terminal}}…‥]--[{_WIDE}\uff0e]]"
_BOUNDARY = regex.compile(
    rf"""
    (?P<wide> (?: [{_WIDE}] | \uff0e(?!\p{{Nd}}) )+ [.!?…]* ) (?P<wide_close> {_CLOSERS}*+ ) \s*+
  | (?<!{_MARKS}) (?P<stop> {_MARKS}++ ) (?P<close> {_CLOSERS}*+ (?: [\u00a0\u202f]» )? ) \s++ (?=\S)
  | \n [^\S\n]*+ \n \s*+
    """,
    regex.VERBOSE | regex.VERSION1,
)
_WORD_BEFORE = regex.compile(r"[\p{L}\p{M}\p{N}.\-'\u2019&]*$")
_NEXT_WORD = regex.compile(r"""[\p{Ps}\p{Pi}\p{Pf}"'\u00bf\u00a1*_\p{Pd}]*\s?(?P<word>[\p{L}\p{M}'\u2019]+|\p{Nd}+)""")
_INITIALS = regex.compile(r"(?:\p{Lu}\.-?)*\p{Lu}")
_ROMAN = regex.compile(r"[IVXLC]+")
_LONGEST_WORD = 40
_GOES_ON_AFTER_QUOTE = "\u3068\u3063\u3066\u3001\uff0c,"  # Japanese particles of quoting, and commas


class SentenceSplitter:
    """Cuts text of one language (`--lang`). With `keep_newlines` the blank space after a sentence stays with it."""

    def __init__(self, lang: str = "english", keep_newlines: bool = False) -> None:
        if lang not in LANGUAGES:
            raise ConfigError(
                f"--lang {lang}: no table of abbreviations for it; use one of {', '.join(LANGUAGES)} (the rules of "
                "Unicode hold for every language, so english serves where its abbreviations do no harm)"
            )
        self._language = LANGUAGES[lang]
        self._keeps_newlines = keep_newlines

    def split(self, text: str) -> list[str]:
        """The sentences of `text`, none of them blank. With `keep_newlines` they join to the text itself."""
        if self._keeps_newlines:
            pieces = list(_pieces(text, self._language))
            return _blank_ones_joined(pieces)
        return [sentence for piece in _pieces(text, self._language) if (sentence := piece.strip())]


def _pieces(text: str, language: Language) -> Iterator[str]:
    """`text` cut behind each boundary."""
    has_capitals = text != text.lower()
    start = 0
    for found in _BOUNDARY.finditer(text):
        if found["stop"] is not None:
            is_end = _ends(text, start, found, language, has_capitals)
        elif found["wide"] is not None:
            is_end = not (found["wide_close"] and text[found.end() : found.end() + 1] in tuple(_GOES_ON_AFTER_QUOTE))
        else:
            is_end = True
        if is_end and found.end() < len(text):
            yield text[start : found.end()]
            start = found.end()
    if start < len(text):
        yield text[start:]


def _ends(text: str, start: int, found: "regex.Match[str]", language: Language, has_capitals: bool) -> bool:
    """Whether the sentence that begins at `start` ends at a mark with blank space behind it."""
    if found.group().count("\n") > 1:  # a blank line
        return True
    stop = found["stop"]
    after = _NEXT_WORD.match(text, found.end())
    following = after["word"] if after is not None else ""
    is_small = following[:1].islower()
    if stop.endswith(".") and not found["close"]:
        before = found.start("stop")
        word = _WORD_BEFORE.search(text, max(start, before - _LONGEST_WORD), before)
        if stop == "." and word is not None and word.group():
            verdict = _ends_after(word.group(), word.start() == start, following, language)
            if verdict is not None:
                return verdict
        return not (is_small and has_capitals)
    goes_on = found["close"] or stop.endswith(("…", "‥", "."))
    return not (is_small and has_capitals and goes_on)


def _ends_after(word: str, is_first: bool, following: str, language: Language) -> bool | None:
    """Whether a full stop after `word` ends the sentence; None if the word does not say."""
    plain = word.lower().lstrip("'\u2019-.")
    opens = following.lower() in language.openers and not following[:1].islower()
    if plain in language.never_end:
        return False
    if plain in language.before_numbers and (following[:1].isdigit() or _ROMAN.fullmatch(following)):
        return False
    if plain in language.may_end:
        return opens
    if plain.isdigit():
        is_ordinal = language.has_ordinals and len(plain) <= 2 and not opens
        return False if (is_first and len(plain) <= 3) or is_ordinal else None
    if word != "I" and _INITIALS.fullmatch(word):
        return opens
    return None


def _blank_ones_joined(pieces: list[str]) -> list[str]:
    """The pieces, where one of nothing but blanks is part of its neighbour."""
    joined: list[str] = []
    for piece in pieces:
        if joined and (not piece.strip() or not joined[0].strip()):
            joined[-1] += piece
        else:
            joined.append(piece)
    return joined if "".join(joined).strip() else []
