#!/usr/bin/env python3
"""Sample text from a checkpoint. Model and tokenizer are those that the checkpoint names; moved tokenizer files may be
named anew.

python tools/generate_text.py --load runs/gpt --prompt "The list" --max-new-tokens 40
torchrun --nproc-per-node 2 tools/generate_text.py --load runs/gpt --tensor-model-parallel-size 2
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_parm.checkpoint.find import find_checkpoint, has_checkpoint
from megatron_parm.checkpoint.load import read_state
from megatron_parm.config import checks
from megatron_parm.config.parallel import ParallelConfig
from megatron_parm.config.run import RunConfig, from_dict
from megatron_parm.errors import ConfigError
from megatron_parm.models.gpt import GPTModel
from megatron_parm.parallel import launch
from megatron_parm.parallel.agreement import on_all_ranks
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.grid import RankGrid
from megatron_parm.parallel.launch import LaunchEnvironment
from megatron_parm.training.assemble import make_model, make_tokenizer
from megatron_parm.training.entrance import guarded
from megatron_parm.training.generate import SamplingRules, generate
from megatron_parm.training.resume import OPTIMIZER, check_vocabulary, load_named, model_tensors, vocabulary_rows

TOKENIZER_FILES = ("vocab_file", "merge_file", "tokenizer_model")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the flags; argparse reports a wrong one and exits with 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", required=True, help="checkpoint folder, as given to --save in training")
    parser.add_argument("--ckpt-step", type=int, default=None, help="iteration to load (default: the latest)")
    parser.add_argument(
        "--prompt", action="append", help="text to continue; may be given several times (default: none)"
    )
    parser.add_argument("--num-samples", type=int, default=1, help="continuations of each prompt (default: 1)")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="longest continuation in tokens (default: 64)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default: 1.0)")
    parser.add_argument("--top-k", type=int, default=0, help="draw among the k likeliest tokens (default: 0, off)")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw among the likeliest of this mass (default: 1.0)")
    parser.add_argument("--seed", type=int, default=1234, help="seed of the draws (default: 1234)")
    for name, what in (("vocab-file", "vocabulary"), ("merge-file", "merges"), ("tokenizer-model", "model file")):
        parser.add_argument(f"--{name}", help=f"{what} of the tokenizer (default: where the training run read it)")
    for name in ("tensor-model-parallel", "expert-model-parallel", "expert-tensor-parallel"):
        parser.add_argument(f"--{name}-size", type=int, default=1, help="under torchrun (default: 1)")
    return parser.parse_args(argv)


def for_sampling(config: RunConfig, flags: argparse.Namespace, world: int) -> RunConfig:
    """The checkpoint's configuration on the layout of the flags, dropping no token. Raises ConfigError."""
    if config.bert is not None:
        raise ConfigError(f"--load {flags.load}: this is a BERT, which fills gaps and writes no text; load a GPT")
    parallel = replace(
        ParallelConfig(),
        tensor_model_parallel_size=flags.tensor_model_parallel_size,
        expert_model_parallel_size=flags.expert_model_parallel_size,
        expert_tensor_parallel_size=flags.expert_tensor_parallel_size,
        sequence_parallel=False,  # a text grows by one token at a time
    )
    files = {name: given for name in TOKENIZER_FILES if (given := getattr(flags, name)) is not None}
    moe = config.moe
    if moe is not None:
        moe = replace(moe, moe_schedule="baseline", moe_expert_capacity_factor=None, moe_eval_capacity_factor=None)
        checks.check_experts(moe, config.model, parallel.esp)
    checks.check_ranks(parallel, moe.num_experts if moe else None, world)
    tp = parallel.tensor_model_parallel_size
    checks.check_model(config.model, tp, config.data.seq_length, has_dense_layer=not all(config.moe_layers))
    return replace(config, parallel=parallel, moe=moe, data=replace(config.data, **files))


def sample(flags: argparse.Namespace, rules: SamplingRules, ctx: ParallelContext) -> None:
    """Load the model and print every continuation from the first rank. Call on all ranks."""
    root = Path(flags.load)
    if not has_checkpoint(root, ctx):
        raise ConfigError(f"--load {root}: there is no checkpoint in this folder; give the folder of --save")
    checkpoint = find_checkpoint(root, ctx, ckpt_step=flags.ckpt_step)
    state = read_state(checkpoint, ctx)
    config = for_sampling(from_dict(state["config"]), flags, ctx.world.size)
    tokenizer, vocab_size = on_all_ranks(ctx.world, lambda: make_tokenizer(config))
    check_vocabulary(vocab_size, config.data.tokenizer_type, state)
    built, _, _ = make_model(config, vocab_size, ctx, vocabulary_rows(checkpoint))
    load_named(checkpoint, model_tensors(built), ctx, ignored_prefixes=(OPTIMIZER,))
    assert isinstance(built.model, GPTModel), "the settings are those of a GPT"
    for prompt in flags.prompt or [""]:
        given = tokenizer.encode(prompt)
        for ids in generate(built.model, given, flags.num_samples, rules, tokenizer.eod):
            if ctx.rank == 0:
                print(f"{tokenizer.decode([*given, *ids])}\n{'-' * 40}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Sample and return the exit code."""
    flags = parse(argv)

    def work(environment: LaunchEnvironment) -> None:
        if flags.num_samples < 1:
            raise ConfigError(f"--num-samples {flags.num_samples}: must be at least 1")
        rules = SamplingRules(flags.max_new_tokens, flags.temperature, flags.top_k, flags.top_p, flags.seed)
        grid = RankGrid(
            environment.world,
            tp=flags.tensor_model_parallel_size,
            ep=flags.expert_model_parallel_size,
            esp=flags.expert_tensor_parallel_size,
        )
        timeout = timedelta(minutes=10)
        device, backend, _ = launch.choose_device("auto", environment)
        store = launch.open_store(environment, timeout)
        launch.check_fingerprint({"flags": str(vars(flags))}, environment, store)
        ctx = launch.start(grid, environment, store, device, backend, timeout)
        sample(flags, rules, ctx)
        launch.shutdown(ctx)

    return guarded(work)


if __name__ == "__main__":
    sys.exit(main())
