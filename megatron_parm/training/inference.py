"""A trained GPT from its checkpoint, for tools that read or write text with it. Floor 7.

Model and tokenizer are those that the checkpoint names, on a layout of the tool's own; a model trained over stages of a
pipeline is loaded whole on every rank (and its tp, ep and esp peers).
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

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
from megatron_parm.tokenizers.base import Tokenizer
from megatron_parm.training.assemble import make_model, make_tokenizer
from megatron_parm.training.entrance import guarded
from megatron_parm.training.resume import OPTIMIZER, check_vocabulary, load_named, model_tensors, vocabulary_rows

TOKENIZER_FILES = ("vocab_file", "merge_file", "tokenizer_model")
TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class TrainedGPT:
    """A model with its tokenizer. `config` is that of its training, on the layout of today."""

    model: GPTModel
    tokenizer: Tokenizer
    config: RunConfig


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that every tool with a trained model has."""
    parser.add_argument("--load", required=True, help="checkpoint folder, as given to --save in training")
    parser.add_argument("--ckpt-step", type=int, default=None, help="iteration to load (default: the latest)")
    for name, what in (("vocab-file", "vocabulary"), ("merge-file", "merges"), ("tokenizer-model", "model file")):
        parser.add_argument(f"--{name}", help=f"{what} of the tokenizer (default: where the training run read it)")
    for name in ("tensor-model-parallel", "expert-model-parallel", "expert-tensor-parallel"):
        parser.add_argument(f"--{name}-size", type=int, default=1, help="under torchrun (default: 1)")


def for_inference(config: RunConfig, flags: argparse.Namespace, world: int) -> RunConfig:
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


def load_trained(flags: argparse.Namespace, ctx: ParallelContext) -> TrainedGPT:
    """The model of `--load`, ready to evaluate. Call on all ranks."""
    root = Path(flags.load)
    if not has_checkpoint(root, ctx):
        raise ConfigError(f"--load {root}: there is no checkpoint in this folder; give the folder of --save")
    checkpoint = find_checkpoint(root, ctx, ckpt_step=flags.ckpt_step)
    state = read_state(checkpoint, ctx)
    config = for_inference(from_dict(state["config"]), flags, ctx.world.size)
    tokenizer, vocab_size = on_all_ranks(ctx.world, lambda: make_tokenizer(config))
    check_vocabulary(vocab_size, config.data.tokenizer_type, state)
    built, _, _ = make_model(config, vocab_size, ctx, vocabulary_rows(checkpoint))
    load_named(checkpoint, model_tensors(built), ctx, ignored_prefixes=(OPTIMIZER,))
    assert isinstance(built.model, GPTModel), "the settings are those of a GPT"
    built.model.eval()
    return TrainedGPT(built.model, tokenizer, config)


def run_tool(flags: argparse.Namespace, check: Callable[[], None], work: Callable[[ParallelContext], None]) -> int:
    """Check the flags, join the ranks on their layout, do the work; returns the exit code of this worker."""

    def whole(environment: LaunchEnvironment) -> None:
        check()
        grid = RankGrid(
            environment.world,
            tp=flags.tensor_model_parallel_size,
            ep=flags.expert_model_parallel_size,
            esp=flags.expert_tensor_parallel_size,
        )
        device, backend, _ = launch.choose_device("auto", environment)
        store = launch.open_store(environment, TIMEOUT)
        launch.check_fingerprint({"flags": str(vars(flags))}, environment, store)
        ctx = launch.start(grid, environment, store, device, backend, TIMEOUT)
        work(ctx)
        launch.shutdown(ctx)

    return guarded(whole)
