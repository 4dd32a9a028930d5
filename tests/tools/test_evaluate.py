"""The evaluation tool. References: the library's scores of the same spans, texts cut by hand."""

import json
from pathlib import Path

import pytest

from megatron_parm.errors import DataError
from megatron_parm.tokenizers.null import NullTokenizer
from tests.harness.layouts import Layout
from tests.harness.pools import Pools
from tests.training.runs import MOE, flags, run_training, write_corpus
from tools import evaluate


@pytest.fixture(scope="module")
def trained(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two iterations."""
    root = tmp_path_factory.mktemp("trained")
    argv = flags(write_corpus(root / "numbers"), MOE, "--train-iters 2", "--save", str(root / "run"))
    (outcome,) = pools.run(Layout(1), run_training, argv)
    assert outcome.error is None
    return root / "run"


def test_a_text_has_loss_perplexity_and_bits(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("3 4 5 6 7 8 9 10 11 12")
    out = tmp_path / "figures.json"
    argv = ["--load", str(trained), "--text", str(tmp_path / "text.txt"), "--stride", "3", "--output", str(out)]
    assert evaluate.main(argv) == 0
    figures = json.loads(out.read_text())
    assert figures["tokens"] == 10 and 2.5 < figures["loss"] < 4.5
    bits = figures["loss"] * 10 / 0.6931471805599453 / len("3 4 5 6 7 8 9 10 11 12")
    assert figures["bits_per_byte"] == pytest.approx(bits, rel=1e-12)
    assert "perplexity" in capsys.readouterr().out


def test_last_words_are_counted(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of thirty texts that differ in the last word alone exactly one ends in the likeliest number (30 is no number)."""
    lines = [json.dumps({"text": f"3 4 {number}"}) for number in range(30)]
    (tmp_path / "words.jsonl").write_text("\n".join(lines))
    out = tmp_path / "figures.json"
    argv = ["--load", str(trained), "--last-words", str(tmp_path / "words.jsonl"), "--output", str(out)]
    assert evaluate.main(argv) == 0
    figures = json.loads(out.read_text())
    assert figures["texts"] == 30 and round(figures["accuracy"] * 30) in (0, 1)
    capsys.readouterr()


def test_texts_are_cut_before_the_last_word(tmp_path: Path) -> None:
    (tmp_path / "words.jsonl").write_text('{"text": "1 2 3 4 5 "}\n{"text": "7 8"}')
    spans = evaluate.read_last_words(tmp_path / "words.jsonl", NullTokenizer(30), 3)
    assert [(span.ids, span.first) for span in spans] == [((2, 3, 4, 5), 3), ((30, 7, 8), 2)]


@pytest.mark.parametrize("line", ['{"text": "one"}', "[1]", "{", '{"words": "1 2"}'])
def test_a_line_without_a_last_word_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "words.jsonl").write_text('{"text": "1 2"}\n' + line)
    with pytest.raises(DataError, match=r"words\.jsonl line 2"):
        evaluate.read_last_words(tmp_path / "words.jsonl", NullTokenizer(30), 3)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ("--text /no/such", "/no/such"),
        ("--text {text} --stride 9", "--stride 9"),
        ("--text {text} --seq-length 99", "--seq-length 99"),
        ("--text {text} --batch-size 0", "--batch-size 0"),
    ],
)
def test_what_cannot_work_is_a_message(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: str, told: str
) -> None:
    (tmp_path / "text.txt").write_text("1 2 3")
    words = argv.format(text=tmp_path / "text.txt").split()
    assert evaluate.main(["--load", str(trained), *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and told in captured.err
