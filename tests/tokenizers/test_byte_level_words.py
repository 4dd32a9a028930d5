"""Words that are remembered. Reference: the library's own encoding of the whole text."""

import sys

import pytest

from megatron_parm.tokenizers import byte_level_words
from megatron_parm.tokenizers.byte_level_words import ByteLevelWords
from megatron_parm.tokenizers.gpt2_bpe import GPT2BPETokenizer
from tests.tokenizers.hard_text import hard_text


@pytest.fixture(scope="module")
def tokenizer(gpt2_files):
    return GPT2BPETokenizer(*gpt2_files)


def test_hard_text_has_the_ids_of_the_library(tokenizer) -> None:
    texts = hard_text(800, seed=4)
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


def test_ascii_characters_and_pairs_have_the_ids_of_the_library(tokenizer) -> None:
    letters = list(map(chr, range(128)))
    pairs = "".join(first + second for first in letters for second in letters)
    texts = [pairs, *("".join(f"{mark}{letter} {mark}a{mark}" for mark in " \n'1x") for letter in letters)]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


def test_any_character_has_the_ids_of_the_library(tokenizer) -> None:
    """Among letters, numbers, marks and blanks: one character of seven, from all planes."""
    codes = [*range(0, 0xD800, 7), *range(0xE000, 0x10000, 7), *range(0x10000, sys.maxunicode, 427)]
    probes = [f"a{letter}1{letter} {letter}!" for letter in map(chr, codes)]
    texts = ["".join(probes[start : start + 300]) for start in range(0, len(probes), 300)]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


def words_of(cut):
    asked = []

    def encode_word(word):
        asked.append(word)
        return [len(word)]

    return ByteLevelWords(encode_word, cut), asked


def test_a_character_that_the_library_cuts_otherwise_is_left_to_it(tokenizer) -> None:
    """As a letter of a Unicode newer than the one of `regex` is."""
    words, _ = words_of(
        lambda text: text.replace("\u00e9", "1").split("1") if "\u00e9" in text else tokenizer._cut(text)
    )
    assert words.encode("caf\u00e9") is None
    assert words.encode("stra\u00dfe \u00fc") == [6, 2]


def test_a_word_is_asked_for_once_and_memory_is_bounded(monkeypatch) -> None:
    words, asked = words_of(list)
    assert words.encode("a b a b a") == [1, 2, 2, 2, 2] and asked == ["a", " b", " a"]
    monkeypatch.setattr(byte_level_words, "_MOST_WORDS", 4)
    assert words.encode("c d e f g") == [1, 2, 2, 2, 2] and len(words._ids) <= 4
    words.encode("w" * 100)
    words.encode("w" * 100)
    assert asked.count("w" * 100) == 2
