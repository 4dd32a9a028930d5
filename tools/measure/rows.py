"""A schedule and what was measured of it, one pass of each in every round."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles

import torch

from megatron_parm.moe.probe import Pass
from megatron_parm.observe.timers import device_synchroniser
from megatron_parm.parallel import transport
from megatron_parm.parallel.context import ParallelContext
from tools.cluster.counters import own_traffic


@dataclass
class Row:
    """A schedule in a number of chunks, and what was measured of it."""

    label: str
    schedule: str
    chunks: int
    predicted_ms: float
    times_ms: list[float] = field(default_factory=list)
    bytes_intra: float | None = None
    bytes_inter: float | None = None
    processor_ms: list[float] = field(default_factory=list)

    def as_json(self) -> dict[str, object]:
        """The row as `--json` writes it."""
        low, high = spread(self.times_ms)
        values: dict[str, object] = {
            "schedule": self.label,
            "chunks": self.chunks,
            "median_ms": median(self.times_ms),
            "p10_ms": low,
            "p90_ms": high,
            "predicted_ms": self.predicted_ms,
            "processor_ms": median(self.processor_ms),
            "bytes_intra": self.bytes_intra,
            "bytes_inter": self.bytes_inter,
        }
        if self.label == "auto":
            values["chosen"] = {"schedule": self.schedule, "chunks": self.chunks}
        return values

    def as_text(self) -> str:
        """The row as it is printed."""
        low, high = spread(self.times_ms)
        name = f"{self.label} ({self.schedule})" if self.label == "auto" else self.label
        sent = (
            f"  {self.bytes_inter / 1e6:8.2f} {self.bytes_intra / 1e6:8.2f}"
            if self.bytes_inter is not None and self.bytes_intra is not None
            else ""
        )
        times = f"{median(self.times_ms):9.1f} {low:9.1f} {high:9.1f} {self.predicted_ms:11.1f}"
        times += f" {median(self.processor_ms):9.1f}"
        return f"{name:16} {self.chunks:6} {times}{sent}"


def spread(values: Sequence[float]) -> tuple[float, float]:
    """The first and the last tenth."""
    tenths = quantiles(values, n=10, method="inclusive") if len(values) > 1 else [values[0]]
    return tenths[0], tenths[-1]


def measure_rows(rows: Sequence[Row], work: Pass, warmup: int, iters: int, ctx: ParallelContext) -> None:
    """Fill the rows, one pass of each in every round. Call on all ranks."""
    synchronise = device_synchroniser(ctx.device)
    for round_number in range(warmup + iters):
        for row in rows:
            transport.barrier(ctx.world)
            before = own_traffic()
            transport.barrier(ctx.world)
            started, worked = time.perf_counter(), time.process_time()
            work.run(row.schedule, row.chunks)
            synchronise()
            elapsed = torch.tensor([(time.perf_counter() - started) * 1000], device=ctx.device)
            busy = torch.tensor([(time.process_time() - worked) * 1000], device=ctx.device)
            slowest = transport.max_over(elapsed, ctx.world).item()
            busy = transport.sum_over(busy, ctx.world)
            if round_number < warmup:
                continue
            row.times_ms.append(slowest)
            row.processor_ms.append(busy.item())
            after = own_traffic()
            if before is not None and after is not None:
                spent = after - before
                row.bytes_inter, row.bytes_intra = float(spent.inter.sent), float(spent.intra.sent)
