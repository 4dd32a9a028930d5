"""The run's log for programs: one JSON object a line (`--log-json`), and its reader. Floor 2.

Every line is valid JSON by the standard: numbers in the shortest form that reads back exactly, unrounded; a number that
is not finite becomes the string "NaN", "Infinity" or "-Infinity", which `float()` reads. The file is opened for
appending, so a resumed run continues it; where an iteration appears twice, the later line is the one that counts.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from megatron_parm.errors import DataError
from megatron_parm.observe.records import (
    EndRecord,
    MoEFigures,
    Record,
    SaveRecord,
    StartRecord,
    TrainRecord,
    ValidRecord,
)

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

NON_FINITE = ("NaN", "Infinity", "-Infinity")


def plain(value: object) -> Json:
    """`value` as JSON can hold it.

    Dataclasses and mappings become objects, sequences lists, a tensor or array of one element its number, anything else
    (a path, a dtype) its text. Non-finite numbers become strings.
    """
    if isinstance(value, float):
        return _finite_or_text(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return plain(value.item()) if hasattr(value, "item") else str(value)


def _finite_or_text(value: float) -> float | str:
    if math.isfinite(value):
        return float(value)
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _losses(losses: Mapping[str, float]) -> dict[str, object]:
    return {name.replace(" ", "_"): loss for name, loss in losses.items()}


def as_event(record: Record) -> dict[str, Json]:
    """The object of a record: `event` first, then the fields that README documents for that event."""
    match record:
        case StartRecord():
            fields: dict[str, object] = {"event": "start", **_fields(record)}
        case TrainRecord():
            fields = _train_fields(record)
        case ValidRecord():
            fields = {
                "event": "valid",
                "iteration": record.iteration,
                "consumed_samples": record.consumed_samples,
                "split": record.split,
                **_losses(record.losses),
            }
        case SaveRecord():
            fields = {"event": "save", **_fields(record)}
        case EndRecord():
            fields = {"event": "end", **_fields(record)}
    return {name: plain(value) for name, value in fields.items()}


def _fields(record: StartRecord | SaveRecord | EndRecord) -> dict[str, object]:
    return {item.name: getattr(record, item.name) for item in dataclasses.fields(record)}


def _train_fields(record: TrainRecord) -> dict[str, object]:
    fields: dict[str, object] = {
        "event": "train",
        "iteration": record.iteration,
        "consumed_samples": record.consumed_samples,
        "global_batch_size": record.global_batch_size,
        **_losses(record.losses),
        "grad_norm": record.grad_norm,
        "learning_rate": record.learning_rate,
        "loss_scale": record.loss_scale,
        "skipped": record.skipped,
        "nan": record.nan,
        "iteration_time_ms": record.iteration_time_ms,
        "samples_per_second": record.throughput.samples_per_second,
        "tokens_per_second": record.throughput.tokens_per_second,
        "tflops_per_second": record.throughput.tflops_per_second,
        "tflops_per_second_per_device": record.throughput.tflops_per_second_per_device,
    }
    optional = {
        "num_zeros": record.num_zeros,
        "params_norm": record.params_norm,
        "moe": None if record.moe is None else _moe_fields(record.moe),
        "memory": record.memory,
        "spans_ms": {name: max(times) for name, times in record.spans_ms.items()} or None,
        "moe_schedule_check": record.moe_schedule_check,
    }
    return fields | {name: value for name, value in optional.items() if value is not None}


def _moe_fields(figures: MoEFigures) -> dict[str, object]:
    fields = {item.name: getattr(figures, item.name) for item in dataclasses.fields(figures)}
    return {name: value for name, value in fields.items() if name != "layers" or value}


class JsonLinesSink:
    """Appends one line a record to `path`, flushed, so that a killed run has lost at most the line being written."""

    def __init__(self, path: Path | str) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        is_torn = _ends_inside_a_line(path)
        self._file = path.open("a", encoding="utf-8")
        if is_torn:
            self._file.write("\n")

    def write(self, record: Record) -> None:
        """Append the record's line."""
        self._file.write(json.dumps(as_event(record), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _ends_inside_a_line(path: Path) -> bool:
    """Whether an earlier writer was killed in the middle of a line."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"


@dataclass(frozen=True)
class RunLog:
    """The events of a log in file order, and the numbers (from 1) of lines that are not JSON objects."""

    events: list[dict[str, Json]]
    unreadable_lines: list[int]


def read_run(path: Path | str) -> RunLog:
    """Read a log; lines torn by a killed writer are numbered, not fatal. Raises DataError if there is no such file."""
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"cannot read the run log {path}: {error.strerror}") from error
    events: list[dict[str, Json]] = []
    unreadable: list[int] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if isinstance(event, dict) and isinstance(event.get("event"), str):
            events.append(event)
        else:
            unreadable.append(number)
    return RunLog(events, unreadable)


def number_of(value: Json) -> float:
    """The number a field holds, also one that is not finite; NaN for a field without one."""
    if isinstance(value, int | float) or (isinstance(value, str) and value in NON_FINITE):
        return float(value)
    return math.nan
