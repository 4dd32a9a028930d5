"""From flags to a tokenizer. Reference: padded vocabulary = ceil(V / (divisor * tp)) * divisor * tp (Megatron)."""

import base64
import json

import pytest
from tokenizers import pre_tokenizers

from megatron_parm.errors import ConfigError
from megatron_parm.tokenizers.build import TOKENIZER_TYPES, build_tokenizer, padded_vocab_size


@pytest.mark.parametrize(
    ("size", "divisor", "tp", "padded"),
    [(50257, 128, 1, 50304), (50257, 128, 8, 51200), (128, 128, 1, 128), (1, 1, 3, 3), (129, 64, 2, 256)],
)
def test_padded_vocabulary(size, divisor, tp, padded) -> None:
    assert padded_vocab_size(size, divisor, tp) == padded


def test_the_null_tokenizer_and_gpt2(gpt2_files) -> None:
    assert build_tokenizer("NullTokenizer", vocab_size=7).eod == 7
    gpt2 = build_tokenizer("GPT2BPETokenizer", vocab_file=str(gpt2_files[0]), merge_file=str(gpt2_files[1]))
    assert gpt2.eod == 50256


def test_every_type_is_built_and_offers_what_all_do(tmp_path, minilm, mistral_models) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    (tmp_path / "vocab.json").write_text(json.dumps({letter: number for number, letter in enumerate(letters)}))
    (tmp_path / "merges.txt").write_text("")
    ranks = "".join(f"{base64.b64encode(bytes([rank])).decode()} {rank}\n" for rank in range(256))
    (tmp_path / "ranks").write_text(ranks)
    files = {
        "GPT2BPETokenizer": {"vocab_file": tmp_path / "vocab.json", "merge_file": tmp_path / "merges.txt"},
        "BertWordPieceLowerCase": {"vocab_file": minilm / "vocab.txt"},
        "BertWordPieceCase": {"vocab_file": minilm / "vocab.txt"},
        "HuggingFaceTokenizer": {"tokenizer_model": minilm},
        "SFTTokenizer": {"tokenizer_model": minilm},
        "TikTokenizer": {"tokenizer_model": tmp_path / "ranks"},
        "NullTokenizer": {"vocab_size": 40},
    }
    model = {"tokenizer_model": mistral_models / "tokenizer.model.v1"}
    for kind in TOKENIZER_TYPES:
        plain = build_tokenizer(kind, **files.get(kind, model))
        extra = build_tokenizer(kind, **files.get(kind, model), vocab_extra_ids=5)
        assert extra.vocab_size == plain.vocab_size + 5
        ids = plain.encode("12 34")
        assert plain.encode_batch(["12 34"]) == [ids] and "34" in plain.decode(ids)
        assert all(0 <= number < plain.vocab_size for number in [*ids, *plain.special_tokens.values()])
        added = {"Llama2Tokenizer": 1, "HuggingFaceTokenizer": 2, "SFTTokenizer": 2}.get(kind, 0)  # <s>; [CLS], [SEP]
        part = plain.encode_part("12 34")
        assert len(ids) == len(part) + added and part == (ids[1 : 1 + len(part)] if added else ids)
        assert plain.unknown is None or plain.unknown in range(plain.vocab_size)


@pytest.mark.parametrize(
    ("kind", "flags", "message"),
    [
        ("GPT2BPETokenizer", {}, "--vocab-file"),
        ("GPT2BPETokenizer", {"vocab_file": "/no/such.json"}, r"--vocab-file /no/such.json.*does not exist"),
        ("GPT2BPETokenizer", {"vocab_file": "/"}, "--vocab-file /.*is a folder"),
        ("GPT2BPETokenizer", {"vocab_file": __file__, "merge_file": "/no/m.txt"}, "--merge-file /no/m.txt"),
        ("SentencePieceTokenizer", {}, "--tokenizer-model"),
        ("GPTSentencePieceTokenizer", {"tokenizer_model": "/no/m.model"}, "--tokenizer-model /no/m.model"),
        ("BertWordPieceCase", {}, "--vocab-file"),
        ("Llama2Tokenizer", {}, "--tokenizer-model"),
        ("HuggingFaceTokenizer", {}, "--tokenizer-model FOLDER"),
        ("HuggingFaceTokenizer", {"tokenizer_model": "/no/such"}, "--tokenizer-model /no/such: no tokenizer.json"),
        ("TikTokenizer", {"tokenizer_model": "/no/ranks"}, "--tokenizer-model /no/ranks.*does not exist"),
        ("NullTokenizer", {}, "--vocab-size"),
        ("NullTokenizer", {"vocab_size": 0}, "--vocab-size"),
        ("GPT2Tokenizer", {}, "GPT2Tokenizer is not known; use one of GPT2BPETokenizer"),
    ],
)
def test_what_is_missing_is_named(kind, flags, message) -> None:
    with pytest.raises(ConfigError, match=message):
        build_tokenizer(kind, **flags)
