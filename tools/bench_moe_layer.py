#!/usr/bin/env python3
"""Time one MoE layer, forward and backward, under every schedule and number of chunks, interleaved in one run.

    torchrun --nproc-per-node 8 tools/bench_moe_layer.py --tp 4 --esp 4 --seq 512 --hidden 256 --ffn 512 --num-experts 8
    python tools/emulated_cluster.py --nodes 2 --ranks-per-node 4 --intra 1gbit --inter 300mbit -- \\
        tools/bench_moe_layer.py --tp 4 --esp 4 --schedules baseline,s1,s2,s1h --chunks 1,2,4

A time is that of the slowest rank from a common start. Tokens are per data-parallel rank (--batch x --seq).
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_parm.layers.initialise import Initialiser, initialise_weights
from megatron_parm.moe.experts import Experts
from megatron_parm.moe.gate import Gate, GateSettings
from megatron_parm.moe.layer import MoELayer
from megatron_parm.moe.losses import BackwardScale
from megatron_parm.moe.record import RoutingRecord
from megatron_parm.parallel import launch, transport
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.grid import RankGrid
from megatron_parm.parallel.launch import LaunchEnvironment
from megatron_parm.training.entrance import guarded


@dataclass(frozen=True)
class Candidate:
    """A schedule in a number of chunks."""

    schedule: str
    chunks: int

    def __str__(self) -> str:
        return f"{self.schedule} x{self.chunks}"


def build_layer(flags: argparse.Namespace, ctx: ParallelContext) -> MoELayer:
    """The layer of the flags; two matrices and GELU, no bias, as the peers have it."""
    settings = GateSettings(
        num_experts=flags.num_experts,
        topk=flags.topk,
        capacity_factor=flags.capacity_factor,
        eval_capacity_factor=flags.capacity_factor,
        min_capacity=1,
        drop_policy="probs",
        pads_to_capacity=flags.pad,
        pre_softmax=False,
        balance_coefficient=0.01,
        z_coefficient=None,
        router_dtype=torch.float32,
    )
    initialiser = Initialiser("normal", 0.02)
    made: dict[str, Any] = {"dtype": torch.float32, "device": ctx.device}
    gate = Gate(
        flags.hidden,
        settings,
        layer=0,
        tp=ctx.tp,
        scale=BackwardScale(),
        record=RoutingRecord(),
        initialiser=initialiser,
        **made,
    )
    experts = Experts(
        flags.hidden,
        flags.ffn,
        flags.num_experts,
        activation="gelu",
        bias=False,
        ep=ctx.ep,
        esp=ctx.esp,
        initialiser=initialiser,
        output_initialiser=initialiser,
        **made,
    )
    layer = MoELayer(gate, experts, schedule="s1", ctx=ctx)
    initialise_weights(layer, 1234)
    return layer


def time_once(layer: MoELayer, candidate: Candidate, x: Tensor, gradient: Tensor, ctx: ParallelContext) -> float:
    """Milliseconds of the slowest rank."""
    layer.schedule, layer.chunks = candidate.schedule, candidate.chunks
    x.grad = None
    transport.barrier(ctx.world)
    started = time.perf_counter()
    layer(x).backward(gradient)
    elapsed = torch.tensor([(time.perf_counter() - started) * 1000], device=ctx.device)
    return float(transport.max_over(elapsed, ctx.world).item())


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tp", 4), ("esp", 4), ("ep", 0), ("batch", 1), ("seq", 512), ("hidden", 256), ("ffn", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--num-experts", type=int, default=8)
    parser.add_argument("--topk", type=int, default=2)
    parser.add_argument("--capacity-factor", type=float, default=1.25)
    parser.add_argument("--pad", action="store_true", help="send empty slots too")
    parser.add_argument("--schedules", default="baseline,s1,s2,s1h,s2h")
    parser.add_argument("--chunks", default="1")
    parser.add_argument("--iters", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--json")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    flags = parse(argv)

    def work(environment: LaunchEnvironment) -> None:
        torch.set_num_threads(1)
        timeout = timedelta(minutes=5)
        device, backend, _ = launch.choose_device("auto", environment)
        store = launch.open_store(environment, timeout)
        grid = RankGrid(environment.world, tp=flags.tp, ep=flags.ep or environment.world // flags.esp, esp=flags.esp)
        ctx = launch.start(grid, environment, store, device, backend, timeout)
        layer = build_layer(flags, ctx)
        generator = torch.Generator().manual_seed(ctx.dp.rank)
        shape = (flags.seq, flags.batch, flags.hidden)
        x = torch.randn(shape, generator=generator).to(device).requires_grad_()
        gradient = torch.randn(shape, generator=generator).to(device)
        candidates = [Candidate(s, int(c)) for s in flags.schedules.split(",") for c in flags.chunks.split(",")]
        times: dict[Candidate, list[float]] = {candidate: [] for candidate in candidates}
        for iteration in range(flags.warmup + flags.iters):
            for candidate in candidates:
                elapsed = time_once(layer, candidate, x, gradient, ctx)
                if iteration >= flags.warmup:
                    times[candidate].append(elapsed)
        if ctx.rank == 0:
            results = []
            for candidate, values in times.items():
                tenths = quantiles(values, n=10) if len(values) > 1 else values * 9
                print(
                    f"{candidate!s:14} median {median(values):8.1f} ms   p10 {tenths[0]:8.1f}   p90 {tenths[-1]:8.1f}",
                    flush=True,
                )
                results.append(
                    {
                        "schedule": candidate.schedule,
                        "chunks": candidate.chunks,
                        "median_ms": median(values),
                        "p10_ms": tenths[0],
                        "p90_ms": tenths[-1],
                    }
                )
            if flags.json:
                Path(flags.json).write_text(json.dumps({"results": results}, indent=1))
        launch.shutdown(ctx)

    return guarded(work)


if __name__ == "__main__":
    sys.exit(main())
