"""Ranks of tiktoken. Reference: tiktoken itself, on Mistral's tekken.json, on GPT-2's ranks and on small files."""

import base64
import json

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from tiktoken.load import data_gym_to_mergeable_bpe_ranks

from megatron_parm.errors import ConfigError, DataError
from megatron_parm.tokenizers.tiktoken_ranks import PATTERNS, TikTokenizer
from tests.tokenizers.hard_text import hard_text

BYTES = [bytes([number]) for number in range(256)]
SMALL = [*BYTES, b"aa", b"ab", b"aab", b"aaa", b" a", b"\xc3\xa9", b"abab", b" ab", b"aaaa"]


def entries(tokens):
    return [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(tokens)
    ]


def judge_of(tokens, pattern, shift):
    ranks = {token: rank + shift for rank, token in enumerate(tokens)}
    return tiktoken.Encoding("judge", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})


def test_ids_and_text_equal_tiktoken_on_a_real_vocabulary(mistral_models) -> None:
    path = mistral_models / "tekken_240911.json"
    ours = TikTokenizer(path)
    fields = json.loads(path.read_text(encoding="utf-8"))
    tokens = [base64.b64decode(entry["token_bytes"]) for entry in fields["vocab"]][: 131072 - 1000]
    judge = judge_of(tokens, fields["config"]["pattern"], 1000)
    assert (ours.vocab_size, ours.eod, ours.bos) == (131072, 2, 1)
    assert fields["config"]["pattern"] == PATTERNS["v2"]
    count = 0
    for text in hard_text(300, seed=2):
        ids = ours.encode(text)
        assert ids == judge.encode_ordinary(text), text[:200]
        assert ours.decode(ids) == text
        count += len(ids)
    assert count > 20_000


@pytest.mark.parametrize("form", ["lines", "list", "tekken"])
@pytest.mark.parametrize("pattern", ["v1", "v2"])
def test_every_form_of_file_equals_tiktoken_for_any_text(tmp_path, form, pattern) -> None:
    path = tmp_path / "ranks"
    if form == "lines":
        path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(SMALL)))
    else:
        path.write_text(json.dumps(entries(SMALL) if form == "list" else {"config": {}, "vocab": entries(SMALL)}))
    ours, judge = TikTokenizer(path, pattern, num_special_tokens=5), judge_of(SMALL, PATTERNS[pattern], 5)

    @given(st.text(st.sampled_from("ab \u00e9\n.1\x00"), max_size=30) | st.text(max_size=30))
    def check(text: str) -> None:
        assert ours.encode(text) == judge.encode_ordinary(text)
        assert ours.decode(ours.encode(text)) == text

    check()
    assert ours.vocab_size == len(SMALL) + 5
    assert list(ours.special_tokens) == ["<unk>", "<s>", "</s>", "<SPECIAL_3>", "<SPECIAL_4>"]
    assert ours.decode([2, *ours.encode("ab"), 9999]) == "</s>ab"
    assert ours.eod not in ours.encode("</s>")


def test_gpt2_as_lines_of_ranks(tmp_path, gpt2_files) -> None:
    encoder, merges = map(str, gpt2_files)
    ranks = data_gym_to_mergeable_bpe_ranks(vocab_bpe_file=merges, encoder_json_file=encoder)
    path = tmp_path / "gpt2.tiktoken"
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()))
    ours = TikTokenizer(path, "v1", num_special_tokens=3)
    judge = tiktoken.Encoding("gpt2", pat_str=PATTERNS["v1"], mergeable_ranks=ranks, special_tokens={})
    for text in hard_text(100, seed=3):
        assert ours.encode(text) == [number + 3 for number in judge.encode_ordinary(text)]


def test_sizes_and_names(tmp_path) -> None:
    path = tmp_path / "ranks.json"
    path.write_text(json.dumps(entries(SMALL)))
    cut = TikTokenizer(path, vocab_size=260, num_special_tokens=3, extra_ids=4)
    assert cut.vocab_size == 264 and cut.encode("aab") == [3 + 256, 3 + ord("b")]  # the ranks from 257 on are cut
    named = TikTokenizer(path, num_special_tokens=5, special_tokens=["<unk>", "<s>", "</s>", "<|im_start|>"])
    assert named.special_tokens["<|im_start|>"] == 3
    for flags, message in (
        ({"vocab_size": 900, "num_special_tokens": 5}, r"--vocab-size 900: .*use a size from 261 to 270"),
        ({"num_special_tokens": 5, "special_tokens": ["<s>", "</s>"]}, r"--tokenizer-special-tokens .*<unk>"),
        ({"num_special_tokens": 3, "special_tokens": ["<unk>", "<s>", "</s>", "x"]}, "4 names"),
    ):
        with pytest.raises(ConfigError, match=message):
            TikTokenizer(path, **flags)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"{}",
        b"[1, 2]",
        b"not ranks at all",
        b"AA== 0\nAQ== 2\n",
        b"A!== 0\n",
        json.dumps(entries(SMALL[:200])).encode(),
        json.dumps(entries([*BYTES, b"a"])).encode(),
        json.dumps({"config": [], "vocab": entries(SMALL)}).encode(),
    ],
)
def test_another_file_is_named(tmp_path, content) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(DataError, match=r"--tokenizer-model .*x: "):
        TikTokenizer(tmp_path / "x")
