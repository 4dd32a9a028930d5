"""GPT-2's BPE. Reference: tiktoken, an independent engine, on the same vocabulary; and texts that must come back."""

import json
import textwrap
from pydoc_data.topics import topics

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tiktoken.load import data_gym_to_mergeable_bpe_ranks

from megatron_parm.errors import ConfigError, DataError
from megatron_parm.tokenizers.gpt2_bpe import GPT2BPETokenizer
from tests.tokenizers.hard_text import hard_text

PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


@pytest.fixture(scope="session")
def ours(gpt2_files):
    return GPT2BPETokenizer(*gpt2_files)


@pytest.fixture(scope="session")
def judge(gpt2_files):
    encoder, merges = map(str, gpt2_files)
    ranks = data_gym_to_mergeable_bpe_ranks(vocab_bpe_file=merges, encoder_json_file=encoder)
    return tiktoken.Encoding("gpt2", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50256})


def test_ids_equal_tiktoken_on_real_text(ours, judge) -> None:
    text = "\n".join(topics[name] for name in sorted(topics)[:40])
    assert ours.encode(text) == judge.encode(text, disallowed_special=())
    assert ours.vocab_size == 50257 and ours.eod == 50256


def test_ids_equal_tiktoken_on_hard_text(ours, judge) -> None:
    count = 0
    for text in hard_text(400, seed=0):
        ids = ours.encode(text)
        assert ids == judge.encode(text, disallowed_special=()), text[:200]
        assert ours.decode(ids) == judge.decode(ids) == text
        count += len(ids)
    assert count > 20_000
    for text in ("\ud83d x", "a\udc00", "\ud800\ud800", "\x00\udfff\x00"):  # lone surrogates
        assert ours.encode(text) == judge.encode(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


def test_ids_equal_tiktoken_and_text_comes_back_for_any_text(ours, judge) -> None:
    @settings(max_examples=200, derandomize=True, deadline=None)
    @given(st.text(st.characters(exclude_categories=("Cs", "Cn")), max_size=60))
    def check(text: str) -> None:
        ids = ours.encode(text)
        assert ours.decode(ids) == text
        assert ids == judge.encode(text, disallowed_special=())
        assert ours.encode_batch([text, text]) == [ids, ids]

    check()


@pytest.mark.parametrize("text", ["a\n\nb  c", "say <|endoftext|> twice", "Caf\u00e9", "<|endoftext|>", " \t\r\n "])
def test_text_survives_and_never_holds_the_end_of_document(ours, text) -> None:  # FC-09
    ids = ours.encode(text)
    assert ours.decode(ids) == text
    assert ours.eod not in ids
    assert ours.encode_batch([text]) == [ids]


def test_a_lone_surrogate_becomes_the_replacement_character(ours) -> None:  # FC-09
    text = json.loads('"\\ud83d x"')
    assert ours.decode(ours.encode(text)) == "\ufffd x"
    assert ours.encode_batch([text]) == [ours.encode(text)]
    assert ours.decode(ours.encode(json.loads('"\\ud83d\\ude00"'))) == "\U0001f600"


def test_padding_ids_decode_to_nothing(ours) -> None:
    assert ours.decode([*ours.encode("ab"), 50300]) == "ab"


def write(folder, vocabulary, merges: str):
    (folder / "vocab.json").write_text(vocabulary if isinstance(vocabulary, str) else json.dumps(vocabulary))
    (folder / "merges.txt").write_text(textwrap.dedent(merges))
    return folder / "vocab.json", folder / "merges.txt"


def test_a_vocabulary_without_end_of_text_has_no_eod(tmp_path) -> None:  # FC-05
    tokenizer = GPT2BPETokenizer(*write(tmp_path, {"a": 0, "b": 1, "ab": 2}, "#version: 0.2\na b\n"))
    assert tokenizer.encode("abba") == [2, 1, 0]
    with pytest.raises(ConfigError, match=r"GPT2BPETokenizer .*vocab.json.*<\|endoftext\|>"):
        _ = tokenizer.eod


@pytest.mark.parametrize(
    ("vocabulary", "merges", "message"),
    [
        ("{broken", "", "--vocab-file .*not JSON"),
        ("[1, 2]", "", "--vocab-file .*object"),
        ({"a": "x"}, "", "--vocab-file .*object"),
        ({"a": 0, "b": 5}, "", r"--vocab-file .*0\.\.1"),
        ({"a": 0, "b": 0}, "", r"--vocab-file .*0\.\.1"),
        ({"a": 0, "b": 1}, "a b\n", "--merge-file .*line 1: 'ab' is not in --vocab-file"),
        ({"a": 0, "b": 1}, "#version: 0.2\na b c\n", "--merge-file .*line 2: two pieces"),
    ],
)
def test_unsuitable_files_are_named(tmp_path, vocabulary, merges, message) -> None:
    with pytest.raises(DataError, match=message):
        GPT2BPETokenizer(*write(tmp_path, vocabulary, merges))
