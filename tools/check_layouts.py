#!/usr/bin/env python3
"""Train one small GPT-MoE on every layout that fits the ranks, and compare each with one process.

    torchrun --nproc-per-node 8 tools/check_layouts.py
    torchrun --nproc-per-node 8 tools/check_layouts.py --full --part 1/4
    torchrun --nproc-per-node 4 tools/check_layouts.py --schedules s1 --dropless

A layout says the sizes of tp, ep, esp and pp, the stages a pipeline rank holds, and whether there are sequence
parallelism, ZeRO-1 and overlapped reductions. Without --full the rows are a pairwise cover: any two of these choices
and schedules that can meet do. Layouts of fewer ranks run on the first ranks.

For each row a line gives the largest relative difference of lm_loss, load_balancing_loss and grad_norm from one process
over 3 steps in float64 and in bf16; of any weight after those of float64, and of any gradient of their first step,
each relative to the largest entry of its parameter. The exit code is 0 if all are within LIMITS. The limit of bf16:
its numbers have 8 bits, so every other order of sums moves a gradient by some 2^-8 of itself; 5 % is a dozen of those.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from itertools import combinations, product
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_parm.config.data import DataConfig
from megatron_parm.config.model import ModelConfig
from megatron_parm.config.moe import MoEConfig, Schedule
from megatron_parm.config.optim import OptimConfig
from megatron_parm.config.parallel import ParallelConfig
from megatron_parm.config.replicas import ReplicaConfig
from megatron_parm.config.run import RunConfig, check_run, resolve
from megatron_parm.config.training import Precision, TrainingConfig
from megatron_parm.data.batches import Batch
from megatron_parm.parallel import launch, transport
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.grid import RankGrid
from megatron_parm.parallel.launch import GroupCache, LaunchEnvironment
from megatron_parm.parallel.sharding import ShardSpec, spec_of
from megatron_parm.training.assemble import make_model, make_schedule
from megatron_parm.training.entrance import guarded
from megatron_parm.training.objective import NEXT_TOKEN
from megatron_parm.training.pipelined import stages_of_run
from megatron_parm.training.step import TrainStep
from megatron_parm.training.updates import make_updates

VOCABULARY, SEQUENCE, MICRO_BATCH, GLOBAL_BATCH = 61, 8, 2, 16
SCHEDULES: tuple[Schedule, ...] = ("baseline", "deepspeed", "s1", "s2", "s1h", "s2h", "s1n")
NEED_SLOTS: tuple[Schedule, ...] = ("deepspeed", "s2", "s2h")
STEPS = 3
LIMITS = {
    "fp64, 3 steps": 1e-9,
    "weights": 1e-8,
    "gradients": 1e-10,
    "bf16, 3 steps": 5e-2,
}


@dataclass(frozen=True)
class Layout:
    """Parallel sizes and ways; `world` ranks take part. `stages`: those that a pipeline rank holds.

    `overlap`: of gradient reductions with backward, under ZeRO-1 of gathered parameters with forward too.
    """

    world: int
    tp: int = 1
    ep: int = 1
    esp: int = 1
    pp: int = 1
    stages: int = 1
    zero_bubble: bool = False
    sequence_parallel: bool = False
    zero1: bool = False
    overlap: bool = False

    def __str__(self) -> str:
        sizes = f"world {self.world}: tp {self.tp}, ep {self.ep}, esp {self.esp}"
        ways = [
            (self.pp > 1, f"pp {self.pp}" + (f" x {self.stages}" if self.stages > 1 else "")),
            (self.zero_bubble, "zero-bubble"),
            (self.sequence_parallel, "sp"),
            (self.zero1, "ZeRO-1"),
            (self.overlap, "overlap"),
        ]
        return ", ".join([sizes, *(text for is_so, text in ways if is_so)])

    @property
    def grid(self) -> RankGrid:
        """Its ranks."""
        return RankGrid(self.world, tp=self.tp, pp=self.pp, ep=self.ep, esp=self.esp)

    @property
    def num_layers(self) -> int:
        """Layers of the model that it trains: enough for its stages."""
        return max(2, self.pp * self.stages)


# world, tp, ep, esp, pp: each axis for itself, then together, with dp and edp where ranks are left
SINGLE_STAGE = ((1,), (2, 2), (2, 1, 2), (4, 2, 2), (4, 2, 2, 2), (4, 4, 2, 2), (4, 1, 2, 2), (8, 2, 2, 2))
SEVERAL = ((2, 1, 1, 1, 2), (4, 2, 1, 2, 2), (4, 1, 2, 1, 2), (4, 1, 1, 1, 4), (8, 2, 2, 1, 4), (8, 1, 4, 1, 2))
LARGEST = ((8, 2, 2, 2, 2), (8, 4, 2, 2, 2))
SIZES = tuple(Layout(*sizes) for sizes in (*SINGLE_STAGE, *SEVERAL, *LARGEST))


def every_way(sizes: Layout) -> list[Layout]:
    """The layouts of these sizes: every combination of the ways that do something there and go together."""
    has_replicas = max(sizes.grid.dp, sizes.grid.edp) > 1
    found = []
    for stages, zero_bubble in ((1, False), (2, False), (1, True)) if sizes.pp == 2 else ((1, False),):
        for is_sliced, zero1, overlap in product((False, True), repeat=3):
            if (is_sliced and sizes.tp == 1) or ((zero1 or overlap) and not has_replicas):
                continue
            if overlap and zero_bubble:  # refused: its gradients come without hooks
                continue
            way = replace(sizes, stages=stages, zero_bubble=zero_bubble, sequence_parallel=is_sliced)
            found.append(replace(way, zero1=zero1, overlap=overlap))
    return found


LAYOUTS = tuple(layout for sizes in SIZES for layout in every_way(sizes))


def can_run(schedule: Schedule, layout: Layout, *, dropless: bool) -> bool:
    """Whether the table has a row for it: some cut slots and need a capacity, deepspeed knows two sizes of esp."""
    return not (dropless and schedule in NEED_SLOTS) and (schedule != "deepspeed" or layout.esp in (1, layout.tp))


def pairwise(rows: Sequence[tuple[Layout, Schedule]]) -> list[tuple[Layout, Schedule]]:
    """Few of the rows, in which any two values of columns that meet in a row do. Greedy, the same every time."""
    pairs = {row: frozenset(combinations(enumerate((*vars(row[0]).values(), row[1])), 2)) for row in rows}
    missing = set().union(*pairs.values())
    chosen = set()
    while missing:
        best = max(rows, key=lambda row: len(pairs[row] & missing))
        missing -= pairs[best]
        chosen.add(best)
    return [row for row in rows if row in chosen]


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
    """A small GPT with 4 experts, top-2; f = E / k, so nothing is dropped, or no capacity at all."""
    config = RunConfig(
        model=ModelConfig(
            num_layers=layout.num_layers,
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
            pipeline_model_parallel_size=layout.pp,
            num_virtual_stages_per_pipeline_rank=layout.stages if layout.stages > 1 else None,
            pipeline_schedule="zero-bubble" if layout.zero_bubble else "auto",
            sequence_parallel=layout.sequence_parallel,
        ),
        replicas=ReplicaConfig(
            use_distributed_optimizer=layout.zero1,
            overlap_grad_reduce=layout.overlap,
            overlap_param_gather=layout.zero1 and layout.overlap,
            ddp_bucket_size=500,
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


@dataclass(frozen=True)
class Trained:
    """What training left: its figures, and this rank's parts of gradients (of the first step) and weights, by name."""

    figures: Figures
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    specs: dict[str, ShardSpec]  # of the weights
    gradient_specs: dict[str, ShardSpec]


def train(config: RunConfig, ctx: ParallelContext, num_steps: int) -> Trained:
    """Train for `num_steps` steps. Call on all ranks of `ctx`."""
    built, _, _ = make_model(config, VOCABULARY, ctx)
    updates = make_updates(config, built, ctx)
    schedule, buffers = make_schedule(config), updates.buffers
    step = TrainStep(
        stages_of_run(config, built, buffers, NEXT_TOKEN, ctx),
        buffers,
        updates.optimizer,
        ctx,
        max_norm=0.0,
        per_token_loss=False,
        reduction=updates.reduction,
        loss_scale=updates.loss_scale,
    )
    stream, steps = batches(ctx), []
    gradients: dict[str, Tensor] = {}
    num_micro_batches = GLOBAL_BATCH // (MICRO_BATCH * ctx.dp.size)
    for iteration in range(num_steps):
        built.record.clear()
        samples = iteration * GLOBAL_BATCH
        result = step.run(stream, num_micro_batches, schedule.learning_rate(samples), 0.01)
        summary = built.record.summarise(ctx, 2)
        assert summary is not None
        steps.append((result.lm_loss, summary.load_balancing_loss, result.grad_norm))
        gradients = gradients or {name: buffers.reduced(name).clone() for name in buffers.parameters}
    updates.optimizer.settle()
    return Trained(
        Figures(tuple(steps)),
        gradients,
        {name: parameter.detach().clone() for name, parameter in buffers.parameters.items()},
        {name: spec_of(parameter) for name, parameter in buffers.parameters.items()},
        {name: buffers.reduced_spec(name) for name in buffers.parameters},
    )


@cache
def train_alone(
    precision: Precision, num_steps: int, dropless: bool, device: torch.device, num_layers: int = 2
) -> Trained:
    """The same of one process: what every row is compared with."""
    config = make_config(Layout(1), "baseline", precision, dropless=dropless)
    config = replace(config, model=replace(config.model, num_layers=num_layers))
    return train(config, ParallelContext.single(device), num_steps)


def largest_difference(
    found: dict[str, Tensor], specs: dict[str, ShardSpec], wanted: dict[str, Tensor], ctx: ParallelContext
) -> float:
    """The largest difference of any tensor, relative to the parameter's largest entry, over all ranks."""
    worst = torch.zeros((), dtype=torch.float64, device=ctx.device)
    for name, tensor in found.items():
        whole = torch.zeros(specs[name].global_shape, dtype=tensor.dtype, device=ctx.device)
        alone = wanted[name].to(ctx.device)  # its vocabulary may have fewer rows of padding
        whole[: alone.shape[0]] = alone
        largest = whole.abs().max().clamp(min=1e-6)  # one that is zero but for rounding has no scale of its own
        if tensor.numel():
            difference = (tensor - whole[specs[name].box]).abs().max() / largest
            worst = torch.maximum(worst, difference.nan_to_num(torch.inf, torch.inf))
    return transport.max_over(worst, ctx.world).item()


def gradient_difference(config: RunConfig, ctx: ParallelContext, wanted: dict[str, Tensor]) -> float:
    """The largest difference of any gradient after one step. Call on all ranks."""
    found = train(config, ctx, 1)
    return largest_difference(found.gradients, found.gradient_specs, wanted, ctx)


def check(layout: Layout, schedule: Schedule, ctx: ParallelContext, *, dropless: bool) -> dict[str, float]:
    """The differences of one row of the table. Call on all ranks of `ctx`."""

    def run(precision: Precision) -> tuple[Trained, Trained]:
        config = make_config(layout, schedule, precision, dropless=dropless)
        alone = train_alone(precision, STEPS, dropless, ctx.device, layout.num_layers)
        return train(config, ctx, STEPS), alone

    exact, alone = run("fp64")
    coarse, coarse_alone = run("bf16")
    return {
        "fp64, 3 steps": exact.figures.difference(alone.figures),
        "weights": largest_difference(exact.weights, exact.specs, alone.weights, ctx),
        "gradients": largest_difference(exact.gradients, exact.gradient_specs, alone.gradients, ctx),
        "bf16, 3 steps": coarse.figures.difference(coarse_alone.figures),
    }


def join(
    layout: Layout, environment: LaunchEnvironment, device: torch.device, groups: GroupCache
) -> ParallelContext | None:
    """The context of this rank in `layout`, or None if it takes no part. Call on all ranks."""
    if layout.world == 1:
        return ParallelContext.single(device) if environment.rank == 0 else None
    grid = layout.grid
    launch.make_groups(grid, groups)
    return launch.build_context(grid, environment.rank, device, groups) if environment.rank < layout.world else None


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES), help="default: all")
    parser.add_argument("--full", action="store_true", help="every layout with every schedule")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="the I-th of N parts of the rows; default: all")
    parser.add_argument("--dropless", action="store_true", help="no capacity; s2, s2h and deepspeed are left out")
    parser.add_argument("--json", metavar="FILE", help="write the rows to this file")
    return parser.parse_args(argv)


def rows_of(flags: argparse.Namespace, world: int) -> list[tuple[Layout, Schedule]]:
    """The rows that the flags ask for and `world` ranks can run."""
    rows = [
        (layout, schedule)
        for layout in LAYOUTS
        for schedule in flags.schedules
        if layout.world <= world and can_run(schedule, layout, dropless=flags.dropless)
    ]
    number, parts = map(int, flags.part.split("/"))
    return (rows if flags.full else pairwise(rows))[number - 1 :: parts]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 0 if every row is within the limits, 1 if not."""
    flags = parse(argv)
    rows: list[dict[str, object]] = []

    def work(environment: LaunchEnvironment) -> None:
        timeout = timedelta(hours=1)  # ranks that take no part in a row wait for the next
        device, backend, _ = launch.choose_device("auto", environment)
        store = launch.open_store(environment, timeout)
        launch.check_fingerprint({"flags": str(vars(flags))}, environment, store)
        everyone = launch.start(RankGrid(environment.world), environment, store, device, backend, timeout)
        groups = GroupCache(timeout)
        if everyone.rank == 0:
            print(f"{'layout':62} {'schedule':10}" + "".join(f"{title:>17}" for title in LIMITS), flush=True)
        for layout, schedule in rows_of(flags, environment.world):
            ctx = join(layout, environment, device, groups)
            if ctx is not None:
                found = check(layout, schedule, ctx, dropless=flags.dropless)
                rows.append({"layout": str(layout), "schedule": schedule, **found})
                if everyone.rank == 0:
                    print(f"{layout!s:62} {schedule:10}" + "".join(f"{v:17.1e}" for v in found.values()), flush=True)
        if everyone.rank == 0 and flags.json:  # which takes part in every row
            Path(flags.json).write_text(json.dumps(rows, indent=1))
        launch.shutdown(everyone)

    code = guarded(work)
    is_within = all(row[title] <= limit for row in rows for title, limit in LIMITS.items())  # type: ignore[operator]
    return code or int(not is_within)


if __name__ == "__main__":
    sys.exit(main())
