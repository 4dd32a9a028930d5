"""Compares preprocessing with Megatron's plain way and with the raw tokenizer, in one run. Floor 8.

    python tools/bench_preprocess.py --workers 2

All encode the same JSON lines with the same Hugging Face tokenizer. The plain way: a pool of as many workers, one
document at a time through Python in each. The plain loop: one process. The raw tokenizer: `encode_batch` on all cores,
of texts that are in memory, and nothing is written. The first three write .bin/.idx files, which must come out equal.
Rounds alternate, so that a busy machine slows all. Prints the documents per second of each and the ratios (above 1:
ours is faster).
"""

import argparse
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository: this runs without an installation

import numpy as np
from tokenizers import ByteLevelBPETokenizer

from megatron_parm.data.encode_text import EncodeRules, encode_chunks
from megatron_parm.data.index_format import bin_path, idx_path, token_dtype
from megatron_parm.data.indexed_writer import IndexedWriter
from megatron_parm.data.text_chunks import find_chunks
from megatron_parm.tokenizers.gpt2_bpe import END_OF_TEXT, GPT2BPETokenizer

CHUNK_BYTES = 1 << 18


@dataclass(frozen=True)
class Bench:
    """The text, the tokenizer files and where to write."""

    corpus: Path
    vocab_file: Path
    merge_file: Path
    folder: Path
    workers: int

    def plain_loop(self) -> Path:
        """One process, one document at a time: what a short script would do."""
        engine = ByteLevelBPETokenizer.from_file(str(self.vocab_file), str(self.merge_file))
        eod, dtype = engine.token_to_id(END_OF_TEXT), token_dtype(engine.get_vocab_size())
        prefix = self.folder / "plain"
        with IndexedWriter(prefix, dtype) as writer, self.corpus.open(encoding="utf-8") as file:
            for line in file:
                ids = engine.encode(json.loads(line)["text"]).ids
                writer.add_document(np.array([*ids, eod], dtype=dtype))
        return prefix

    def plain_way(self) -> Path:
        """A pool of workers, one document at a time in each, ids back as lists: as Megatron's own tool works."""
        engine = ByteLevelBPETokenizer.from_file(str(self.vocab_file), str(self.merge_file))
        dtype = token_dtype(engine.get_vocab_size())
        prefix = self.folder / "way"
        files = (str(self.vocab_file), str(self.merge_file))
        with (
            multiprocessing.get_context("fork").Pool(self.workers, _PlainEncoder.begin, files) as pool,
            IndexedWriter(prefix, dtype) as writer,
            self.corpus.open(encoding="utf-8") as file,
        ):
            for ids in pool.imap(_PlainEncoder.encode, file, 32):
                writer.add_document(np.array(ids, dtype=dtype))
        return prefix

    def raw_seconds(self) -> float:
        """Seconds of the library's own batch call on all cores, in a process of its own."""
        fork = multiprocessing.get_context("fork")
        ours, theirs = fork.Pipe()
        process = fork.Process(target=self._raw, args=(theirs,))
        process.start()
        seconds: float = ours.recv()
        process.join()
        return seconds

    def _raw(self, connection: Connection) -> None:
        engine = ByteLevelBPETokenizer.from_file(str(self.vocab_file), str(self.merge_file))
        with self.corpus.open(encoding="utf-8") as file:
            texts = [json.loads(line)["text"] for line in file]
        start = time.perf_counter()
        for first in range(0, len(texts), 1000):
            engine.encode_batch(texts[first : first + 1000])
        connection.send(time.perf_counter() - start)

    def ours(self) -> Path:
        """As tools/preprocess_data.py does, without its progress bar."""
        tokenizer = GPT2BPETokenizer(self.vocab_file, self.merge_file)
        rules = EncodeRules(("text",), token_dtype(tokenizer.vocab_size), tokenizer.eod)
        prefix = self.folder / "ours"
        with IndexedWriter(prefix, rules.dtype) as writer:
            chunks = find_chunks(self.corpus, is_json=True, chunk_bytes=CHUNK_BYTES)
            for encoded in encode_chunks(chunks, tokenizer, rules, self.workers):
                writer.add_documents(encoded.columns[0].ids, encoded.columns[0].lengths)
        return prefix


class _PlainEncoder:
    """A worker of the plain way: it gets its tokenizer once, then a line at a time."""

    engine: ByteLevelBPETokenizer
    eod: int

    @classmethod
    def begin(cls, vocab_file: str, merge_file: str) -> None:
        """Load the tokenizer, once in each worker."""
        cls.engine = ByteLevelBPETokenizer.from_file(vocab_file, merge_file)
        cls.eod = cls.engine.token_to_id(END_OF_TEXT)

    @classmethod
    def encode(cls, line: str) -> list[int]:
        """The ids of one line's document, with its end."""
        return [*cls.engine.encode(json.loads(line)["text"]).ids, cls.eod]


def write_corpus(path: Path, megabytes: float) -> int:
    """Paragraphs of Python's help topics, a few to a document, repeated up to `megabytes`; the number of documents."""
    paragraphs = [part for name in sorted(topics) for part in re.split(r"\n{2,}", topics[name]) if part.strip()]
    documents = ["\n\n".join(paragraphs[start : start + 5]) for start in range(0, len(paragraphs), 5)]
    count = 0
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < megabytes * 1e6:
            file.write(json.dumps({"text": documents[count % len(documents)]}) + "\n")
            count += 1
    return count


def train_tokenizer(corpus: Path, folder: Path, vocab_size: int) -> tuple[Path, Path]:
    """A byte-level BPE trained on the corpus: its vocab.json and merges.txt."""
    engine = ByteLevelBPETokenizer()
    with corpus.open(encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
    engine.train_from_iterator(texts[:2000], vocab_size, special_tokens=[END_OF_TEXT], show_progress=False)
    vocab_file, merge_file = engine.save_model(str(folder))
    return Path(vocab_file), Path(merge_file)


def same_files(first: Path, second: Path) -> bool:
    """Whether two prefixes hold the same bytes."""
    return all(path(first).read_bytes() == path(second).read_bytes() for path in (bin_path, idx_path))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the rounds and print the comparison; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="worker processes of ours (default: 2)")
    parser.add_argument("--megabytes", type=float, default=8.0, help="text to encode, in MB (default: 8)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each, alternating (default: 3)")
    parser.add_argument("--vocab-size", type=int, default=8192, help="tokens of the vocabulary (default: 8192)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = folder / "corpus.jsonl"
        documents = write_corpus(corpus, args.megabytes)
        bench = Bench(corpus, *train_tokenizer(corpus, folder, args.vocab_size), folder, args.workers)
        works = {"plain loop": bench.plain_loop, "plain way": bench.plain_way, "ours": bench.ours}
        seconds: dict[str, list[float]] = {label: [] for label in (*works, "raw tokenizer")}
        for _ in range(args.rounds):
            for label, work in works.items():
                start = time.perf_counter()
                work()
                seconds[label].append(time.perf_counter() - start)
            seconds["raw tokenizer"].append(bench.raw_seconds())
        if not all(same_files(folder / name, folder / "ours") for name in ("plain", "way")):
            print("error: they wrote different files", file=sys.stderr)
            return 1
    for label, times in seconds.items():
        print(f"{label}: {documents / median(times):.0f} docs/s (median of {', '.join(f'{t:.2f} s' for t in times)})")
    for label, what in (
        ("plain loop", "over a plain loop"),
        ("plain way", f"over the plain way with {args.workers} workers"),
        ("raw tokenizer", f"of the raw tokenizer's batch speed on {os.cpu_count()} cores"),
    ):
        ratio = median(other / ours for other, ours in zip(seconds[label], seconds["ours"], strict=True))
        print(f"ratio {ratio:.2f}x documents per second with {args.workers} workers {what}")
    print(f"{documents} documents, {args.megabytes} MB; the files are equal")
    return 0


if __name__ == "__main__":
    sys.exit(main())
