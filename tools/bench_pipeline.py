#!/usr/bin/env python3
"""Measures the bubble of each pipeline schedule from the trace of real training steps. Floor 8.

    torchrun --nproc-per-node 2 tools/bench_pipeline.py --pp 2 --micro-batches 8 --virtual-stages 2

A step lasts from the first pass of any stage to the last one's end. Its bubble is how much longer that is than the
work of the busiest rank, as a share of that work; the ideal is (p - 1) / m for 1F1B and (p - 1) / (m v) for interleaved
stages (Narayanan 2021). Schedules take turns step by step; a row is the median over steps. The model is dense, with a
small vocabulary, so that stages are alike; ranks should have a core each.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository: this runs without an installation

from megatron_parm.config.data import DataConfig
from megatron_parm.config.model import ModelConfig
from megatron_parm.config.optim import OptimConfig
from megatron_parm.config.parallel import ParallelConfig
from megatron_parm.config.run import RunConfig, check_run, resolve
from megatron_parm.config.training import TrainingConfig
from megatron_parm.data.batches import Batch
from megatron_parm.observe.trace import Recording, Span
from megatron_parm.parallel import launch, transport
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.grid import RankGrid
from megatron_parm.parallel.launch import LaunchEnvironment
from megatron_parm.pipeline.stages import BACKWARD, FORWARD, WEIGHTS
from megatron_parm.training.assemble import make_model
from megatron_parm.training.entrance import guarded
from megatron_parm.training.gpt_family import GPT
from megatron_parm.training.pipelined import stages_of_run
from megatron_parm.training.step import TrainStep
from megatron_parm.training.updates import make_updates

RATE = 1e-4
VOCABULARY = 64
PASSES = (FORWARD, BACKWARD, WEIGHTS)


@dataclass(frozen=True)
class Contender:
    """A schedule with a model of its own."""

    name: str
    virtual_stages: int
    step: TrainStep


def make_config(flags: argparse.Namespace, schedule: str, virtual_stages: int, world: int) -> RunConfig:
    """A dense GPT of equal layers under one schedule."""
    config = RunConfig(
        model=ModelConfig(
            num_layers=flags.layers,
            hidden_size=flags.hidden,
            num_attention_heads=4,
            max_position_embeddings=flags.seq,
            attention_dropout=0.0,
            hidden_dropout=0.0,
        ),
        parallel=ParallelConfig(
            pipeline_model_parallel_size=flags.pp,
            pipeline_schedule=schedule,  # type: ignore[arg-type]  # one of SCHEDULES
            num_virtual_stages_per_pipeline_rank=virtual_stages if virtual_stages > 1 else None,
        ),
        data=DataConfig(seq_length=flags.seq, mock_data=True, tokenizer_type="NullTokenizer", vocab_size=VOCABULARY),
        optim=OptimConfig(lr=RATE),
        training=TrainingConfig(
            micro_batch_size=1, global_batch_size=flags.micro_batches * (world // flags.pp), train_iters=1
        ),
    )
    check_run(config, world)
    return resolve(config, world)


def make_contender(flags: argparse.Namespace, schedule: str, virtual_stages: int, ctx: ParallelContext) -> Contender:
    """The model and step of one schedule."""
    config = make_config(flags, schedule, virtual_stages, ctx.world.size)
    built, _, _ = make_model(config, VOCABULARY, ctx)
    updates = make_updates(config, built, ctx)
    step = TrainStep(
        stages_of_run(config, built, updates.buffers, GPT.objective(config), ctx),
        updates.buffers,
        updates.optimizer,
        ctx,
        max_norm=1.0,
        per_token_loss=False,
        reduction=updates.reduction,
    )
    return Contender(schedule, virtual_stages, step)


def batches(flags: argparse.Namespace, ctx: ParallelContext) -> Iterator[Batch]:
    """Random tokens, the same on all stages."""
    generator = torch.Generator().manual_seed(ctx.dp.rank)
    while True:
        rows = torch.randint(VOCABULARY, (1, flags.seq + 1), generator=generator).to(ctx.device)
        yield {
            "tokens": rows[:, :-1],
            "labels": rows[:, 1:],
            "loss_mask": torch.ones_like(rows[:, 1:], dtype=torch.float32),
            "position_ids": torch.arange(flags.seq, device=ctx.device).expand(1, -1),
        }


def bubble_of(spans: Sequence[Span], ctx: ParallelContext) -> float:
    """(length of the step - work of the busiest rank) / that work. Ranks share a clock. Call on all ranks."""
    passes = [span for span in spans if span.name in PASSES]
    work = sum(span.end_ns - span.start_ns for span in passes)
    ends = torch.tensor(
        [-min(span.start_ns for span in passes), max(span.end_ns for span in passes), work], dtype=torch.float64
    )
    latest = transport.max_over(ends.to(ctx.device), ctx.pp)
    return float((latest[0] + latest[1] - latest[2]) / latest[2])


def measure(flags: argparse.Namespace, ctx: ParallelContext) -> list[dict[str, object]]:
    """A row for each schedule. Call on all ranks."""
    trace = Recording()
    traced = ctx.traced(trace)
    contenders = [make_contender(flags, "1f1b", 1, traced)]
    if flags.virtual_stages > 1:
        contenders.append(make_contender(flags, "interleaved", flags.virtual_stages, traced))
    streams = [batches(flags, ctx) for _ in contenders]
    bubbles: list[list[float]] = [[] for _ in contenders]
    for iteration in range(flags.warmup + flags.iters):
        for place, contender in enumerate(contenders):
            transport.barrier(ctx.world)
            seen = len(trace.spans)
            trace.start()
            contender.step.run(streams[place], flags.micro_batches, RATE, 0.0)
            trace.stop()
            if iteration >= flags.warmup:
                bubbles[place].append(bubble_of(trace.spans[seen:], ctx))
    return [
        {
            "schedule": contender.name,
            "virtual_stages": contender.virtual_stages,
            "bubble": median(bubbles[place]),
            "ideal": (flags.pp - 1) / (flags.micro_batches * contender.virtual_stages),
        }
        for place, contender in enumerate(contenders)
    ]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, text in (
        ("pp", 2, "pipeline stages"),
        ("virtual-stages", 2, "stages of a rank in the interleaved schedule; 1: 1F1B alone"),
        ("micro-batches", 8, "micro-batches of a step"),
        ("layers", 8, "layers"),
        ("hidden", 256, "hidden size"),
        ("seq", 512, "tokens of a micro-batch"),
        ("warmup", 2, "steps before the first that counts"),
        ("iters", 10, "steps that count"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default {default})")
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
        make_config(flags, "1f1b", 1, environment.world)
        ctx = launch.start(RankGrid(environment.world, pp=flags.pp), environment, store, device, backend, timeout)
        rows = measure(flags, ctx)
        if ctx.rank == 0:
            print(f"{'schedule':14}{'v':>3}{'bubble':>9}{'ideal':>9}{'ratio':>8}")
            for row in rows:
                bubble, ideal = float(str(row["bubble"])), float(str(row["ideal"]))
                print(
                    f"{row['schedule']!s:14}{row['virtual_stages']!s:>3}{bubble:9.3f}{ideal:9.3f}{bubble / ideal:8.2f}"
                )
            if flags.json:
                Path(flags.json).write_text(json.dumps(rows, indent=1))
        launch.shutdown(ctx)

    return guarded(work)


if __name__ == "__main__":
    sys.exit(main())
