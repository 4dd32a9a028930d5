"""Megatron's console lines, to the letter: field order, separators and formats that users' parsers know. Floor 2.

Source: `training_log` and `evaluate_and_print_results` of Megatron-LM 2.5; the timers of Megatron-Core.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from megatron_parm.observe.records import EndRecord, Record, SaveRecord, StartRecord, TrainRecord, ValidRecord

TimingOption = Literal["max", "minmax", "all"]

LARGEST_EXPONENT = 20.0  # Megatron's cap: a perplexity is exp(min(20, loss))


def perplexity(loss: float) -> float:
    """`exp(loss)`, capped as Megatron caps it; NaN stays NaN."""
    return math.nan if math.isnan(loss) else math.exp(min(LARGEST_EXPONENT, loss))


def train_line(record: TrainRecord, is_throughput_shown: bool = False) -> str:
    """The line of an iteration, or of an interval whose means `record` holds."""
    fields = [
        f"iteration {record.iteration:8d}/{record.train_iters:8d}",
        f"consumed samples: {record.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {record.iteration_time_ms:.1f}",
    ]
    if is_throughput_shown:
        fields.append(f"throughput per GPU (TFLOP/s/GPU): {record.throughput.tflops_per_second_per_device:.1f}")
    fields.append(f"learning rate: {record.learning_rate:.3E}")
    fields.append(f"global batch size: {record.global_batch_size:5d}")
    fields += [f"{name}: {loss:.6E}" for name, loss in record.losses.items()]
    fields.append(f"loss scale: {record.loss_scale:.1f}")
    if record.grad_norm is not None:
        fields.append(f"grad norm: {record.grad_norm:.3f}")
    if record.num_zeros is not None:
        fields.append(f"num zeros: {record.num_zeros:.1f}")
    if record.params_norm is not None:
        fields.append(f"params norm: {record.params_norm:.3f}")
    fields.append(f"number of skipped iterations: {record.skipped:3d}")
    fields.append(f"number of nan iterations: {record.nan:3d}")
    return " " + " | ".join(fields) + " |"


def time_lines(spans_ms: Mapping[str, Sequence[float]], option: TimingOption) -> list[str]:
    """The timers' lines (--timing-log-option): the slowest rank, the fastest and the slowest, or all of them."""
    if option == "all":
        lines = ["times across ranks (ms):"]
        for name, times in spans_ms.items():
            lines.append(f"  {name}:")
            lines += [f"     rank {rank:2d}: {time:.2f}" for rank, time in enumerate(times)]
        return lines
    lines = ["max time across ranks (ms):" if option == "max" else "(min, max) time across ranks (ms):"]
    for name, times in spans_ms.items():
        shown = f"{max(times):.2f}" if option == "max" else f"({min(times):.2f}, {max(times):.2f})"
        lines.append(f"    {(name + ' ').ljust(48, '.')}: {shown}")
    return lines


def valid_lines(record: ValidRecord) -> list[str]:
    """The validation line between its two rules."""
    text = f" validation loss at {record.place or f'iteration {record.iteration}'} | "
    for name, loss in record.losses.items():
        text += f"{name} value: {loss:.6E} | {name} PPL: {perplexity(loss):.6E} | "
    rule = "-" * (len(text) + 1)
    return [rule, text, rule]


def start_lines(record: StartRecord) -> list[str]:
    """What runs: version, layout, size and MoE schedule with its reason."""
    layout = ", ".join(f"{name} {size}" for name, size in record.layout.items())
    lines = [
        f" > megatron_parm {record.version}, from iteration {record.iteration}",
        f" > layout: {layout}",
        f" > parameters: {record.parameters.total:,} in all, at most {record.parameters.per_rank:,} on a rank",
    ]
    if record.moe_schedule is not None:
        choice = record.moe_schedule
        chunks = "1 chunk" if choice.chunks == 1 else f"{choice.chunks} chunks"
        lines.append(f" > MoE schedule: {choice.name} in {chunks} ({choice.reason})")
    return lines


class _Interval:
    """Sums of the iterations since the last printed line."""

    def __init__(self) -> None:
        self.count = 0
        self.advanced = 0
        self.skipped = 0
        self.nan = 0
        self.time_ms = 0.0
        self.tflop_ms = 0.0
        self.losses: dict[str, float] = {}

    def add(self, record: TrainRecord) -> None:
        """Count one iteration; the losses of a skipped one are left out, as in Megatron."""
        self.count += 1
        self.skipped += record.skipped
        self.nan += record.nan
        self.time_ms += record.iteration_time_ms
        self.tflop_ms += record.throughput.tflops_per_second_per_device * record.iteration_time_ms
        if not record.skipped:
            self.advanced += 1
            for name, loss in record.losses.items():
                self.losses[name] = self.losses.get(name, 0.0) + loss


class ConsoleSink:
    """Prints the records; training lines every `interval` iterations, with the means over them.

    Learning rate, loss scale and norms are those of the last iteration; skipped and nan iterations are counts.
    `say` takes one line (`Log.say`).
    """

    def __init__(
        self,
        say: Callable[[str], None],
        interval: int = 1,
        is_throughput_shown: bool = False,
        timing_option: TimingOption = "minmax",
    ) -> None:
        self._say = say
        self._timing_option = timing_option
        self._every = interval
        self._is_throughput_shown = is_throughput_shown
        self._interval = _Interval()

    def write(self, record: Record) -> None:
        """Print what this record has for people."""
        match record:
            case StartRecord():
                lines = start_lines(record)
            case TrainRecord():
                lines = self._train_lines(record)
            case ValidRecord():
                lines = valid_lines(record)
            case SaveRecord():
                lines = [f"  successfully saved checkpoint at iteration {record.iteration:7d} to {record.path}"]
            case EndRecord():
                lines = [f" > ended at iteration {record.iteration}: {record.reason} ({record.seconds:.1f} s)"]
        for line in lines:
            self._say(line)

    def close(self) -> None:
        """Nothing is held back."""

    def _train_lines(self, record: TrainRecord) -> list[str]:
        self._interval.add(record)
        if record.iteration % self._every != 0:
            return []
        sums, self._interval = self._interval, _Interval()
        mean = replace(
            record,
            losses={name: loss / sums.advanced for name, loss in sums.losses.items()},
            iteration_time_ms=sums.time_ms / sums.count,
            throughput=replace(record.throughput, tflops_per_second_per_device=sums.tflop_ms / sums.time_ms),
            skipped=sums.skipped,
            nan=sums.nan,
        )
        times = time_lines(record.spans_ms, self._timing_option) if record.spans_ms else []
        return [train_line(mean, self._is_throughput_shown), *times]
