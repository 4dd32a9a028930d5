#!/usr/bin/env python3
"""Train one small GPT-MoE on every layout that fits the ranks, and compare each with one process.

    torchrun --nproc-per-node 8 tools/check_layouts.py
    torchrun --nproc-per-node 4 tools/check_layouts.py --schedules s1 --dropless

Layouts of fewer ranks run on the first ranks. For each layout and schedule a line gives the largest relative
difference of lm_loss, load_balancing_loss and grad_norm from one process: 20 steps in float64, 3 steps in float32,
and the largest difference of any gradient after one step in float64, relative to the largest entry of that gradient's
parameter. The exit code is 0 if all are within 1e-9, 1e-5 and 1e-10.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_parm.config.data import DataConfig
from megatron_parm.config.model import ModelConfig
from megatron_parm.config.moe import MoEConfig, Schedule
from megatron_parm.config.optim import OptimConfig
from megatron_parm.config.parallel import ParallelConfig
from megatron_parm.config.run import RunConfig, check_run, resolve
from megatron_parm.config.training import Precision, TrainingConfig
from megatron_parm.data.batches import Batch
from megatron_parm.grads.buffer import GradientBuffers
from megatron_parm.optim.build import build_optimizer
from megatron_parm.parallel import launch, transport
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.grid import RankGrid
from megatron_parm.parallel.launch import GroupCache, LaunchEnvironment
from megatron_parm.parallel.sharding import spec_of
from megatron_parm.training.assemble import make_model, make_schedule
from megatron_parm.training.entrance import guarded
from megatron_parm.training.forward_backward import SingleStage
from megatron_parm.training.step import TrainStep

VOCABULARY, SEQUENCE, MICRO_BATCH, GLOBAL_BATCH = 61, 8, 2, 16
SCHEDULES: tuple[Schedule, ...] = ("baseline", "deepspeed", "s1", "s2", "s1h", "s2h", "s1n")
NEED_SLOTS: tuple[Schedule, ...] = ("deepspeed", "s2", "s2h")
LIMITS = {"fp64, 20 steps": 1e-9, "fp32, 3 steps": 1e-5, "gradients": 1e-10}


@dataclass(frozen=True)
class Layout:
    """Parallel sizes; `world` ranks take part."""

    world: int
    tp: int = 1
    ep: int = 1
    esp: int = 1

    def __str__(self) -> str:
        return f"world {self.world}: tp {self.tp}, ep {self.ep}, esp {self.esp}"


LAYOUTS = (
    Layout(1),
    Layout(2, tp=2),
    Layout(2, ep=2),
    Layout(4, tp=2, ep=2),
    Layout(4, tp=2, esp=2, ep=2),
    Layout(4, tp=4, esp=2, ep=2),
    Layout(4, tp=1, esp=2, ep=2),
    Layout(8, tp=2, esp=2, ep=2),
)


def can_run(schedule: Schedule, layout: Layout, *, dropless: bool) -> bool:
    """Whether the table has a row for it: some cut slots and need a capacity, deepspeed knows two sizes of esp."""
    return not (dropless and schedule in NEED_SLOTS) and (schedule != "deepspeed" or layout.esp in (1, layout.tp))


@dataclass(frozen=True)
class Figures:
    """lm_loss, load_balancing_loss and grad_norm of every step."""

    steps: tuple[tuple[float, float, float], ...]

    def difference(self, other: "Figures") -> float:
        """The largest relative difference of any figure; infinite where one is not a number."""
        pairs = zip(self.steps, other.steps, strict=True)
        found = [abs(a - b) / abs(b) for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True)]
        return max(found) if all(map(math.isfinite, found)) else math.inf  # max alone can lose a NaN


def make_config(layout: Layout, schedule: Schedule, precision: Precision, *, dropless: bool) -> RunConfig:
    """A two-layer GPT with 4 experts, top-2; f = E / k, so nothing is dropped, or no capacity at all."""
    config = RunConfig(
        model=ModelConfig(
            num_layers=2,
            hidden_size=16,
            num_attention_heads=4,
            max_position_embeddings=SEQUENCE,
            make_vocab_size_divisible_by=1,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            init_method_std=0.1,
        ),
        moe=MoEConfig(
            num_experts=4,
            moe_router_topk=2,
            moe_aux_loss_coeff=0.02,
            moe_z_loss_coeff=0.001,
            moe_expert_capacity_factor=None if dropless else 2.0,
            moe_schedule=schedule,
        ),
        parallel=ParallelConfig(
            tensor_model_parallel_size=layout.tp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.esp,
        ),
        data=DataConfig(seq_length=SEQUENCE, mock_data=True, tokenizer_type="NullTokenizer", vocab_size=VOCABULARY),
        optim=OptimConfig(lr=3e-3, min_lr=3e-4),
        training=TrainingConfig(
            micro_batch_size=MICRO_BATCH, global_batch_size=GLOBAL_BATCH, train_iters=20, precision=precision
        ),
    )
    check_run(config, layout.world)
    return resolve(config, layout.world)


def batches(ctx: ParallelContext) -> Iterator[Batch]:
    """Micro-batches of random tokens: global batch i is the same samples on every layout."""
    step = 0
    while True:
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(VOCABULARY, (GLOBAL_BATCH, SEQUENCE + 1), generator=generator)
        per_block = MICRO_BATCH * ctx.dp.size
        for first in range(ctx.dp.rank * MICRO_BATCH, GLOBAL_BATCH, per_block):
            rows = ids[first : first + MICRO_BATCH].to(ctx.device)
            yield {
                "tokens": rows[:, :-1],
                "labels": rows[:, 1:],
                "loss_mask": torch.ones_like(rows[:, 1:], dtype=torch.float32),
                "position_ids": torch.arange(SEQUENCE, device=ctx.device).expand(MICRO_BATCH, -1),
            }
        step += 1


def train(config: RunConfig, ctx: ParallelContext, num_steps: int) -> tuple[Figures, dict[str, Tensor]]:
    """Figures of `num_steps` steps, and this rank's reduced gradients of the last one, by name."""
    built, _, _ = make_model(config, VOCABULARY, ctx)
    buffers = GradientBuffers(dict(built.model.named_parameters()), ctx)
    schedule = make_schedule(config)
    step = TrainStep(
        SingleStage(built.model, built.balance_scale),
        buffers,
        build_optimizer(buffers),
        ctx,
        max_norm=0.0,
        per_token_loss=False,
    )
    stream, steps = batches(ctx), []
    num_micro_batches = GLOBAL_BATCH // (MICRO_BATCH * ctx.dp.size)
    for iteration in range(num_steps):
        built.record.clear()
        samples = iteration * GLOBAL_BATCH
        result = step.run(stream, num_micro_batches, schedule.learning_rate(samples), 0.01)
        summary = built.record.summarise(ctx, 2)
        assert summary is not None
        steps.append((result.lm_loss, summary.load_balancing_loss, result.grad_norm))
    return Figures(tuple(steps)), {name: buffers.gradient_of(name).clone() for name in buffers.parameters}


@cache
def train_alone(
    precision: Precision, num_steps: int, dropless: bool, device: torch.device
) -> tuple[Figures, dict[str, Tensor]]:
    """The same of one process: what every row is compared with."""
    config = make_config(Layout(1), "baseline", precision, dropless=dropless)
    return train(config, ParallelContext.single(device), num_steps)


def gradient_difference(config: RunConfig, ctx: ParallelContext, wanted: dict[str, Tensor]) -> float:
    """The largest difference of any gradient after one step, relative to the parameter's largest, over all ranks."""
    built, _, _ = make_model(config, VOCABULARY, ctx)
    specs = {name: spec_of(p) for name, p in built.model.named_parameters()}
    _, found = train(config, ctx, 1)
    worst = torch.zeros((), dtype=torch.float64, device=ctx.device)
    for name, gradient in found.items():
        whole = torch.zeros(specs[name].global_shape, dtype=gradient.dtype, device=ctx.device)
        alone = wanted[name].to(ctx.device)  # its vocabulary may have fewer rows of padding
        whole[: alone.shape[0]] = alone
        largest = whole.abs().max().clamp(min=1e-6)  # a gradient that is zero but for rounding has no scale of its own
        difference = (gradient - whole[specs[name].box]).abs().max() / largest
        worst = torch.maximum(worst, difference.nan_to_num(torch.inf, torch.inf))
    return transport.max_over(worst, ctx.world).item()


def check(layout: Layout, schedule: Schedule, ctx: ParallelContext, *, dropless: bool) -> dict[str, float]:
    """The differences of one row of the table. Call on all ranks of `ctx`."""
    found = {}
    runs: tuple[tuple[str, Precision, int], ...] = (("fp64, 20 steps", "fp64", 20), ("fp32, 3 steps", "fp32", 3))
    for title, precision, steps in runs:
        config = make_config(layout, schedule, precision, dropless=dropless)
        found[title] = train(config, ctx, steps)[0].difference(train_alone(precision, steps, dropless, ctx.device)[0])
    config = make_config(layout, schedule, "fp64", dropless=dropless)
    found["gradients"] = gradient_difference(config, ctx, train_alone("fp64", 1, dropless, ctx.device)[1])
    return found


def join(
    layout: Layout, environment: LaunchEnvironment, device: torch.device, groups: GroupCache
) -> ParallelContext | None:
    """The context of this rank in `layout`, or None if it takes no part. Call on all ranks."""
    if layout.world == 1:
        return ParallelContext.single(device) if environment.rank == 0 else None
    grid = RankGrid(layout.world, tp=layout.tp, ep=layout.ep, esp=layout.esp)
    launch.make_groups(grid, groups)
    return launch.build_context(grid, environment.rank, device, groups) if environment.rank < layout.world else None


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES), help="default: all")
    parser.add_argument("--dropless", action="store_true", help="no capacity; s2, s2h and deepspeed are left out")
    parser.add_argument("--json", metavar="FILE", help="write the rows to this file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 0 if every row is within the limits, 1 if not."""
    flags = parse(argv)
    rows: list[dict[str, object]] = []

    def work(environment: LaunchEnvironment) -> None:
        timeout = timedelta(minutes=5)
        device, backend, _ = launch.choose_device("auto", environment)
        store = launch.open_store(environment, timeout)
        launch.check_fingerprint({"flags": str(vars(flags))}, environment, store)
        everyone = launch.start(RankGrid(environment.world), environment, store, device, backend, timeout)
        groups = GroupCache(timeout)
        if everyone.rank == 0:
            print(f"{'layout':34} {'schedule':10}" + "".join(f"{title:>17}" for title in LIMITS), flush=True)
        for layout in (layout for layout in LAYOUTS if layout.world <= environment.world):
            ctx = join(layout, environment, device, groups)
            for schedule in flags.schedules:
                if ctx is not None and can_run(schedule, layout, dropless=flags.dropless):
                    found = check(layout, schedule, ctx, dropless=flags.dropless)
                    rows.append({"layout": str(layout), "schedule": schedule, **found})
                    if everyone.rank == 0:
                        print(
                            f"{layout!s:34} {schedule:10}" + "".join(f"{v:17.1e}" for v in found.values()), flush=True
                        )
        launch.shutdown(everyone)

    code = guarded(work)
    if code == 0 and flags.json and rows:
        Path(flags.json).write_text(json.dumps(rows, indent=1))
    is_within = all(row[title] <= limit for row in rows for title, limit in LIMITS.items())  # type: ignore[operator]
    return code or int(not is_within)


if __name__ == "__main__":
    sys.exit(main())
