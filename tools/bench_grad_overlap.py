#!/usr/bin/env python3
"""Compares ways to reduce gradients and to keep optimizer state, on the same ranks and in the same run. Floor 8.

    torchrun --nproc-per-node 8 tools/bench_grad_overlap.py --ep 4 --hidden 256 --layers 4
    python tools/emulated_cluster.py --nodes 2 --ranks-per-node 4 -- tools/bench_grad_overlap.py --ep 4

The ways take turns step by step, so that a busy machine slows all alike. A row gives the median over steps of the
slowest rank's time, that time relative to the first row, and the optimizer's bytes of the fullest rank relative to the
first row's. Results do not depend on the way: the last column is the loss after the last step.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository: this runs without an installation

from megatron_parm.config.data import DataConfig
from megatron_parm.config.model import ModelConfig
from megatron_parm.config.moe import MoEConfig
from megatron_parm.config.optim import OptimConfig
from megatron_parm.config.parallel import ParallelConfig
from megatron_parm.config.replicas import ReplicaConfig
from megatron_parm.config.run import RunConfig, check_run, resolve
from megatron_parm.config.training import TrainingConfig
from megatron_parm.data.batches import Batch
from megatron_parm.parallel import launch, transport
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.grid import RankGrid
from megatron_parm.parallel.launch import LaunchEnvironment
from megatron_parm.training.assemble import make_model
from megatron_parm.training.entrance import guarded
from megatron_parm.training.forward_backward import SingleStage
from megatron_parm.training.step import TrainStep
from megatron_parm.training.updates import Updates, make_updates

RATE = 1e-4
OVERLAP: dict[str, object] = {"overlap_grad_reduce": True}
ZERO: dict[str, object] = {"use_distributed_optimizer": True}
WAYS: dict[str, dict[str, object]] = {
    "after backward": {},
    "overlap, in the gaps": OVERLAP,
    "overlap, anywhere": {**OVERLAP, "moe_grad_reduce": "anywhere"},
    "ZeRO-1": ZERO,
    "ZeRO-1, all overlapped": {**ZERO, **OVERLAP, "overlap_param_gather": True},
}


@dataclass(frozen=True)
class Contender:
    """One way, with a model of its own."""

    step: TrainStep
    updates: Updates

    @property
    def optimizer_bytes(self) -> int:
        """Moments and separate masters of this rank."""
        states = self.updates.optimizer.state_tensors().values()
        return sum(tensor.nbytes for tensors in states for tensor in tensors.values())


def make_config(flags: argparse.Namespace, world: int) -> RunConfig:
    """A GPT of equal layers, each with experts if there are any."""
    moe = None
    if flags.num_experts:
        moe = MoEConfig(
            num_experts=flags.num_experts, moe_router_topk=2, moe_expert_capacity_factor=1.25, moe_schedule="s1"
        )
    config = RunConfig(
        model=ModelConfig(
            num_layers=flags.layers,
            hidden_size=flags.hidden,
            num_attention_heads=8,
            max_position_embeddings=flags.seq,
            attention_dropout=0.0,
            hidden_dropout=0.0,
        ),
        moe=moe,
        parallel=ParallelConfig(
            tensor_model_parallel_size=flags.tp,
            expert_model_parallel_size=flags.ep,
            expert_tensor_parallel_size=flags.esp,
        ),
        replicas=ReplicaConfig(ddp_bucket_size=flags.bucket),
        data=DataConfig(
            seq_length=flags.seq, mock_data=True, tokenizer_type="NullTokenizer", vocab_size=flags.vocabulary
        ),
        optim=OptimConfig(lr=RATE),
        training=TrainingConfig(micro_batch_size=flags.batch, train_iters=1, precision=flags.precision),
    )
    check_run(config, world)
    return resolve(config, world)


def make_contender(config: RunConfig, way: dict[str, object], ctx: ParallelContext) -> Contender:
    """The model of `config` with that way of updating."""
    config = replace(config, replicas=replace(config.replicas, **way))  # type: ignore[arg-type]  # fields of it
    built, _, _ = make_model(config, config.data.vocab_size or 0, ctx)
    updates = make_updates(config, built, ctx)
    step = TrainStep(
        SingleStage(built.model, built.balance_scale),
        updates.buffers,
        updates.optimizer,
        ctx,
        max_norm=1.0,
        per_token_loss=False,
        reduction=updates.reduction,
    )
    return Contender(step, updates)


def batches(flags: argparse.Namespace, ctx: ParallelContext) -> Iterator[Batch]:
    """Random tokens, others in each step and on each replica."""
    generator = torch.Generator().manual_seed(ctx.dp.rank)
    while True:
        rows = torch.randint(flags.vocabulary, (flags.batch, flags.seq + 1), generator=generator).to(ctx.device)
        yield {
            "tokens": rows[:, :-1],
            "labels": rows[:, 1:],
            "loss_mask": torch.ones_like(rows[:, 1:], dtype=torch.float32),
            "position_ids": torch.arange(flags.seq, device=ctx.device).expand(flags.batch, -1),
        }


def measure(flags: argparse.Namespace, ctx: ParallelContext) -> list[dict[str, object]]:
    """A row for each way. Call on all ranks."""
    config = make_config(flags, ctx.world.size)
    contenders = {name: make_contender(config, WAYS[name], ctx) for name in flags.ways}
    streams = {name: batches(flags, ctx) for name in contenders}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    losses = dict.fromkeys(contenders, 0.0)
    for iteration in range(flags.warmup + flags.iters):
        for name, contender in contenders.items():
            transport.barrier(ctx.world)
            started = time.perf_counter()
            losses[name] = contender.step.run(streams[name], flags.micro_batches, RATE, 0.0).lm_loss
            contender.updates.optimizer.settle()
            mine = torch.tensor([time.perf_counter() - started], device=ctx.device)
            if iteration >= flags.warmup:
                times[name].append(1000 * transport.max_over(mine, ctx.world).item())
    held = {name: torch.tensor([c.optimizer_bytes], device=ctx.device) for name, c in contenders.items()}
    most = {name: int(transport.max_over(count, ctx.world).item()) for name, count in held.items()}
    first = flags.ways[0]
    return [
        {
            "way": name,
            "median_ms": median(times[name]),
            "of_first": median(times[name]) / median(times[first]),
            "optimizer_bytes": most[name],
            "bytes_of_first": most[name] / most[first],
            "loss": losses[name],
        }
        for name in contenders
    ]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, text in (
        ("tp", 1, "tensor-parallel ranks"),
        ("ep", 1, "expert-parallel ranks"),
        ("esp", 1, "ranks that share an expert"),
        ("layers", 4, "layers"),
        ("hidden", 256, "hidden size"),
        ("seq", 128, "tokens of a sample"),
        ("batch", 2, "samples of a micro-batch"),
        ("micro-batches", 1, "micro-batches of a step"),
        ("vocabulary", 2048, "tokens of the vocabulary"),
        ("num-experts", 8, "experts of each layer; 0: dense"),
        ("bucket", 1_000_000, "elements of a bucket"),
        ("warmup", 2, "steps before the first that counts"),
        ("iters", 10, "steps that count"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default {default})")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="default: all")
    parser.add_argument("--json", metavar="FILE", help="write the rows to this file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; the exit code of this worker."""
    flags = parse(argv)

    def work(environment: LaunchEnvironment) -> None:
        timeout = timedelta(minutes=5)
        device, backend, _ = launch.choose_device("auto", environment)
        store = launch.open_store(environment, timeout)
        launch.check_fingerprint({"flags": str(vars(flags))}, environment, store)
        grid = RankGrid(environment.world, tp=flags.tp, ep=flags.ep, esp=flags.esp)
        ctx = launch.start(grid, environment, store, device, backend, timeout)
        rows = measure(flags, ctx)
        if ctx.rank == 0:
            print(f"{'way':24}{'median ms':>11}{'of first':>10}{'optimizer MiB':>15}{'of first':>10}{'loss':>12}")
            for row in rows:
                print(
                    f"{row['way']!s:24}{row['median_ms']:11.1f}{row['of_first']:10.3f}"
                    f"{int(str(row['optimizer_bytes'])) / 2**20:15.2f}{row['bytes_of_first']:10.3f}{row['loss']:12.6f}",
                    flush=True,
                )
            if flags.json:
                Path(flags.json).write_text(json.dumps(rows, indent=1))
        launch.shutdown(ctx)

    return guarded(work)


if __name__ == "__main__":
    sys.exit(main())
