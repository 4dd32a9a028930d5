"""Turns text into the .bin/.idx files that training reads, byte-compatible with Megatron's. Floor 8.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus --append-eod --workers 8 \\
        --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt

Writes <prefix>_<key>_document.bin and .idx for every key; train with --data-path <prefix>_<key>_document. With
--split-sentences it is <prefix>_<key>_sentence, one sequence for each sentence, for pretrain_bert.py.
"""

import argparse
import glob
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository: this runs without an installation

from tqdm import tqdm

from megatron_parm.data.abbreviations import LANGUAGES
from megatron_parm.data.compressed import plain_suffix
from megatron_parm.data.encode_text import LONG_SEQUENCE, EncodedChunk, EncodeRules, encode_chunks
from megatron_parm.data.index_format import token_dtype
from megatron_parm.data.indexed_writer import IndexedWriter
from megatron_parm.data.parquet_rows import find_rows
from megatron_parm.data.sentences import SentenceSplitter
from megatron_parm.data.text_chunks import MAX_DOCUMENT_BYTES, BrokenLine, TextChunk, find_chunks
from megatron_parm.errors import ConfigError, DataError, MegatronParmError
from megatron_parm.tokenizers.base import Tokenizer
from megatron_parm.tokenizers.build import TOKENIZER_TYPES, build_tokenizer

CHUNK_BYTES = 1 << 18
MOST_DOCUMENT_MIB = 1024
SHOWN_BROKEN_LINES = 20
NO_EFFECT = {
    "partitions": (1, "the input is never cut into partitions; documents keep their order"),
    "keep_sequential_samples": (False, "documents always keep their order"),
}
WITH_SENTENCES = {
    "keep_newlines": (False, "it belongs to --split-sentences; without that, newlines are always kept"),
    "lang": ("english", "it belongs to --split-sentences"),
}


@dataclass
class ColumnTotals:
    """Of the documents of one key: left out as empty, unknown ids, and those with a sequence of over 512 ids."""

    empty: int = 0
    unknown: int = 0
    long: int = 0


@dataclass
class Totals:
    """What has been read and written so far. Of broken places the first are kept, and all are counted."""

    columns: list[ColumnTotals]
    bytes: int = 0
    documents: int = 0
    num_broken: int = 0
    num_too_long: int = 0
    broken: list[BrokenLine] = field(default_factory=list)

    def add(self, encoded: EncodedChunk) -> None:
        """Count one chunk."""
        self.bytes += encoded.source.size
        self.documents += encoded.num_documents
        for total, column in zip(self.columns, encoded.columns, strict=True):
            total.empty += column.num_empty
            total.unknown += column.num_unknown
            total.long += column.num_long
        self.num_broken += len(encoded.broken)
        self.num_too_long += sum(place.is_too_long for place in encoded.broken)
        self.broken += encoded.broken[: SHOWN_BROKEN_LINES - len(self.broken)]


def build_parser() -> argparse.ArgumentParser:
    """The flags, with Megatron's names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.allow_abbrev = False
    text = parser.add_argument_group("input")
    text.add_argument("--input", nargs="+", required=True, metavar="FILE", help="text files, or patterns such as 'd/*'")
    text.add_argument(
        "--input-format",
        choices=("auto", "jsonl", "text", "parquet"),
        default="auto",
        help="jsonl: one JSON object a line; text: documents separated by blank lines; auto: by the file's name, text "
        "for .txt, parquet for .parquet, else jsonl; files that end in .gz or .zst are decompressed",
    )
    text.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY", help="fields to use (default: text)")
    text.add_argument(
        "--on-error",
        choices=("stop", "skip", "report"),
        default="stop",
        help="at a broken line: stop at once; skip it and count it; or read on, report all of them and write nothing",
    )
    text.add_argument(
        "--max-document-mib",
        type=float,
        default=MAX_DOCUMENT_BYTES / (1 << 20),
        metavar="N",
        help="a longer document is too long and counts as a broken line; memory grows with it (default: %(default)g)",
    )
    text.add_argument(
        "--split-sentences", action="store_true", help="one sequence for each sentence, as BERT needs; see --lang"
    )
    text.add_argument(
        "--keep-newlines", action="store_true", help="with --split-sentences: blanks and newlines stay in the sentences"
    )
    text.add_argument("--lang", default="english", help=f"its abbreviations: {', '.join(LANGUAGES)} (default: english)")
    tokens = parser.add_argument_group("tokenizer")
    tokens.add_argument("--tokenizer-type", required=True, metavar="TYPE", help=", ".join(TOKENIZER_TYPES))
    tokens.add_argument("--vocab-file", metavar="FILE", help="vocab.json of GPT2BPETokenizer, vocab.txt of BERT")
    tokens.add_argument("--merge-file", metavar="FILE", help="merges.txt of GPT2BPETokenizer")
    tokens.add_argument(
        "--tokenizer-model",
        metavar="PATH",
        help="SentencePiece model, folder with tokenizer.json (HuggingFaceTokenizer), or file of tiktoken ranks",
    )
    tokens.add_argument("--vocab-size", type=int, metavar="N", help="number of ids of NullTokenizer or TikTokenizer")
    tokens.add_argument("--vocab-extra-ids", type=int, default=0, metavar="N", help="extra ids at the end")
    tokens.add_argument("--tiktoken-pattern", choices=("v1", "v2"), help="of TikTokenizer (default: the file's own)")
    tokens.add_argument("--tiktoken-num-special-tokens", type=int, metavar="N", help="of TikTokenizer (default: 1000)")
    tokens.add_argument("--tokenizer-special-tokens", nargs="+", default=(), metavar="NAME", help="of TikTokenizer")
    tokens.add_argument("--append-eod", action="store_true", help="end every document with the end-of-document id")
    output = parser.add_argument_group("output")
    output.add_argument(
        "--output-prefix", required=True, metavar="PATH", help="start of the names of the files written"
    )
    output.add_argument("--dataset-impl", default="mmap", help="mmap is the only one")
    output.add_argument("--workers", type=int, default=1, metavar="N", help="processes (default: 1)")
    output.add_argument("--partitions", type=int, default=1, metavar="N", help="no effect: documents keep their order")
    output.add_argument("--keep-sequential-samples", action="store_true", help="no effect: documents keep their order")
    output.add_argument(
        "--log-interval",
        type=int,
        default=10000,
        metavar="N",
        help="documents between two progress lines where the output is no terminal (default: 10000)",
    )
    return parser


def check_flags(args: argparse.Namespace) -> None:
    """Refuse what cannot work before anything is read; say once what has no effect."""
    if args.dataset_impl not in ("mmap", "infer"):
        raise ConfigError(
            f"--dataset-impl {args.dataset_impl} is not supported; the files are always mmap: leave it out"
        )
    for flag, value in (("--workers", args.workers), ("--log-interval", args.log_interval)):
        if value < 1:
            raise ConfigError(f"{flag} {value} must be at least 1")
    if not 0 < args.max_document_mib <= MOST_DOCUMENT_MIB:
        raise ConfigError(
            f"--max-document-mib {args.max_document_mib:g} must be above 0 and at most {MOST_DOCUMENT_MIB}"
        )
    if len(set(args.json_keys)) < len(args.json_keys):
        raise ConfigError(f"--json-keys {' '.join(args.json_keys)}: each key once")
    for key in args.json_keys:
        if "/" in key or "\0" in key:
            raise ConfigError(f"--json-keys {key!r} becomes part of a file name; rename the field without '/'")
    for name, (default, reason) in (NO_EFFECT if args.split_sentences else NO_EFFECT | WITH_SENTENCES).items():
        if getattr(args, name) != default:
            print(f"note: --{name.replace('_', '-')} has no effect: {reason}", file=sys.stderr)


def input_files(patterns: Sequence[str]) -> list[Path]:
    """The files that --input names, the matches of a pattern in alphabetical order."""
    files: list[Path] = []
    for pattern in patterns:
        found = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))
        if not found:
            raise ConfigError(f"--input {pattern}: no such file")
        files += [Path(path) for path in found]
    for path in files:
        if not path.is_file():
            raise ConfigError(
                f"--input {path} must be a file, not a folder or a pipe; a pattern names several: '{path}/*'"
            )
        try:
            path.open("rb").close()
        except OSError as error:
            raise ConfigError(f"--input {path}: cannot be read ({error.strerror})") from error
    return files


def chunks_of(path: Path, args: argparse.Namespace) -> Iterator[TextChunk]:
    """The documents of one file, in its format."""
    kinds = {".txt": "text", ".parquet": "parquet"}
    kind = args.input_format if args.input_format != "auto" else kinds.get(plain_suffix(path), "jsonl")
    limit = int(args.max_document_mib * (1 << 20))
    if kind == "parquet":
        return find_rows(path, args.json_keys, CHUNK_BYTES, limit)
    if kind == "text" and len(args.json_keys) > 1:
        raise ConfigError(f"--json-keys {' '.join(args.json_keys)}: the plain text of {path} has one key; give one")
    return find_chunks(path, kind == "jsonl", CHUNK_BYTES, limit)


def write(encoded: Iterable[EncodedChunk], writers: Sequence[IndexedWriter], on_error: str) -> Totals:
    """Write every chunk, and stop at a broken line as --on-error says."""
    totals = Totals([ColumnTotals() for _ in writers])
    for chunk in encoded:
        totals.add(chunk)
        if chunk.broken and on_error == "stop":
            raise DataError(f"{chunk.broken[0]}; correct it, or leave such lines out with --on-error skip")
        for writer, column in zip(writers, chunk.columns, strict=True):
            writer.add_documents(column.ids, column.lengths, column.counts)
    if totals.num_broken and on_error == "report":
        shown = "\n".join(f"  {place}" for place in totals.broken)
        more = totals.num_broken - len(totals.broken)
        raise DataError(
            f"{totals.num_broken} of {totals.documents + totals.num_broken} are broken; nothing was written:\n{shown}"
            + (f"\n  and {more} more" if more > 0 else "")
        )
    return totals


def watched(encoded: Iterable[EncodedChunk], total_bytes: int, log_interval: int) -> Iterator[EncodedChunk]:
    """The same chunks, with a progress bar on a terminal, else with a line now and then."""
    start = time.monotonic()
    documents, done_bytes, text_bytes, logged = 0, 0, 0, 0
    with tqdm(total=total_bytes, unit="B", unit_scale=True, disable=None, file=sys.stderr) as bar:
        for chunk in encoded:
            yield chunk
            documents += chunk.num_documents
            done_bytes += chunk.source.read
            text_bytes += chunk.source.size
            seconds = max(time.monotonic() - start, 1e-9)
            bar.set_postfix_str(f"{documents} docs, {documents / seconds:.0f} docs/s", refresh=False)
            bar.update(chunk.source.read)
            if bar.disable and documents // log_interval > logged:
                logged = documents // log_interval
                left = seconds * (total_bytes - done_bytes) / max(done_bytes, 1)
                print(
                    f"{documents} documents, {documents / seconds:.0f} docs/s, {text_bytes / 1e6 / seconds:.2f} MB/s, "
                    f"{100 * done_bytes / max(total_bytes, 1):.0f} %, {left:.0f} s left",
                    file=sys.stderr,
                    flush=True,
                )


def print_summary(
    args: argparse.Namespace, tokenizer: Tokenizer, totals: Totals, writers: Sequence[IndexedWriter], seconds: float
) -> None:
    """What was read, what was left out, what was written, and how fast."""
    print(f"tokenizer {tokenizer.name}, {tokenizer.vocab_size} ids, stored as {writers[0].dtype}")
    for key, writer, column in zip(args.json_keys, writers, totals.columns, strict=True):
        sentences = f" of {writer.num_sequences} sentences" if args.split_sentences else ""
        print(
            f"{writer.prefix}.bin, .idx: {totals.documents - column.empty} documents{sentences}, {writer.num_tokens} "
            f"tokens (key {key}, {column.empty} empty documents left out)"
        )
        if tokenizer.unknown is not None:
            rate = 100 * column.unknown / max(writer.num_tokens, 1)
            print(f"  unknown: {column.unknown} tokens, {rate:.2f} %")
        if args.split_sentences and column.long:
            print(
                f"  too long for BERT: {column.long} documents with a sentence of more than {LONG_SEQUENCE} tokens; "
                "training leaves them out"
            )
    if totals.num_broken:
        print(f"skipped {totals.num_broken}, {totals.num_too_long} of them too long; the first: {totals.broken[0]}")
    print(
        f"{totals.documents} documents in {seconds:.1f} s: {totals.documents / seconds:.0f} docs/s, "
        f"{totals.bytes / 1e6 / seconds:.2f} MB/s with {args.workers} worker{'s' if args.workers > 1 else ''}"
    )


def run(args: argparse.Namespace) -> None:
    """Check everything, then read, encode and write."""
    check_flags(args)
    tokenizer = build_tokenizer(
        args.tokenizer_type,
        vocab_file=args.vocab_file,
        merge_file=args.merge_file,
        tokenizer_model=args.tokenizer_model,
        vocab_size=args.vocab_size,
        vocab_extra_ids=args.vocab_extra_ids,
        tiktoken_pattern=args.tiktoken_pattern,
        tiktoken_num_special_tokens=args.tiktoken_num_special_tokens,
        tokenizer_special_tokens=args.tokenizer_special_tokens,
    )
    dtype = token_dtype(tokenizer.vocab_size)
    splitter = SentenceSplitter(args.lang, args.keep_newlines) if args.split_sentences else None
    rules = EncodeRules(
        tuple(args.json_keys), dtype, tokenizer.eod if args.append_eod else None, splitter, tokenizer.unknown
    )
    files = input_files(args.input)
    found = [chunks_of(path, args) for path in files]
    total_bytes = sum(path.stat().st_size for path in files)
    start = time.monotonic()
    with ExitStack() as stack:
        level = "sentence" if args.split_sentences else "document"
        prefixes = [f"{args.output_prefix}_{key}_{level}" for key in args.json_keys]
        writers = [stack.enter_context(IndexedWriter(prefix, dtype)) for prefix in prefixes]
        if abandoned := sum(writer.num_abandoned for writer in writers):
            print(f"removed {abandoned} unfinished files that killed runs had left")
        encoded = encode_chunks(chain.from_iterable(found), tokenizer, rules, args.workers)
        totals = write(watched(encoded, total_bytes, args.log_interval), writers, args.on_error)
        if not any(writer.num_tokens for writer in writers):
            raise DataError(f"--input {' '.join(args.input)}: no document with text was found; nothing was written")
    print_summary(args, tokenizer, totals, writers, max(time.monotonic() - start, 1e-9))


def main(argv: Sequence[str] | None = None) -> int:
    """Preprocess; returns the exit code."""
    args = build_parser().parse_args(argv)
    try:
        run(args)
    except MegatronParmError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
