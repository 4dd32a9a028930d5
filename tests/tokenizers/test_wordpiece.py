"""WordPiece. Reference: transformers' BertTokenizer written in Python, with the vocabulary of all-MiniLM-L6-v2."""

import pytest
from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

from megatron_parm.errors import DataError
from megatron_parm.tokenizers.wordpiece import WordPieceTokenizer
from tests.tokenizers.hard_text import hard_text

LETTERS = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nca\n##fe\n##f\u00e9\n##f\nx\n"


@pytest.mark.parametrize("lower_case", [True, False])
def test_ids_and_text_equal_an_independent_tokenizer(minilm, lower_case) -> None:
    ours = WordPieceTokenizer(minilm / "vocab.txt", lower_case)
    judge = BertTokenizerLegacy(str(minilm / "vocab.txt"), do_lower_case=lower_case)
    count = 0
    for text in hard_text(300, seed=1):
        ids = ours.encode(text)
        assert ids == judge.convert_tokens_to_ids(judge.tokenize(text)), text[:200]
        assert ours.decode(ids) == judge.decode(ids, clean_up_tokenization_spaces=False)
        count += len(ids)
    assert count > 20_000
    assert ours.encode_batch(["a b", "", "c"]) == [ours.encode("a b"), [], ours.encode("c")]


def test_control_tokens_have_the_ids_of_the_file(minilm) -> None:
    ours = WordPieceTokenizer(minilm / "vocab.txt", lower_case=True)
    assert (ours.pad, ours.unknown, ours.cls, ours.sep, ours.mask) == (0, 100, 101, 102, 103)
    assert ours.encode("say [SEP] or [MASK]") == ours.encode("say [ SEP ] or [ MASK ]")  # text is never a control id
    assert not set(ours.special_tokens.values()) & set(ours.encode("[CLS] [SEP] [PAD] [EOS]"))


def test_the_vocabulary_grows_as_megatrons_does(minilm) -> None:
    ours = WordPieceTokenizer(minilm / "vocab.txt", True, extra_ids=3)
    assert ours.vocab_size == 30522 + 2 + 3
    assert ours.pieces[30522:] == ("[BOS]", "[EOS]", "<extra_id_0>", "<extra_id_1>", "<extra_id_2>")
    assert (ours.bos, ours.eod, ours.special_tokens["<extra_id_2>"]) == (30522, 30523, 30526)
    assert ours.decode([ours.eod, 30526, 40000]) == "[EOS] <extra_id_2>"


def test_accents_go_only_in_lower_case_and_no_letter_is_dropped(tmp_path) -> None:  # FC-09
    (tmp_path / "vocab.txt").write_text(LETTERS, encoding="utf-8")
    lower, cased = (WordPieceTokenizer(tmp_path / "vocab.txt", lower) for lower in (True, False))
    assert lower.decode(lower.encode("Caf\u00e9")) == "cafe"
    assert cased.decode(cased.encode("caf\u00e9")) == "caf\u00e9"
    assert lower.continues_word(6) and not lower.continues_word(5)
    assert lower.encode("\ud83d x") == [9]  # a lone surrogate is U+FFFD, which BERT's cleaning takes out
    assert lower.encode("q") == [lower.unknown]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[PAD]\n[UNK]\na\n", r"has no \[CLS\] and no \[SEP\] and no \[MASK\]"),  # FC-05
        (LETTERS + "x\n", "'x' stands there twice"),
        ("", r"has no \[PAD\]"),
    ],
)
def test_another_file_is_named(tmp_path, text, message) -> None:
    (tmp_path / "vocab.txt").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=rf"--vocab-file .*vocab.txt: .*{message}"):
        WordPieceTokenizer(tmp_path / "vocab.txt", lower_case=True)


def test_a_file_that_is_no_text_is_named(tmp_path) -> None:
    (tmp_path / "vocab.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="not text in UTF-8"):
        WordPieceTokenizer(tmp_path / "vocab.txt", lower_case=True)
