"""Makes the quickstart's corpus from real text that every Python carries, and a small tokenizer for it. Floor 8.

    python examples/quickstart_corpus.py --output-dir runs/quickstart/data
    python examples/quickstart_corpus.py --output-dir runs/quickstart_bert/data --word-pieces

Writes corpus.jsonl (the help topics of `pydoc_data.topics` and the docstrings of the standard library, read from its
sources without importing them), and a vocabulary trained on that corpus: vocab.json and merges.txt of a byte-level BPE,
or vocab.txt of BERT's word pieces. The same Python gives the same files. What is there already, whole, is left alone.
"""

import argparse
import ast
import json
import random
import re
import sys
import sysconfig
import textwrap
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
SPECIAL_PIECES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MIN_CHARACTERS = 80
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
HEADING = re.compile(r"^[^\n]+\n\*+\n+")


def docstrings(library: Path) -> Iterator[str]:
    """The docstrings of each source file of the standard library, joined: one document a file."""
    for path in sorted(library.rglob("*.py")):
        if NOT_LIBRARY.intersection(path.relative_to(library).parts):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]
        yield "\n\n".join(text.strip() for text in dict.fromkeys(found) if len(text) >= MIN_CHARACTERS // 2)


def help_topics() -> Iterator[str]:
    """The help texts of the language reference, without the underlined headings."""
    for name in sorted(topics):
        yield textwrap.dedent(HEADING.sub("", topics[name])).strip()


def make_corpus() -> list[str]:
    """All documents, each once, in a fixed random order, so that every part of the corpus is of the same kind."""
    library = Path(sysconfig.get_paths()["stdlib"])
    documents = [text for text in dict.fromkeys([*help_topics(), *docstrings(library)]) if len(text) >= MIN_CHARACTERS]
    random.Random(0).shuffle(documents)
    return documents


def train_tokenizer(documents: Sequence[str], vocab_size: int) -> tuple[str, str]:
    """The texts of vocab.json and merges.txt of a byte-level BPE."""
    engine = Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    engine.train_from_iterator(documents, trainer)
    model = json.loads(engine.to_str())["model"]
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    return json.dumps(model["vocab"], ensure_ascii=False), f"#version: 0.2\n{merges}\n"


def train_word_pieces(documents: Sequence[str], vocab_size: int) -> str:
    """The text of vocab.txt: lower-case word pieces, the most frequent pieces of a BPE in their places within words.

    Not by the library's own trainer of word pieces, whose ties fall differently in every run.
    """
    engine = Tokenizer(models.BPE())
    engine.normalizer = normalizers.BertNormalizer(lowercase=True)
    engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    engine.train_from_iterator(documents, trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False))
    words = Counter(
        word
        for text in documents
        for word, _ in engine.pre_tokenizer.pre_tokenize_str(engine.normalizer.normalize_str(text))
    )
    counts: Counter[str] = Counter()
    characters: set[str] = set()
    for word, count in words.items():
        first, *others = engine.encode(word).tokens
        counts.update({first: count})
        counts.update({f"##{piece}": count for piece in others})
        characters.update([word[0], *(f"##{character}" for character in word[1:])])
    by_frequency = sorted(counts.keys() - characters, key=lambda piece: (-counts[piece], piece))
    pieces = [*SPECIAL_PIECES, *sorted(characters), *by_frequency][:vocab_size]
    return "".join(f"{piece}\n" for piece in pieces)


def make_files(documents: Sequence[str], vocab_size: int, *, word_pieces: bool) -> dict[str, str]:
    """Name -> text of every file."""
    files = {"corpus.jsonl": "".join(json.dumps({"text": text}) + "\n" for text in documents)}
    if word_pieces:
        return files | {"vocab.txt": train_word_pieces(documents, vocab_size)}
    vocabulary, merges = train_tokenizer(documents, vocab_size)
    return files | {"vocab.json": vocabulary, "merges.txt": merges}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the files unless they are there; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, required=True, help="folder of the files")
    parser.add_argument("--vocab-size", type=int, default=2048, help="tokens of the vocabulary (default: 2048)")
    parser.add_argument("--word-pieces", action="store_true", help="a vocab.txt for BERT, not a byte-level BPE")
    args = parser.parse_args(argv)
    if args.vocab_size < 257:
        print(
            f"error: --vocab-size {args.vocab_size} must be at least 257: 256 bytes and {END_OF_TEXT}", file=sys.stderr
        )
        return 2
    folder: Path = args.output_dir
    receipt = folder / "corpus.json"  # written last, so the files beside it are whole
    facts = {"python": sys.version, "vocab_size": args.vocab_size}
    names = ("corpus.jsonl", *(("vocab.txt",) if args.word_pieces else ("vocab.json", "merges.txt")))
    if (
        receipt.is_file()
        and receipt.read_text() == json.dumps(facts)
        and all((folder / name).is_file() for name in names)
    ):
        print(f"{folder}: {', '.join(names)} are there already")
        return 0
    start = time.monotonic()
    documents = make_corpus()
    files = make_files(documents, args.vocab_size, word_pieces=args.word_pieces)
    folder.mkdir(parents=True, exist_ok=True)
    receipt.unlink(missing_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    receipt.write_text(json.dumps(facts))
    print(
        f"{folder}: {len(documents)} documents, {len(files['corpus.jsonl']) / 1e6:.1f} MB of text, a vocabulary of "
        f"{args.vocab_size} tokens; {time.monotonic() - start:.1f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
