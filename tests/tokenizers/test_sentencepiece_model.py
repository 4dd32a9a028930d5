"""SentencePiece models. Reference: the sentencepiece library itself, on models trained here."""

import io
from pydoc_data.topics import topics

import pytest
import sentencepiece

from megatron_parm.errors import ConfigError, DataError
from megatron_parm.tokenizers.sentencepiece_model import SentencePieceTokenizer
from tests.tokenizers.hard_text import hard_text


def train(path, **options):
    model = io.BytesIO()
    lines = [line for name in sorted(topics)[:8] for line in topics[name].split("\n") if line.strip()]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=400, minloglevel=2, byte_fallback=True, **options
    )
    path.write_bytes(model.getvalue())
    return path


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "text.model"
    return train(path, normalization_rule_name="identity", remove_extra_whitespaces=False)


def test_ids_are_the_models_own(model_file) -> None:
    ours, judge = SentencePieceTokenizer(model_file), sentencepiece.SentencePieceProcessor(model_file=str(model_file))
    text = "The statement is executed, then the suite."
    assert ours.encode(text) == judge.encode(text) == ours.encode_batch([text, "x"])[0]
    assert ours.vocab_size == 400 and ours.eod == judge.eos_id() == judge.piece_to_id("</s>")


@pytest.mark.parametrize("name", ["tokenizer.model.v1", "mistral_instruct_tokenizer_241114.model.v7"])
def test_ids_and_text_of_a_real_model(mistral_models, name) -> None:
    path = mistral_models / name
    judge = sentencepiece.SentencePieceProcessor(model_file=str(path))
    ours, llama = SentencePieceTokenizer(path), SentencePieceTokenizer(path, adds_begin=True)
    count = 0
    for text in hard_text(200, seed=6):
        ids = judge.encode(text)
        assert ours.encode(text) == ids == ours.encode_batch([text])[0]
        assert llama.encode(text) == [judge.bos_id(), *ids] == llama.encode_batch([text])[0]
        assert ours.decode(ids) == llama.decode([1, *ids]) == judge.decode(ids)
        count += len(ids)
    assert count > 20_000
    assert ours.vocab_size == judge.vocab_size() and ours.eod == judge.eos_id() == 2
    assert ours.special_tokens["</s>"] == 2 and ours.unknown == judge.unk_id()
    assert SentencePieceTokenizer(path, extra_ids=7).vocab_size == judge.vocab_size() + 7


def test_a_model_without_a_begin_cannot_be_llamas(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"Llama2Tokenizer .*bos_id -1"):
        SentencePieceTokenizer(train(tmp_path / "no_bos.model", bos_id=-1), adds_begin=True)


@pytest.mark.parametrize("text", ["a\n\nb  c", "say </s> twice", "Caf\u00e9", "  two"])
def test_text_survives_an_identity_model(model_file, text) -> None:  # FC-09
    ours = SentencePieceTokenizer(model_file)
    assert ours.decode(ours.encode(text)) == text
    assert ours.eod not in ours.encode(text)


def test_a_lone_surrogate_becomes_the_replacement_character(model_file) -> None:  # FC-09
    ours = SentencePieceTokenizer(model_file)
    assert ours.decode(ours.encode("\ud83d x")) == "\ufffd x"
    assert ours.encode_batch(["\ud83d x"]) == [ours.encode("\ud83d x")]


def test_padding_ids_decode_to_nothing(model_file) -> None:
    ours = SentencePieceTokenizer(model_file)
    assert ours.decode([*ours.encode("ab"), 400, 511]) == "ab"


def test_a_model_without_end_of_sentence_has_no_eod(tmp_path) -> None:  # FC-05
    tokenizer = SentencePieceTokenizer(train(tmp_path / "no_eos.model", eos_id=-1))
    assert tokenizer.encode("a")
    with pytest.raises(ConfigError, match=r"no_eos.model.*</s>"):
        _ = tokenizer.eod


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x00" * 64])
def test_another_file_is_named(tmp_path, content) -> None:
    (tmp_path / "x.model").write_bytes(content)
    with pytest.raises(DataError, match=r"--tokenizer-model .*x.model"):
        SentencePieceTokenizer(tmp_path / "x.model")
