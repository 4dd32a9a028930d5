"""Compares preprocessing with a plain loop over the same tokenizer, in one run. Floor 8.

    python tools/bench_preprocess.py --workers 2

Both read the same JSON lines, encode them with the same Hugging Face tokenizer and write .bin/.idx files, which must
come out equal. Rounds alternate, so that a busy machine slows both. Prints the documents per second of each and their
ratio (above 1: ours is faster).
"""

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
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
        seconds: dict[str, list[float]] = {"plain loop": [], "ours": []}
        for _ in range(args.rounds):
            for label, work in (("plain loop", bench.plain_loop), ("ours", bench.ours)):
                start = time.perf_counter()
                work()
                seconds[label].append(time.perf_counter() - start)
        if not same_files(folder / "plain", folder / "ours"):
            print("error: the two wrote different files", file=sys.stderr)
            return 1
    for label, times in seconds.items():
        print(f"{label}: {documents / median(times):.0f} docs/s (median of {', '.join(f'{t:.2f} s' for t in times)})")
    ratios = [plain / ours for plain, ours in zip(seconds["plain loop"], seconds["ours"], strict=True)]
    print(
        f"ratio {median(ratios):.2f}x documents per second with {args.workers} workers over a plain loop "
        f"({documents} documents, {args.megabytes} MB; the files are equal)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
