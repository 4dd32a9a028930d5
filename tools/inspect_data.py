"""Tells what is in a .bin/.idx pair, decodes a document, verifies all of it, or writes a whole copy of a broken merge.

    python tools/inspect_data.py data/corpus_text_document
    python tools/inspect_data.py data/corpus_text_document --document 7 --tokenizer-type GPT2BPETokenizer \\
        --vocab-file vocab.json --merge-file merges.txt
    python tools/inspect_data.py data/corpus_text_document --verify --tokenizer-type NullTokenizer --vocab-size 50257
    python tools/inspect_data.py data/merged --repair data/merged_whole --parts data/a data/b

Floor 8. The files themselves are never changed. Exit code: 0, or 2 where something is wrong with them.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository: this runs without an installation

from megatron_parm.data.examine import MOST_PROBLEMS, census, contents, problems, repair
from megatron_parm.data.indexed_dataset import IndexedDataset
from megatron_parm.errors import ConfigError, MegatronParmError
from megatron_parm.tokenizers.base import Tokenizer
from megatron_parm.tokenizers.build import TOKENIZER_TYPES, build_tokenizer

SHOWN_IDS = 64


def build_parser() -> argparse.ArgumentParser:
    """The flags; those of the tokenizer have Megatron's names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.allow_abbrev = False
    parser.add_argument("prefix", help="the pair, without .bin or .idx")
    parser.add_argument("--document", type=int, metavar="N", help="show document N (from 0), decoded with a tokenizer")
    parser.add_argument("--all-ids", action="store_true", help=f"of --document: every id, not the first {SHOWN_IDS}")
    parser.add_argument(
        "--verify", action="store_true", help="check every offset and document, and every id with a tokenizer"
    )
    parser.add_argument("--repair", metavar="NEW_PREFIX", help="write a whole copy of a broken Megatron 2.x merge")
    parser.add_argument(
        "--parts", nargs="+", default=[], metavar="PREFIX", help="of --repair: the files it was merged of"
    )
    parser.add_argument(
        "--documents",
        choices=("sequence", "eod"),
        help="of --repair without --parts: a document is one sequence, or ends with the end-of-document id",
    )
    parser.add_argument("--eod", type=int, metavar="ID", help="end of document (default: the tokenizer's)")
    tokens = parser.add_argument_group("tokenizer")
    tokens.add_argument("--tokenizer-type", metavar="TYPE", help=", ".join(TOKENIZER_TYPES))
    tokens.add_argument("--vocab-file", metavar="FILE", help="vocabulary file")
    tokens.add_argument("--merge-file", metavar="FILE", help="merges.txt of GPT2BPETokenizer")
    tokens.add_argument("--tokenizer-model", metavar="FILE", help="model file")
    tokens.add_argument("--vocab-size", type=int, metavar="N", help="number of ids of NullTokenizer")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Inspect. Returns the exit code."""
    args = build_parser().parse_args(argv)
    prefix = args.prefix.removesuffix(".idx").removesuffix(".bin")
    try:
        tokenizer = _tokenizer(args)
        eod = args.eod if args.eod is not None else _eod_of(tokenizer)
        if args.repair is not None:
            for line in repair(prefix, args.repair, parts=args.parts, documents=args.documents, eod=eod):
                print(f"repaired: {line}")
            prefix = args.repair
        _tell(prefix, tokenizer, eod)
        if args.document is not None:
            _show_document(prefix, args.document, tokenizer, args.all_ids)
        return _verify(prefix, tokenizer, is_complete=args.verify)
    except MegatronParmError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _tokenizer(args: argparse.Namespace) -> Tokenizer | None:
    if args.tokenizer_type is None:
        return None
    return build_tokenizer(
        args.tokenizer_type,
        vocab_file=args.vocab_file,
        merge_file=args.merge_file,
        tokenizer_model=args.tokenizer_model,
        vocab_size=args.vocab_size,
    )


def _eod_of(tokenizer: Tokenizer | None) -> int | None:
    try:
        return None if tokenizer is None else tokenizer.eod
    except MegatronParmError:  # a tokenizer without one: nothing is counted
        return None


def _tell(prefix: str, tokenizer: Tokenizer | None, eod: int | None) -> None:
    """What the file holds, as its index says."""
    found = contents(prefix)
    kind = (
        "one sequence a document (GPT)" if found.is_one_sequence_a_document else "several sequences a document (BERT)"
    )
    print(f"{prefix}")
    print(f"  ids         {found.dtype} (code {found.code}), {found.bin_bytes} bytes")
    print(f"  tokens      {found.tokens}")
    print(f"  sequences   {found.sequences}, {found.shortest} to {found.longest} tokens, median {found.median}")
    print(f"  documents   {max(found.document_entries - 1, 0)}, {kind}")
    print(f"  empty       {found.empty_sequences} sequences, {found.empty_documents} documents")
    if found.trailing_bytes:
        what = "the modes of a multimodal file" if found.has_modes else "no meaning known, ignored"
        print(f"  behind      {found.trailing_bytes} bytes: {what}")
    if problems(prefix):
        return
    if found.code in (6, 7):
        print("  no token ids: floating numbers")
        return
    counted = census(prefix, eod)
    print(f"  range       ids {counted.smallest} to {counted.largest}")
    if tokenizer is not None:
        print(f"  vocabulary  {tokenizer.vocab_size} ids, {tokenizer.name}")
    if eod is not None:
        print(f"  ends        {counted.eod_at_ends} sequences end with {eod}, {counted.eod_inside} more lie inside")


def _show_document(prefix: str, number: int, tokenizer: Tokenizer | None, is_whole: bool) -> None:
    dataset = IndexedDataset(prefix)
    if not 0 <= number < dataset.num_documents:
        raise ConfigError(f"--document {number}: {prefix} has the documents 0 to {dataset.num_documents - 1}")
    for place, ids in enumerate(dataset.document(number)):
        shown = ids.tolist() if is_whole else ids[:SHOWN_IDS].tolist()
        more = f" ... ({len(ids)} in all)" if len(shown) < len(ids) else ""
        print(f"document {number}, sequence {place}: {' '.join(map(str, shown))}{more}")
        if tokenizer is None:
            continue
        foreign = [token for token in ids.tolist() if not 0 <= token < tokenizer.vocab_size]
        if foreign:
            print(f"(not decoded: id {foreign[0]} is outside the vocabulary of {tokenizer.vocab_size} ids)")
        else:
            print(tokenizer.decode(ids.tolist()))


def _verify(prefix: str, tokenizer: Tokenizer | None, *, is_complete: bool) -> int:
    """Say what is wrong; the exit code."""
    vocab_size = tokenizer.vocab_size if tokenizer is not None and is_complete else None
    found = problems(prefix, vocab_size)
    for text in found[:MOST_PROBLEMS]:
        print(f"wrong: {text}", file=sys.stderr)
    if found:
        return 2
    if is_complete:
        checked = "every id" if vocab_size is not None else "no id, for no tokenizer is given"
        print(f"verified: every length, offset and document bound; {checked}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
