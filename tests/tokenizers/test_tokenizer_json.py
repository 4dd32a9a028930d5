"""tokenizer.json without transformers. Reference: transformers' AutoTokenizer on the same folder."""

import json
import shutil

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from megatron_parm.errors import ConfigError, DataError
from megatron_parm.tokenizers.tokenizer_json import HuggingFaceTokenizer
from tests.tokenizers.hard_text import hard_text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A byte-level tokenizer.json with an end of text, as GPT-2 and Llama have them."""
    path = tmp_path_factory.mktemp("hf")
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    engine = FastTokenizer(models.BPE(vocab=letters, merges=[]))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    engine.add_special_tokens(["<|end|>", "<|im_start|>"])
    engine.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|end|>"}}))
    return path


def test_ids_and_text_equal_transformers_with_the_files_own_template(minilm) -> None:
    ours, judge = HuggingFaceTokenizer(minilm), AutoTokenizer.from_pretrained(str(minilm), local_files_only=True)
    assert ours.vocab_size == len(judge) and ours.unknown == judge.unk_token_id
    for text in hard_text(60, seed=4):
        ids = ours.encode(text)
        assert ids == judge(text, truncation=False, padding=False).input_ids  # [CLS] ... [SEP], and never cut at 128
        assert ours.decode(ids) == judge.decode(ids, clean_up_tokenization_spaces=False)
    assert len(ours.encode("word " * 600)) == 602


def test_a_byte_level_file_gives_every_text_back(folder) -> None:
    ours, judge = HuggingFaceTokenizer(folder), PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    for text in hard_text(30, seed=5):
        ids = ours.encode(text)
        assert ids == judge(text).input_ids == ours.encode_batch([text, "x"])[0]
        assert ours.decode(ids) == text
    assert (ours.vocab_size, ours.eod) == (258, 256)
    assert ours.special_tokens == {"<|end|>": 256, "<|im_start|>": 257}
    assert ours.decode([*ours.encode("ab"), 258, 4000]) == "ab"


def test_the_text_of_a_control_token_is_plain_text(folder) -> None:  # FC-09
    ours = HuggingFaceTokenizer(folder)
    ids = ours.encode("say <|end|> twice")
    assert ours.eod not in ids and ours.decode(ids) == "say <|end|> twice"
    assert ours.decode(ours.encode("\ud83d x")) == "\ufffd x"


def test_the_file_itself_extra_ids_and_no_end(folder, tmp_path) -> None:
    shutil.copy(folder / "tokenizer.json", tmp_path / "tokenizer.json")
    ours = HuggingFaceTokenizer(tmp_path / "tokenizer.json", extra_ids=2)
    assert ours.vocab_size == 260 and ours.encode("ab") == HuggingFaceTokenizer(folder).encode("ab")
    with pytest.raises(ConfigError, match=r"no eos_token in tokenizer_config.json"):  # FC-05
        _ = ours.eod
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<|other|>"}')
    with pytest.raises(ConfigError, match=r"eos_token '<\|other\|>' is not in its vocabulary"):
        _ = HuggingFaceTokenizer(tmp_path).eod
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<|end|>"}')
    assert HuggingFaceTokenizer(tmp_path).eod == 256


def test_files_that_cannot_serve_are_named(folder, tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"--tokenizer-model .*: no tokenizer.json there"):
        HuggingFaceTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(DataError, match=r"tokenizer.json: not a tokenizer.json that can be read"):
        HuggingFaceTokenizer(tmp_path)
    shutil.copy(folder / "tokenizer.json", tmp_path / "tokenizer.json")
    for text, message in (("{", "not JSON"), ("[]", "must be a JSON object")):
        (tmp_path / "tokenizer_config.json").write_text(text)
        with pytest.raises(DataError, match=rf"tokenizer_config.json: {message}"):
            HuggingFaceTokenizer(tmp_path)
