"""Merges .bin/.idx pairs into one, byte for byte as Megatron does. Floor 8.

    python tools/merge_datasets.py --input parts/ --output-prefix data/corpus
    python tools/merge_datasets.py --input data/books data/code --output-prefix data/corpus

A folder stands for its pairs in the order of their names. The inputs stay as they are; the new pair appears whole or
not at all. To mix corpora in given proportions merge nothing: give weights to --data-path.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository: this runs without an installation

from megatron_parm.data.merge import exists, merge, pairs_of
from megatron_parm.errors import ConfigError, MegatronParmError


def build_parser() -> argparse.ArgumentParser:
    """The flags, with Megatron's names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.allow_abbrev = False
    parser.add_argument("--input", nargs="+", required=True, metavar="PATH", help="a folder, or prefixes in order")
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="the pair to write")
    parser.add_argument("--multimodal", action="store_true", help="keep the mode of every sequence, which all need")
    parser.add_argument("--overwrite", action="store_true", help="replace a pair of that name")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Merge. Returns the exit code: 0, or 2 with a message."""
    args = build_parser().parse_args(argv)
    try:
        prefixes = [prefix for path in args.input for prefix in _prefixes(path)]
        if exists(args.output_prefix) and not args.overwrite:
            raise ConfigError(f"--output-prefix {args.output_prefix} exists; name another one, or give --overwrite")
        merged = merge(prefixes, args.output_prefix, keeps_modes=args.multimodal)
    except MegatronParmError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if merged.without_modes:
        print(
            f"note: the modes of {', '.join(merged.without_modes)} were left out; --multimodal keeps them",
            file=sys.stderr,
        )
    print(
        f"{args.output_prefix}: {len(prefixes)} files, {merged.documents} documents, {merged.sequences} sequences, "
        f"{merged.tokens} tokens"
    )
    return 0


def _prefixes(path: str) -> list[str]:
    return pairs_of(Path(path)) if Path(path).is_dir() else [path.removesuffix(".idx").removesuffix(".bin")]


if __name__ == "__main__":
    sys.exit(main())
