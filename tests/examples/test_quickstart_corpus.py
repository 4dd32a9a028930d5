"""The quickstart's corpus. Reference: a small library of sources written here, and our own GPT-2 tokenizer."""

import json
import textwrap

import pytest

from examples import quickstart_corpus
from examples.quickstart_corpus import docstrings, main
from megatron_parm.tokenizers.gpt2_bpe import GPT2BPETokenizer
from megatron_parm.tokenizers.wordpiece import WordPieceTokenizer

LONG = "a sentence long enough to be kept as a document of the corpus " * 2


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A standard library of a few files."""
    folder = tmp_path / "lib"
    for name, source in {
        "b.py": f'"""{LONG} b."""\ndef f():\n    """{LONG} f."""\nraise SystemExit  # never run\n',
        "a.py": f'class A:\n    """{LONG} A."""\n    def g(self):\n        """short"""\n',
        "broken.py": "def (:\n",
        "test/t.py": f'"""{LONG} t."""\n',
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(source))
    monkeypatch.setattr(quickstart_corpus.sysconfig, "get_paths", lambda: {"stdlib": str(folder)})
    monkeypatch.setattr(quickstart_corpus, "topics", {"x": f"The x\n*****\n\n   {LONG} x.\n"})
    return folder


def test_docstrings_are_read_without_running_anything(library) -> None:
    assert list(docstrings(library)) == [f"{LONG} A.", f"{LONG} b.\n\n{LONG} f."]


def test_the_files_are_the_same_every_time_and_made_once(library, tmp_path, capsys) -> None:
    names = ["corpus.jsonl", "vocab.json", "merges.txt"]
    for folder in ("one", "two"):
        assert main(["--output-dir", str(tmp_path / folder), "--vocab-size", "300"]) == 0
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    texts = [json.loads(line)["text"] for line in (tmp_path / "one" / "corpus.jsonl").read_text().splitlines()]
    assert sorted(texts) == sorted([f"{LONG} A.", f"{LONG} b.\n\n{LONG} f.", f"{LONG} x."])
    before = (tmp_path / "one" / "vocab.json").stat().st_mtime_ns
    assert main(["--output-dir", str(tmp_path / "one"), "--vocab-size", "300"]) == 0
    assert "are there already" in capsys.readouterr().out
    assert (tmp_path / "one" / "vocab.json").stat().st_mtime_ns == before


def test_the_tokenizer_is_gpt2_shaped(library, tmp_path) -> None:
    assert main(["--output-dir", str(tmp_path), "--vocab-size", "290"]) == 0
    tokenizer = GPT2BPETokenizer(tmp_path / "vocab.json", tmp_path / "merges.txt")
    assert (tokenizer.vocab_size, tokenizer.eod) == (290, 0)
    text = "Caf\u00e9\n\n  \U0001f600 a sentence"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_vocabulary_too_small_for_bytes_is_refused(tmp_path, capsys) -> None:
    assert main(["--output-dir", str(tmp_path), "--vocab-size", "256"]) == 2
    assert "at least 257" in capsys.readouterr().err


def test_word_pieces_are_those_of_a_bert_and_the_same_every_time(library, tmp_path) -> None:
    for folder in ("one", "two"):
        assert main(["--output-dir", str(tmp_path / folder), "--vocab-size", "300", "--word-pieces"]) == 0
    first, second = ((tmp_path / folder / "vocab.txt").read_bytes() for folder in ("one", "two"))
    assert first == second and not (tmp_path / "one" / "vocab.json").exists()
    tokenizer = WordPieceTokenizer(tmp_path / "one" / "vocab.txt", lower_case=True)
    assert (tokenizer.pad, tokenizer.cls, tokenizer.sep, tokenizer.mask) == (0, 2, 3, 4)
    assert tokenizer.decode(tokenizer.encode("A SENTENCE of the corpus")) == "a sentence of the corpus"
