#!/usr/bin/env python3
"""Convert a checkpoint between Hugging Face's format, Megatron's and ours, tensor by tensor. See docs/convert.md.

python tools/convert_checkpoint.py --from hf --load Llama-3.2-1B --to megatron_parm --save runs/llama
python tools/convert_checkpoint.py --from megatron_parm --load runs/llama --to hf --save exported
python tools/convert_checkpoint.py --from megatron --trust-checkpoint --load old --to megatron_parm --save runs/gpt
python tools/convert_checkpoint.py --from megatron_parm --load runs/gpt --to megatron --save out \\
    --target-tensor-parallel-size 2
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_parm.checkpoint.megatron_write import TargetSizes
from megatron_parm.errors import ConfigError
from megatron_parm.parallel.launch import LaunchEnvironment
from megatron_parm.training.convert import FORMATS, convert
from megatron_parm.training.convert_megatron import MegatronOptions
from megatron_parm.training.entrance import guarded

GIGABYTE = 1_000_000_000


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the flags; argparse reports a wrong one and exits with 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", required=True, choices=FORMATS, help="format of --load")
    parser.add_argument("--load", required=True, type=Path, help="folder to read")
    parser.add_argument("--to", dest="target", required=True, choices=FORMATS, help="format of --save")
    parser.add_argument("--save", required=True, type=Path, help="folder to write; must be new or empty")
    parser.add_argument("--ckpt-step", type=int, default=None, help="iteration to read (default: the latest)")
    parser.add_argument(
        "--max-file-size", type=float, default=5.0, help="largest file of tensors in gigabytes (default: 5)"
    )
    megatron = parser.add_argument_group("Megatron")
    megatron.add_argument(
        "--trust-checkpoint",
        action="store_true",
        help="take pickles, which is what Megatron's files are; they are read as data, nothing in them is run",
    )
    for name, what in (("tensor", "slices"), ("pipeline", "stages"), ("expert", "parts of the experts")):
        megatron.add_argument(
            f"--target-{name}-parallel-size", type=int, default=1, metavar="N", help=f"{what} to write (default: 1)"
        )
    for name, what in (("vocab-file", "vocabulary"), ("merge-file", "merges"), ("tokenizer-model", "model file")):
        megatron.add_argument(
            f"--{name}", help=f"{what} of the tokenizer that the checkpoint names, to count its words"
        )
    return parser.parse_args(argv)


def megatron_options(flags: argparse.Namespace) -> MegatronOptions:
    """The flags of Megatron's format."""
    files = {name: getattr(flags, name) for name in ("vocab_file", "merge_file", "tokenizer_model")}
    sizes = TargetSizes(
        flags.target_tensor_parallel_size, flags.target_pipeline_parallel_size, flags.target_expert_parallel_size
    )
    given = {name: value for name, value in files.items() if value is not None}
    if flags.target != "megatron" and sizes != TargetSizes():
        raise ConfigError("--target-*-parallel-size: only with --to megatron; other formats fit every layout")
    if flags.source != "megatron" and (given or flags.trust_checkpoint):
        raise ConfigError("--trust-checkpoint and the tokenizer's files: only with --from megatron")
    return MegatronOptions(flags.trust_checkpoint, sizes, given)


def main(argv: Sequence[str] | None = None) -> int:
    """Convert and return the exit code."""
    flags = parse(argv)

    def work(environment: LaunchEnvironment) -> None:
        if environment.world > 1:
            raise ConfigError("this tool is one process; start it without torchrun")
        if not flags.max_file_size > 0:
            raise ConfigError(f"--max-file-size {flags.max_file_size}: must be above 0")
        done = convert(
            flags.source,
            flags.load,
            flags.target,
            flags.save,
            ckpt_step=flags.ckpt_step,
            largest_file=int(flags.max_file_size * GIGABYTE),
            megatron=megatron_options(flags),
        )
        for line in done.lines:
            print(f" > {line}")
        print(f" > {done.folder} is written")

    return guarded(work)


if __name__ == "__main__":
    sys.exit(main())
