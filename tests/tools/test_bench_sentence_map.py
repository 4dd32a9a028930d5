"""The benchmark of the sentence map runs and says what it measured."""

import re

import pytest

from tools.bench_sentence_map import corpus, main


def test_it_prints_one_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--sentences", "20000", "--repeats", "1", "--epochs", "2"]) == 0
    found = re.match(r"20000 sentences in (\d+) documents, 2 epochs: ([\d.]+) s of CPU", capsys.readouterr().out)
    assert found is not None and 900 < int(found[1]) < 1100


def test_its_corpus_is_whole() -> None:
    lengths, documents = corpus(5000)
    assert len(lengths) == documents[-1] == 5000 and (documents[1:] > documents[:-1]).all()


def test_a_size_that_cannot_be_is_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--sentences", "99"]) == 2
    assert "--sentences 99 must be at least 100" in capsys.readouterr().err
