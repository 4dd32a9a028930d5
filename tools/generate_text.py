#!/usr/bin/env python3
"""Sample text from a checkpoint. Model and tokenizer are those that the checkpoint names; moved tokenizer files may be
named anew. Prompts run together in batches; each text depends on the draws of the others in its batch alone.

python tools/generate_text.py --load runs/gpt --prompt "The list" --max-new-tokens 40
torchrun --nproc-per-node 2 tools/generate_text.py --load runs/gpt --tensor-model-parallel-size 2
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_parm.errors import ConfigError
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.training.generate import SamplingRules, generate
from megatron_parm.training.inference import add_flags, load_trained, run_tool


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the flags; argparse reports a wrong one and exits with 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser)
    parser.add_argument(
        "--prompt", action="append", help="text to continue; may be given several times (default: none)"
    )
    parser.add_argument("--prompt-file", help="file of more prompts, one a line (default: none)")
    parser.add_argument("--batch-size", type=int, default=16, help="texts that are written together (default: 16)")
    parser.add_argument("--num-samples", type=int, default=1, help="continuations of each prompt (default: 1)")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="longest continuation in tokens (default: 64)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default: 1.0)")
    parser.add_argument("--top-k", type=int, default=0, help="draw among the k likeliest tokens (default: 0, off)")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw among the likeliest of this mass (default: 1.0)")
    parser.add_argument("--seed", type=int, default=1234, help="seed of the draws (default: 1234)")
    return parser.parse_args(argv)


def read_prompts(flags: argparse.Namespace) -> list[str]:
    """The prompts of the flags, or one empty text. Raises ConfigError."""
    prompts = list(flags.prompt or [])
    if flags.prompt_file is not None:
        try:
            prompts += Path(flags.prompt_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--prompt-file {flags.prompt_file}: {error}; give a text file of UTF-8") from error
    return prompts or [""]


def sample(flags: argparse.Namespace, rules: SamplingRules, ctx: ParallelContext) -> None:
    """Load the model and print every continuation from the first rank. Call on all ranks."""
    trained = load_trained(flags, ctx)
    tokenizer = trained.tokenizer
    given = [tokenizer.encode(prompt) for prompt in read_prompts(flags) for _ in range(flags.num_samples)]
    for start in range(0, len(given), flags.batch_size):
        batch = given[start : start + flags.batch_size]
        for prompt, ids in zip(batch, generate(trained.model, batch, rules, tokenizer.eod), strict=True):
            if ctx.rank == 0:
                print(f"{tokenizer.decode([*prompt, *ids])}\n{'-' * 40}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Sample and return the exit code."""
    flags = parse(argv)

    def rules() -> SamplingRules:
        return SamplingRules(flags.max_new_tokens, flags.temperature, flags.top_k, flags.top_p, flags.seed)

    def check() -> None:
        for name in ("num_samples", "batch_size"):
            if getattr(flags, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(flags, name)}: must be at least 1")
        rules()
        read_prompts(flags)

    return run_tool(flags, check, lambda ctx: sample(flags, rules(), ctx))


if __name__ == "__main__":
    sys.exit(main())
