#!/usr/bin/env python3
"""Time a grid of MoE layers, every schedule and auto interleaved for each, and judge what auto chose.

    python tools/emulated_cluster.py --nodes 2 --ranks-per-node 4 --intra 1gbit --inter 300mbit -- \\
        tools/bench_layer_grid.py --results grid.jsonl --csv grid.csv --picture grid.png
    python tools/bench_layer_grid.py --results grid.jsonl --csv grid.csv --picture grid.png --only-judge

Also under torchrun. The layers are 48 standard ones or those of --grid, a CSV file; --write-grid writes the standard
ones as such a file. Each line of --results is a layer with all its rows; layers that are there already are not measured
again, so an interrupted run goes on. The cost model is measured for each layer (--calibrate shape), or once for each
pair of tp and esp (--calibrate layout, kept in --moe-cost-model). Regret is by how much the row of the candidate that
auto chose exceeds the best row. Baseline and deepspeed run in one chunk unless --chunk-all.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_parm.errors import ConfigError, MegatronParmError
from megatron_parm.moe.calibrate import cluster_key, from_json, keep_model, measure, read_models, to_json
from megatron_parm.moe.choose import choose, unable
from megatron_parm.moe.cost import CostModel, LayerShape, predict
from megatron_parm.moe.probe import Pass, build_probe
from megatron_parm.moe.schedules import SCHEDULES
from megatron_parm.observe.timers import device_synchroniser
from megatron_parm.parallel import launch, transport
from megatron_parm.parallel.agreement import on_all_ranks
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.grid import RankGrid
from megatron_parm.parallel.launch import GroupCache, LaunchEnvironment, build_context
from megatron_parm.training.entrance import guarded
from tools.measure.facts import machine_facts
from tools.measure.layer_grid import (
    STANDARD_GRID,
    GridPoint,
    as_lines,
    judge,
    read_grid,
    read_results,
    summarise,
    write_csv,
    write_grid,
)
from tools.measure.rows import Row, measure_rows

ONE_CHUNK = ("baseline", "deepspeed")
TIMEOUT = timedelta(minutes=10)
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#000000")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="JSON lines, one a layer; appended to")
    parser.add_argument("--grid", type=Path, help="CSV file of layers (default: 48 standard ones)")
    parser.add_argument("--write-grid", type=Path, help="write the list of layers to this file, and end")
    parser.add_argument("--schedules", default=",".join(SCHEDULES), help="default: all")
    parser.add_argument("--chunks", default="1,2,4", help="numbers of chunks, with commas (default: 1,2,4)")
    parser.add_argument("--chunk-all", action="store_true", help="baseline and deepspeed in chunks too")
    parser.add_argument("--calibrate", choices=("shape", "layout"), default="shape", help="default: shape")
    parser.add_argument("--moe-cost-model", type=Path, help="file to take models of layouts from and keep them in")
    parser.add_argument("--only-calibrate", action="store_true", help="fill --moe-cost-model for every layout, and end")
    parser.add_argument("--iters", type=int, default=5, help="rounds that count (default: 5)")
    parser.add_argument("--warmup", type=int, default=1, help="rounds before them (default: 1)")
    parser.add_argument("--max-shapes", type=int, default=0, help="measure at most so many (default: all)")
    parser.add_argument(
        "--max-minutes", type=float, default=0.0, help="begin no layer after so long (default: no limit)"
    )
    parser.add_argument("--csv", type=Path, help="write all rows of --results to this CSV file")
    parser.add_argument("--picture", type=Path, help="draw predicted against measured")
    parser.add_argument("--only-judge", action="store_true", help="measure nothing; judge what --results holds")
    return parser.parse_args(argv)


def check(flags: argparse.Namespace) -> None:
    """Raises ConfigError for flags that name nothing that could be timed."""
    for name in flags.schedules.split(","):
        if name not in SCHEDULES:
            raise ConfigError(f"--schedules {name}: not known; use {', '.join(SCHEDULES)}")
    if not all(word.isdecimal() and int(word) > 0 for word in flags.chunks.split(",")):
        raise ConfigError(f"--chunks {flags.chunks}: expected whole numbers of at least 1, with commas between")
    if flags.only_calibrate and (flags.moe_cost_model is None or flags.calibrate != "layout"):
        raise ConfigError("--only-calibrate needs --moe-cost-model FILE and --calibrate layout")
    for name, least in (("iters", 1), ("warmup", 0), ("max_shapes", 0), ("max_minutes", 0)):
        if getattr(flags, name) < least:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(flags, name)} must be at least {least}")


def rows_of(flags: argparse.Namespace, shape: LayerShape, model: CostModel) -> list[Row]:
    """Every candidate that can run the shape, and auto at the end."""
    rows = []
    counts = [int(word) for word in flags.chunks.split(",")]
    for name in flags.schedules.split(","):
        if unable(name, shape) is None:
            own = counts if flags.chunk_all or name not in ONE_CHUNK else counts[:1]
            rows += [Row(name, name, chunks, predict(name, chunks, shape, model)) for chunks in own]
    choice = choose(shape, model)
    predicted = predict(choice.schedule, choice.chunks, shape, model)
    return [*rows, Row("auto", choice.schedule, choice.chunks, predicted)]


class Measurement:
    """The layers of a grid, one after the other on the same processes. Call every method on all ranks."""

    def __init__(self, flags: argparse.Namespace, first: ParallelContext) -> None:
        self.flags, self.first = flags, first
        self.nodes = transport.gather_text(first.node, first.world)
        self.groups = GroupCache(TIMEOUT)
        self.models: dict[tuple[int, int], CostModel] = {}

    def context(self, point: GridPoint) -> ParallelContext:
        """The groups of the point's layout; those that exist are used again."""
        world = self.first.world.size
        if world == 1:
            return self.first
        grid = RankGrid(world, tp=point.tp, ep=world // point.esp, esp=point.esp)
        return build_context(grid, self.first.rank, self.first.device, self.groups, self.nodes)

    def model(self, point: GridPoint, ctx: ParallelContext) -> CostModel:
        """The cost model for a point: measured for its shape, or its layout's, from the file where that has it."""
        layout, path = (point.tp, point.esp), self.flags.moe_cost_model
        if self.flags.calibrate == "layout" and layout in self.models:
            return self.models[layout]
        kept = "null"
        if self.flags.calibrate == "layout" and path is not None:
            key = cluster_key(ctx)
            own = on_all_ranks(ctx.world, lambda: read_models(path).get(key) if ctx.rank == 0 else None)
            kept = transport.broadcast_text(json.dumps(None if own is None else to_json(own)), ctx.world)
        found = None if json.loads(kept) is None else from_json(json.loads(kept))
        if found is None:
            shape = point.shape(ctx.world.size, ctx.between.size)
            found = measure(shape, ctx, torch.float32, device_synchroniser(ctx.device))
            if path is not None and self.flags.calibrate == "layout":
                model = found
                on_all_ranks(ctx.world, lambda: keep_model(path, key, model) if ctx.rank == 0 else None)
        self.models[layout] = found
        return found

    def run(self, point: GridPoint) -> dict[str, Any]:
        """All rows of one layer."""
        ctx = self.context(point)
        shape = point.shape(ctx.world.size, ctx.between.size)
        model = self.model(point, ctx)
        rows = rows_of(self.flags, shape, model)
        work = Pass(build_probe(shape, ctx, torch.float32), shape.num_tokens, ctx)
        measure_rows(rows, work, self.flags.warmup, self.flags.iters, ctx)
        return {
            "key": point.key,
            "point": asdict(point),
            "world": ctx.world.size,
            "nodes": len(set(self.nodes)),
            "calibrate": self.flags.calibrate,
            "results": [row.as_json() for row in rows],
            "cost_model": to_json(model),
        }


def measure_grid(flags: argparse.Namespace, points: Sequence[GridPoint], ctx: ParallelContext) -> None:
    """Append a line to --results for every point that it lacks. Call on all ranks."""
    for point in points:
        point.shape(ctx.world.size, 1)  # every wrong point is found before the first is measured
    if ctx.rank == 0:
        flags.results.parent.mkdir(parents=True, exist_ok=True)
    kept = transport.broadcast_text(
        json.dumps(on_all_ranks(ctx.world, lambda: sorted(read_results(flags.results)) if ctx.rank == 0 else [])),
        ctx.world,
    )
    left = [point for point in points if point.key not in set(json.loads(kept))]
    left = left[: flags.max_shapes or len(left)]
    work, facts, started = Measurement(flags, ctx), machine_facts(), time.monotonic()
    for number, point in enumerate(left):
        spent = _agreed_seconds(started, ctx)
        if flags.max_minutes and spent > 60 * flags.max_minutes:
            break
        result = {**work.run(point), "facts": facts}
        if ctx.rank == 0:
            with flags.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
            spent = time.monotonic() - started
            to_go = spent / (number + 1) * (len(left) - number - 1)
            one = judge(result)
            print(
                f"{number + 1}/{len(left)} {point.key}: best {one.best[0]} x {one.best[1]}, auto {one.chosen[0]} x "
                f"{one.chosen[1]}, regret {one.regret:.1%}; about {to_go / 60:.1f} minutes left",
                flush=True,
            )


def calibrate(flags: argparse.Namespace, points: Sequence[GridPoint], ctx: ParallelContext) -> None:
    """Fill --moe-cost-model for the layouts of `points`, by the first point of each. Call on all ranks."""
    work = Measurement(flags, ctx)
    for point in {(point.tp, point.esp): point for point in reversed(points)}.values():
        own = work.context(point)
        model = work.model(point, own)
        if ctx.rank == 0:
            fit = min(line.r2 for line in model.lines.values())
            print(f"tp {point.tp}, esp {point.esp}: {len(model.lines)} lines, the poorest r2 {fit:.4f}", flush=True)


def _agreed_seconds(started: float, ctx: ParallelContext) -> float:
    """The same number on every rank, for a decision that all must make alike."""
    own = torch.tensor([time.monotonic() - started], device=ctx.device)
    return transport.max_over(own, ctx.world).item()


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Predicted against measured milliseconds of every row, a colour for each schedule."""
    figure = Figure(figsize=(7, 6), dpi=130, layout="constrained")
    axes = figure.subplots()
    ends = []
    for name, colour in zip(SCHEDULES, COLOURS, strict=False):
        rows = [row for result in results for row in result["results"] if row["schedule"] == name]
        x, y = [row["median_ms"] for row in rows], [row["predicted_ms"] for row in rows]
        axes.scatter(x, y, s=14, color=colour, alpha=0.7, label=name, linewidths=0)
        ends += x + y
    low, high = min(ends), max(ends)
    axes.plot([low, high], [low, high], color="#444444", linewidth=1, label="equal")
    axes.fill_between([low, high], [low * 0.85, high * 0.85], [low * 1.15, high * 1.15], color="#888888", alpha=0.15)
    axes.set(xscale="log", yscale="log", xlabel="measured, ms", ylabel="predicted, ms")
    axes.set_title(f"Forward and backward of {len(results)} MoE layers; the band is 15 %")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def show(flags: argparse.Namespace, points: Sequence[GridPoint]) -> None:
    """Print the table, write the CSV file and the picture."""
    found = read_results(flags.results)
    results = [found[point.key] for point in points if point.key in found]
    print("\n".join(as_lines([judge(result) for result in results], summarise(results))), flush=True)
    if flags.csv is not None:
        write_csv(flags.csv, results)
    if flags.picture is not None:
        draw(results, flags.picture)


def _alone(action: Callable[[], None]) -> int:
    """Run what needs no ranks; returns the exit code."""
    try:
        action()
    except MegatronParmError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and judge; returns the exit code."""
    flags = parse(argv)

    def points() -> Sequence[GridPoint]:
        return STANDARD_GRID if flags.grid is None else read_grid(flags.grid)

    if flags.write_grid is not None:
        return _alone(lambda: write_grid(flags.write_grid, points()))
    if flags.only_judge:
        return _alone(lambda: show(flags, points()))

    def work(environment: LaunchEnvironment) -> None:
        check(flags)
        device, backend, _ = launch.choose_device("auto", environment)
        store = launch.open_store(environment, TIMEOUT)
        launch.check_fingerprint({"flags": str(vars(flags))}, environment, store)
        ctx = launch.start(RankGrid(environment.world), environment, store, device, backend, TIMEOUT)
        if flags.only_calibrate:
            calibrate(flags, points(), ctx)
        else:
            measure_grid(flags, points(), ctx)
        if ctx.rank == 0 and not flags.only_calibrate:
            show(flags, points())
        launch.shutdown(ctx)

    return guarded(work)


if __name__ == "__main__":
    sys.exit(main())
