"""From data flags to the datasets of a BERT. References: the sentence map and the masking on their own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_parm.data.bert_build import BertDataRules, build_bert_datasets
from megatron_parm.data.bert_masking import MaskingRules, make_bert_sample
from megatron_parm.data.build import GPTDataRules, GPTDatasets
from megatron_parm.data.gpt_dataset import DocumentRules
from megatron_parm.data.sentence_map import SentenceRules, build_sentence_map, usable_documents
from megatron_parm.errors import ConfigError, DataError
from tests.data.bert_texts import VOCABULARY, random_sentences, write_sentences

DOCUMENTS = random_sentences(100)


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    return write_sentences(tmp_path / "text", DOCUMENTS)


def _build(path: list[str], requests: tuple[int | None, ...], split: str = "80,10,10", **more: Any) -> GPTDatasets:
    rules = GPTDataRules(32, 1234, 60, DocumentRules())
    bert = BertDataRules(**({"mask_probability": 0.15, "short_probability": 0.1, "has_two_segments": True} | more))
    return build_bert_datasets(path, requests, rules, bert, VOCABULARY, split)


def test_samples_are_those_of_the_map_masked_by_their_number(corpus: str) -> None:
    """The second split begins at document 80; the seed of sample i is 1234 + i."""
    built = _build([corpus], (200, 30, 0))
    assert built.test is None
    lengths = np.array([len(sentence) for text in DOCUMENTS for sentence in text], dtype=np.int32)
    index = np.cumsum([0, *(len(text) for text in DOCUMENTS)])
    sentences = [sentence for text in DOCUMENTS for sentence in text]
    rules = SentenceRules(29, 0.1, 2)
    for dataset, part, request in ((built.train, index[:81], 200), (built.valid, index[80:91], 30)):
        assert dataset is not None
        rows = build_sentence_map(lengths, usable_documents(lengths, part, rules), rules, request, 1234)
        assert len(dataset) == len(rows) >= request
        for number in (0, 7, len(rows) - 1):
            first, last, room = rows[number].tolist()
            random = np.random.RandomState(1234 + number)
            wanted = make_bert_sample(sentences[first:last], room, MaskingRules(32, 0.15, True), VOCABULARY, random)
            found: Any = dataset[number]
            assert {name: column.tolist() for name, column in found.items()} == {
                name: column.tolist()
                for name, column in wanted.items()  # type: ignore[attr-defined]
            }
        with pytest.raises(IndexError, match="sample"):
            dataset[len(rows)]


def test_the_split_is_of_documents_and_is_told(corpus: str) -> None:
    first, second = map(str, _build([corpus], (200, 30, 0)).summaries)
    assert first.startswith(f"train: {corpus}: 80 documents") and "200 asked for" in first
    assert second.startswith(f"valid: {corpus}: 10 documents")


def test_a_cached_map_is_read_again(corpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before: Any = _build([corpus], (50, 0, 0)).train

    def unwanted(*_: Any) -> None:
        raise AssertionError("built again")

    monkeypatch.setattr("megatron_parm.data.bert_build.build_sentence_map", unwanted)
    again: Any = _build([corpus], (50, 0, 0)).train
    assert (before.rows == again.rows).all()
    with pytest.raises(AssertionError, match="built again"):
        _build([corpus], (50, 0, 0), short_probability=0.5)


def test_a_blend_takes_its_shares(corpus: str, tmp_path: Path) -> None:
    other = write_sentences(tmp_path / "other", random_sentences(50, seed=9))
    built: Any = _build(["0.25", corpus, "0.75", other], (80, 0, 0)).train
    assert len(built) == 80 and np.bincount(built.index.dataset).tolist() == [20, 60]


@pytest.mark.parametrize(
    ("documents", "split", "words"),
    [
        ([[[5, 7]]] * 20, "100,0,0", ("train split", "20 of one sentence", "--bert-no-binary-head")),
        ([[[5, 7]] * 3] * 18 + [[[5, 7]]] * 2, "90,10,0", ("valid split", "2 of one sentence")),
        ([[[5] * 513, [7]]] * 20, "100,0,0", ("train split", "20 with a sentence of more than 512")),
    ],
    ids=["one-sentence", "only-in-valid", "long-sentences"],
)
def test_a_split_without_a_usable_document_is_an_error_at_once(
    tmp_path: Path, documents: list[list[list[int]]], split: str, words: tuple[str, ...]
) -> None:
    """FC-02; in whichever split it is."""
    corpus = write_sentences(tmp_path / "bad", documents)
    with pytest.raises(DataError, match="gives no sample") as error:
        _build([corpus], (10, 10 if "valid" in words[0] else 0, 0), split)
    assert all(word in str(error.value) for word in words)


def test_documents_of_one_sentence_are_enough_without_the_head(tmp_path: Path) -> None:
    corpus = write_sentences(tmp_path / "one", [[[5, 7]]] * 20)
    built: Any = _build([corpus], (30, 0, 0), "100,0,0", has_two_segments=False).train
    assert len(built) == 40 and built[0]["text"][:4].tolist().count(3) == 1


def test_an_empty_split_is_named(corpus: str) -> None:
    with pytest.raises(ConfigError, match=r"the valid split of .* is empty"):
        _build([corpus], (10, 10, 0), "100,0,0")


def test_an_id_outside_the_vocabulary_is_found(tmp_path: Path) -> None:
    corpus = write_sentences(tmp_path / "wide", [[[5, 61], [7]]] * 20)
    with pytest.raises(DataError, match="token id 61"):
        _build([corpus], (10, 0, 0), "100,0,0")
