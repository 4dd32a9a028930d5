#!/usr/bin/env python3
"""Time one MoE layer, forward and backward, under every schedule and number of chunks, interleaved in one run.

    torchrun --nproc-per-node 8 tools/bench_moe_layer.py --tp 4 --esp 4 --seq 512 --hidden 256 --ffn 512 --num-experts 8
    python tools/emulated_cluster.py --nodes 2 --ranks-per-node 4 --intra 1gbit --inter 300mbit -- \\
        tools/bench_moe_layer.py --tp 4 --esp 4 --schedules baseline,s1,s2,s1h,auto --chunks 1,2,4

A time is that of the slowest rank from a common start, in milliseconds. Tokens are per data-parallel rank (--batch x
--seq). `auto` is what the cost model chooses among all schedules and chunks, measured at the start on the same
groups; it is timed in every round like the others. CPU is the processor time of all ranks together. Bytes
are what a rank sends in one forward and backward: read from its interfaces on an emulated cluster, else left out.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_parm.errors import ConfigError
from megatron_parm.moe.calibrate import measure
from megatron_parm.moe.choose import choose, unable
from megatron_parm.moe.cost import CostModel, LayerShape, predict
from megatron_parm.moe.probe import Pass, build_probe
from megatron_parm.moe.schedules import SCHEDULES
from megatron_parm.observe.log import Log
from megatron_parm.observe.timers import device_synchroniser
from megatron_parm.observe.trace import Recording
from megatron_parm.parallel import launch, transport
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.grid import RankGrid
from megatron_parm.parallel.launch import LaunchEnvironment
from megatron_parm.training.entrance import guarded
from megatron_parm.training.tracing import RecordedSpan
from tools.measure.rows import Row, measure_rows

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, text in (
        ("tp", 4, "ranks that share each dense layer"),
        ("esp", 4, "ranks that share each expert"),
        ("ep", 0, "ranks over which the experts are spread (0: all that esp leaves)"),
        ("batch", 1, "samples of a micro-batch"),
        ("seq", 512, "tokens of a sample"),
        ("hidden", 256, "width of the residual stream"),
        ("ffn", 512, "width of one expert"),
        ("num-experts", 8, "experts of the layer"),
        ("topk", 2, "experts a token is sent to"),
        ("iters", 10, "rounds that count"),
        ("warmup", 2, "rounds before them"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default: {default})")
    parser.add_argument("--capacity-factor", type=float, default=1.25, help="negative: no limit (default: 1.25)")
    parser.add_argument("--sequence-parallel", action="store_true", help="input and output are slices over tp")
    parser.add_argument("--pad", action="store_true", help="send empty slots under every schedule")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="default: fp32")
    parser.add_argument("--schedules", default=",".join([*SCHEDULES, "auto"]), help="default: all, and auto")
    parser.add_argument("--chunks", default="1", help="numbers of chunks, with commas (default: 1)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results to this file")
    parser.add_argument("--trace", metavar="FILE", type=Path, help="write a timeline of one more pass of each row")
    return parser.parse_args(argv)


def shape_of(flags: argparse.Namespace, ctx: ParallelContext) -> LayerShape:
    """The layer of the flags."""
    factor = None if flags.capacity_factor < 0 else flags.capacity_factor
    return LayerShape(
        num_tokens=flags.seq * flags.batch,
        hidden_size=flags.hidden,
        ffn_hidden_size=flags.ffn,
        num_experts=flags.num_experts,
        topk=flags.topk,
        capacity_factor=factor,
        min_capacity=1,
        has_slots=factor is not None,
        pads=flags.pad,
        matrices=2,
        bytes_per_element=DTYPES[flags.dtype].itemsize,
        tp=ctx.tp.size,
        ep=ctx.ep.size,
        esp=ctx.esp.size,
        num_nodes=ctx.between.size,
        sequence_parallel=flags.sequence_parallel,
    )


def check(flags: argparse.Namespace, shape: LayerShape) -> None:
    """Raises ConfigError for flags that name nothing that could be timed."""
    shape.check()
    for name in flags.schedules.split(","):
        if name not in (*SCHEDULES, "auto"):
            raise ConfigError(f"--schedules {name}: not known; use {', '.join(SCHEDULES)} or auto")
        why = unable(name, shape)
        if why is not None:
            raise ConfigError(f"--schedules {name}: {why}")
    if not all(word.isdecimal() and int(word) > 0 for word in flags.chunks.split(",")):
        raise ConfigError(f"--chunks {flags.chunks}: expected whole numbers of at least 1, with commas between")
    for name, least in (("iters", 1), ("warmup", 0)):
        if getattr(flags, name) < least:
            raise ConfigError(f"--{name} {getattr(flags, name)} must be at least {least}")


def rows_of(flags: argparse.Namespace, shape: LayerShape, model: CostModel) -> list[Row]:
    """What is to be timed."""
    rows = []
    for name in flags.schedules.split(","):
        if name == "auto":
            choice = choose(shape, model)
            predicted = predict(choice.schedule, choice.chunks, shape, model)
            rows.append(Row("auto", choice.schedule, choice.chunks, predicted))
            continue
        for chunks in map(int, flags.chunks.split(",")):
            rows.append(Row(name, name, chunks, predict(name, chunks, shape, model)))
    return rows


def trace_rows(rows: list[Row], work: Pass, path: Path, ctx: ParallelContext) -> None:
    """Write a timeline of one pass of each row. Call on all ranks; `ctx` and `work` carry a recording."""
    stretch = RecordedSpan(path, ctx, Log(ctx.rank))
    stretch.start()
    for row in rows:
        transport.barrier(ctx.world)
        with ctx.trace.span("pass", schedule=row.schedule, chunks=row.chunks):
            work.run(row.schedule, row.chunks)
    stretch.write(", ".join(f"{row.schedule} x {row.chunks}" for row in rows))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    flags = parse(argv)

    def work(environment: LaunchEnvironment) -> None:
        timeout = timedelta(minutes=5)
        device, backend, _ = launch.choose_device("auto", environment)
        store = launch.open_store(environment, timeout)
        launch.check_fingerprint({"flags": str(vars(flags))}, environment, store)
        grid = RankGrid(environment.world, tp=flags.tp, ep=flags.ep or environment.world // flags.esp, esp=flags.esp)
        ctx = launch.start(grid, environment, store, device, backend, timeout)
        if flags.trace is not None:
            ctx = ctx.traced(Recording())
        shape, dtype = shape_of(flags, ctx), DTYPES[flags.dtype]
        check(flags, shape)
        rows = rows_of(flags, shape, measure(shape, ctx, dtype, device_synchroniser(device)))
        timed = Pass(build_probe(shape, ctx, dtype), shape.num_tokens, ctx)
        measure_rows(rows, timed, flags.warmup, flags.iters, ctx)
        if flags.trace is not None:
            trace_rows(rows, timed, flags.trace, ctx)
        if ctx.rank == 0:
            sent = "  MB sent between and inside nodes" if rows[0].bytes_inter is not None else ""
            times = f"{'median ms':>9} {'p10':>9} {'p90':>9} {'predicted':>11} {'CPU ms':>9}"
            print(f"{'schedule':16} {'chunks':>6} {times}{sent}")
            print("\n".join(row.as_text() for row in rows), flush=True)
            if flags.json is not None:
                facts = {"flags": {k: str(v) for k, v in vars(flags).items()}, "world": ctx.world.size}
                flags.json.write_text(json.dumps({**facts, "results": [row.as_json() for row in rows]}, indent=1))
        launch.shutdown(ctx)

    return guarded(work)


if __name__ == "__main__":
    sys.exit(main())
