"""What the peers' programs share: the layer's flags, the device, and timing that is that of our own benchmark."""

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

SIZES = {"tp": 4, "ep": 2, "esp": 4, "tokens": 512, "hidden": 256, "ffn": 512, "num-experts": 8, "topk": 2}


def layer_flags(description: str | None) -> argparse.ArgumentParser:
    """The flags of one layer; `tokens` are those of a data-parallel rank."""
    parser = argparse.ArgumentParser(description=description)
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--capacity-factor", type=float, default=1.25)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--iters", type=int, default=10)
    parser.add_argument("--json", type=Path, required=True)
    return parser


def prepare() -> torch.device:
    """This rank's device; one thread a rank on a CPU."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        return torch.device("cuda", torch.cuda.current_device())
    torch.set_num_threads(1)
    return torch.device("cpu")


def time_rounds(step: Callable[[], object], warmup: int, iters: int, device: torch.device) -> list[float]:
    """Milliseconds of the slowest rank from a common start, of each round after the warm-up."""
    times = []
    for number in range(warmup + iters):
        dist.barrier()
        started = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        elapsed = torch.tensor([(time.perf_counter() - started) * 1000], device=device)
        dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
        if number >= warmup:
            times.append(elapsed.item())
    return times


def finish(path: Path, program: str, version: str, times_ms: Sequence[float], **facts: object) -> None:
    """Write the result from rank 0, and leave together."""
    if dist.get_rank() == 0:
        found = {"program": program, "version": version, "median_ms": median(times_ms), "times_ms": list(times_ms)}
        path.write_text(json.dumps({**found, **facts}))
    dist.barrier()
    dist.destroy_process_group()
