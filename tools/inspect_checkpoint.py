"""Tells what a checkpoint holds, checks its hashes, or compares it with another. One process, no model, no launcher.

    python tools/inspect_checkpoint.py checkpoints/gpt
    python tools/inspect_checkpoint.py checkpoints/gpt/iter_0000100 --tensors experts --files
    python tools/inspect_checkpoint.py checkpoints/gpt --ckpt-step 100 --compare checkpoints/other

Floor 8. Every file's SHA-256 is compared with the manifest, unless --verify-checkpoint size. Exit code: 0; 21 for a
damaged checkpoint; 1 if the tensors of two checkpoints differ.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository: this runs without an installation

from megatron_parm.checkpoint.examine import Difference, compare, file_lines, open_alone, summary, tensor_lines
from megatron_parm.checkpoint.verify import VerifiedCheckpoint
from megatron_parm.errors import MegatronParmError

DIFFERENT = 1
SHOWN = 20  # lines of each kind of difference


def build_parser() -> argparse.ArgumentParser:
    """The flags; those that a run has too have its names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.allow_abbrev = False
    parser.add_argument("checkpoint", type=Path, help="a folder of checkpoints, or one iter_0000100 of it")
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="iteration to take (default: the latest)")
    parser.add_argument(
        "--verify-checkpoint", choices=("size", "full"), default="full", help="check file sizes only, or hashes too"
    )
    parser.add_argument("--files", action="store_true", help="list the files with their hashes")
    parser.add_argument(
        "--tensors", nargs="?", const="", metavar="TEXT", help="list the tensors, or those with TEXT in their name"
    )
    parser.add_argument("--compare", type=Path, metavar="DIR", help="compare with this checkpoint, tensor by tensor")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Inspect. Returns the exit code."""
    args = build_parser().parse_args(argv)
    try:
        checkpoint = open_alone(args.checkpoint, args.verify_checkpoint, args.ckpt_step)
        _tell(checkpoint, args.verify_checkpoint)
        for line in file_lines(checkpoint) if args.files else ():
            print(line)
        for line in tensor_lines(checkpoint, args.tensors) if args.tensors is not None else ():
            print(line)
        if args.compare is None:
            return 0
        other = open_alone(args.compare, args.verify_checkpoint)
        print()
        _tell(other, args.verify_checkpoint)
        return _tell_difference(compare(checkpoint, other))
    except MegatronParmError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _tell(checkpoint: VerifiedCheckpoint, verified: str) -> None:
    for warning in checkpoint.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    for line in summary(checkpoint):
        print(line)
    print("sound: " + ("every hash is that of the manifest" if verified == "full" else "sizes; hashes not compared"))


def _tell_difference(difference: Difference) -> int:
    print()
    for title, lines in (
        ("only in the first", difference.only_first),
        ("only in the second", difference.only_second),
        ("of another shape or dtype", difference.shapes),
        ("of other values", difference.values),
        ("other settings", difference.settings),
    ):
        if lines:
            print(f"{title} ({len(lines)}):")
            print("\n".join(f"  {line}" for line in lines[:SHOWN]))
            if len(lines) > SHOWN:
                print(f"  and {len(lines) - SHOWN} more")
    if not difference.is_of_tensors:
        print("all tensors are equal, bit by bit")
    return DIFFERENT if difference.is_of_tensors else 0


if __name__ == "__main__":
    sys.exit(main())
