"""Preprocessing of other kinds of files, of bad luck, and of much text. Reference: the same text in a plain file."""

import gzip
import json
import os
import signal
from pathlib import Path

import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from megatron_parm.data.indexed_dataset import IndexedDataset
from megatron_parm.errors import DataError
from tools.preprocess_data import main

NULL = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "100")
TEXTS = [f"{number % 100} {number % 7}" for number in range(500)]
LINES = "".join(json.dumps({"text": text, "other": text[:1]}) + "\n" for text in TEXTS).encode()


def run(source: Path, prefix: Path, *flags: str) -> int:
    return main(["--input", str(source), "--output-prefix", str(prefix), *NULL, *flags])


def content(prefix: Path, key: str = "text") -> bytes:
    return b"".join(Path(f"{prefix}_{key}_document{suffix}").read_bytes() for suffix in (".bin", ".idx"))


@pytest.mark.parametrize("workers", ["1", "2"])
def test_every_kind_of_file_gives_the_same_bytes(tmp_path, workers) -> None:
    (tmp_path / "x.jsonl").write_bytes(LINES)
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(LINES))
    (tmp_path / "x.zst").write_bytes(zstandard.compress(LINES))
    (tmp_path / "x.txt").write_text("\n\n".join(TEXTS))
    (tmp_path / "x.txt.gz").write_bytes(gzip.compress("\n\n".join(TEXTS).encode()))
    parquet.write_table(pyarrow.table({"n": list(range(500)), "text": TEXTS}), tmp_path / "x.parquet")
    assert run(tmp_path / "x.jsonl", tmp_path / "plain", "--append-eod", "--workers", workers) == 0
    for name in ("x.jsonl.gz", "x.zst", "x.txt", "x.txt.gz", "x.parquet"):
        assert run(tmp_path / name, tmp_path / "other", "--append-eod", "--workers", workers) == 0
        assert content(tmp_path / "other") == content(tmp_path / "plain"), name


def test_a_damaged_archive_stops_and_leaves_nothing(tmp_path, capsys) -> None:
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(LINES * 20)[:-40])
    assert run(tmp_path / "x.jsonl.gz", tmp_path / "c") == 2
    assert "x.jsonl.gz: compressed data that is cut or damaged" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl.gz"]


def test_what_is_too_long_is_counted_or_stops(tmp_path, capsys) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "1"}\n' + json.dumps({"text": "2 " * 9000}) + '\n{"text": "3"}\n')
    flags = ("--max-document-mib", "0.01")
    assert run(tmp_path / "x.jsonl", tmp_path / "c", *flags) == 2
    assert (
        "x.jsonl line 2: too long: 0.0172 MiB, more than the 0.01 MiB of --max-document-mib" in capsys.readouterr().err
    )
    assert run(tmp_path / "x.jsonl", tmp_path / "c", *flags, "--on-error", "skip") == 0
    assert "skipped 1, 1 of them too long; the first: " in capsys.readouterr().out
    assert IndexedDataset(tmp_path / "c_text_document").num_documents == 2
    assert run(tmp_path / "x.jsonl", tmp_path / "c", "--max-document-mib", "0") == 2


def test_the_summary_tells_unknown_tokens_and_long_sentences(tmp_path, capsys) -> None:
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n.\n")
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": "a a q. A q."}) + "\n" + json.dumps({"text": "a " * 513}))
    flags = ("--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", str(tmp_path / "vocab.txt"))
    assert (
        main(["--input", f"{tmp_path}/x.jsonl", "--output-prefix", f"{tmp_path}/c", *flags, "--split-sentences"]) == 0
    )
    said = capsys.readouterr().out
    assert "2 documents of 3 sentences, 520 tokens" in said
    assert "unknown: 2 tokens, 0.38 %" in said
    assert "too long for BERT: 1 documents with a sentence of more than 512 tokens" in said


def _die_at(call: int, source: Path, prefix: Path) -> None:
    """In a process of its own: preprocess, and be killed at the given call that renames, removes or syncs a file."""
    seen = 0

    def deadly(real):
        def wrapped(*args, **kwargs):
            nonlocal seen
            seen += 1
            if seen == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return wrapped

    Path.replace, Path.unlink, os.fsync = deadly(Path.replace), deadly(Path.unlink), deadly(os.fsync)
    run(source, prefix, "--json-keys", "text", "other", "--workers", "2")


@pytest.mark.parametrize("has_older_files", [False, True])
def test_a_kill_at_any_moment_of_the_end_leaves_no_half_file_that_opens(tmp_path, has_older_files, capsys) -> None:
    """And the next run removes what the killed one left."""
    source = tmp_path / "x.jsonl"
    source.write_bytes(LINES)
    assert run(source, tmp_path / "whole", "--json-keys", "text", "other") == 0
    whole = {key: content(tmp_path / "whole", key) for key in ("text", "other")}
    (tmp_path / "old.jsonl").write_text('{"text": "5", "other": "6"}\n')
    was_killed = True
    call = 0
    while was_killed:
        call += 1
        prefix = tmp_path / f"c{call}"
        if has_older_files:
            run(tmp_path / "old.jsonl", prefix, "--json-keys", "text", "other")
            old = {key: content(prefix, key) for key in whole}
        child = os.fork()
        if child == 0:
            _die_at(call, source, prefix)
            os._exit(0)
        was_killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        for key, expected in whole.items():
            try:
                IndexedDataset(f"{prefix}_{key}_document")
            except DataError:
                assert was_killed
                continue
            assert content(prefix, key) in ([expected] if not has_older_files else [expected, old[key]])
    assert call > 8  # two fsync, an unlink and two renames for each of two keys
    assert all(content(prefix, key) == expected for key, expected in whole.items())
    killed = list(tmp_path.glob("c1_*.unfinished-*"))
    assert len(killed) == 2 and run(source, tmp_path / "c1", "--json-keys", "text", "other") == 0
    assert "removed 2 unfinished files" in capsys.readouterr().out and not list(tmp_path.glob("c1_*.unfinished-*"))
    assert all(content(tmp_path / "c1", key) == expected for key, expected in whole.items())
