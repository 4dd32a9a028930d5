"""Saves and loads a made-up model beside torch.save and torch.load of the same bytes, from the same processes. Floor 8.

    torchrun --standalone --nproc-per-node 4 tools/bench_checkpoint.py --megabytes 400

Each round times all of them one after another, so that a busy machine slows all; the slowest rank counts, and every
file is new and waited for until it is on the disk (--no-sync leaves that out for torch.save). Prints medians and
ratios, the share of a synchronous save for which a save in the background stands still, and the memory that a load
takes beyond the tensors.
"""

import argparse
import json
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository: this runs without an installation

from megatron_parm.checkpoint.background import BackgroundSave
from megatron_parm.checkpoint.find import find_checkpoint
from megatron_parm.checkpoint.load import load_tensors
from megatron_parm.checkpoint.paths import TRACKER
from megatron_parm.checkpoint.save import begin_save, save_checkpoint
from megatron_parm.checkpoint.storage import HostCopies
from megatron_parm.parallel import launch, transport
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.grid import RankGrid
from megatron_parm.parallel.launch import LaunchEnvironment
from megatron_parm.parallel.sharding import Cut, ShardSpec
from megatron_parm.training.entrance import guarded

MEGABYTE = 1 << 20
COLUMNS = 1024
TIMEOUT = timedelta(minutes=10)
Tensors = dict[str, tuple[Tensor, ShardSpec]]


def build_parser() -> argparse.ArgumentParser:
    """The flags of the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.allow_abbrev = False
    parser.add_argument("--megabytes", type=int, default=400, help="size of the whole model (default 400)")
    parser.add_argument("--tensors", type=int, default=40, help="number of its tensors (default 40)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds whose median is told (default 5)")
    parser.add_argument(
        "--folder", type=Path, default=Path("bench_checkpoint"), help="scratch folder, removed at the end"
    )
    parser.add_argument("--no-sync", action="store_true", help="do not wait for torch.save's files to be on the disk")
    return parser


def make_tensors(megabytes: int, count: int, ctx: ParallelContext) -> Tensors:
    """Random tensors cut over tp, which spans all ranks."""
    parts = ctx.tp.size
    rows = max(parts, megabytes * MEGABYTE // (count * COLUMNS * 4) // parts * parts)
    spec = ShardSpec((rows, COLUMNS), (Cut(0, ctx.tp),), "dense", True)
    generator = torch.Generator().manual_seed(ctx.rank)
    return {f"layers.{n}.weight": (torch.randn(spec.local_shape, generator=generator), spec) for n in range(count)}


def seconds_of(action: Callable[[], object], ctx: ParallelContext) -> float:
    """How long the slowest rank takes."""
    transport.barrier(ctx.world)
    started = time.monotonic()
    action()
    return slowest(time.monotonic() - started, ctx)


def slowest(seconds: float, ctx: ParallelContext) -> float:
    """The largest of all ranks."""
    return float(transport.max_over(torch.tensor([seconds], dtype=torch.float64), ctx.world).item())


def torch_save(tensors: Tensors, file: Path, is_synced: bool) -> None:
    """What a rank would do by hand."""
    with file.open("wb") as opened:
        torch.save({name: local for name, (local, _) in tensors.items()}, opened)
        opened.flush()
        if is_synced:
            os.fsync(opened.fileno())


def torch_load(tensors: Tensors, file: Path) -> None:
    """The same back into the tensors."""
    loaded = torch.load(file, weights_only=True)
    for name, (local, _) in tensors.items():
        local.copy_(loaded[name])


def save_in_background(root: Path, tensors: Tensors, memory: HostCopies, ctx: ParallelContext) -> float:
    """Save with copies; the seconds for which training would stand still, without the wait for the writer."""
    started = time.monotonic()
    background = BackgroundSave(begin_save(root, 2, tensors, {}, {}, ctx), ctx, memory)
    stalled = time.monotonic() - started
    while not background.is_written():
        time.sleep(0.01)
    started = time.monotonic()
    background.finish()
    return stalled + time.monotonic() - started


def measure(args: argparse.Namespace, ctx: ParallelContext) -> dict[str, list[float]]:
    """Seconds by what was timed, a round each."""
    root, tensors = args.folder, make_tensors(args.megabytes, args.tensors, ctx)
    by_hand = root / f"torch-{ctx.rank}.pt"
    found: dict[str, list[float]] = {}
    memory = HostCopies()

    def note(name: str, action: Callable[[], object]) -> None:
        found.setdefault(name, []).append(seconds_of(action, ctx))

    for _ in range(args.rounds):
        by_hand.unlink(missing_ok=True)
        if ctx.rank == 0:  # saving a step again, or to a file that is there, would time the removal of the old one
            for folder in root.glob("iter_*"):
                shutil.rmtree(folder)
            (root / TRACKER).unlink(missing_ok=True)
        note("torch.save", lambda: torch_save(tensors, by_hand, not args.no_sync))
        note("save", lambda: save_checkpoint(root, 1, tensors, {}, {}, ctx))
        transport.barrier(ctx.world)
        found.setdefault("stall", []).append(slowest(save_in_background(root, tensors, memory, ctx), ctx))
        note("torch.load", lambda: torch_load(tensors, by_hand))
        note("load, size", lambda: load_tensors(find_checkpoint(root, ctx, verify="size"), tensors, ctx))
        note("load, full", lambda: load_tensors(find_checkpoint(root, ctx, verify="full"), tensors, ctx))
    return found


def memory_of_a_load(args: argparse.Namespace, ctx: ParallelContext) -> list[float]:
    """Of each rank: megabytes by which the peak grows while it loads, per megabyte of its own tensors.

    In a fresh process nothing is touched before: here the peak so far is reset, so the figure is of the load alone.
    """
    tensors = make_tensors(args.megabytes, args.tensors, ctx)
    own = sum(local.nbytes for local, _ in tensors.values())
    with suppress(OSError):  # Linux alone has it; elsewhere the peak of the whole process counts
        Path("/proc/self/clear_refs").write_text("5")
    before = _peak_bytes()
    load_tensors(find_checkpoint(args.folder, ctx, verify="size"), tensors, ctx)
    grown = (_peak_bytes() - before) / own
    return [float(text) for text in transport.gather_text(json.dumps(grown), ctx.world)]


def _peak_bytes() -> int:
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmHWM")]
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def report(found: dict[str, list[float]], memory: list[float], args: argparse.Namespace, ranks: int) -> list[str]:
    """The lines to print."""
    middle = {name: median(values) for name, values in found.items()}
    lines = [f"{args.megabytes} MB in {args.tensors} tensors from {ranks} processes, median of {args.rounds} rounds"]
    for name, reference in (("save", "torch.save"), ("load, size", "torch.load"), ("load, full", "torch.load")):
        ratio = median(ours / theirs for ours, theirs in zip(found[name], found[reference], strict=True))
        lines.append(f"{name}: {middle[name]:.3f} s; {reference}: {middle[reference]:.3f} s; ratio {ratio:.2f}")
    share = median(stall / whole for stall, whole in zip(found["stall"], found["save"], strict=True))
    lines.append(f"in the background: stands still {middle['stall']:.3f} s, {share:.0%} of a save")
    lines.append(f"memory of a load beyond the tensors: at most {max(memory):.2f} of a rank's own share")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print on the first rank. Returns the exit code."""
    args = build_parser().parse_args(argv)

    def work(environment: LaunchEnvironment) -> None:
        store = launch.open_store(environment, TIMEOUT)
        grid = RankGrid(environment.world, tp=environment.world)
        ctx = launch.start(grid, environment, store, torch.device("cpu"), "gloo", TIMEOUT)
        args.folder.mkdir(parents=True, exist_ok=True)
        try:
            found = measure(args, ctx)
            memory = memory_of_a_load(args, ctx)
        finally:
            transport.barrier(ctx.world)
            if ctx.rank == 0:
                shutil.rmtree(args.folder, ignore_errors=True)
        if ctx.rank == 0:
            print("\n".join(report(found, memory, args, ctx.world.size)))
        launch.shutdown(ctx)

    return guarded(work)


if __name__ == "__main__":
    sys.exit(main())
