"""What a run tells about itself: five frozen records, the same for every sink. Floor 2.

Training makes one record per event and hands it to the `Recorder`; each sink takes from it what it shows. A record
holds global values: what is reduced over ranks is reduced before. No record has a place for the environment, so no
secret of it can reach a log.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

from megatron_parm.observe.flops import Throughput
from megatron_parm.observe.memory import MemoryPeak


def now_text() -> str:
    """The time in UTC, ISO 8601 to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of the whole model, and of the fullest rank."""

    total: int
    per_rank: int


@dataclass(frozen=True)
class ScheduleChoice:
    """Which MoE schedule runs, in how many chunks, and why; `predicted_ms` of every candidate the choice compared."""

    name: str
    chunks: int
    reason: str
    predicted_ms: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class MoELayerFigures:
    """The same of one MoE layer, by its number from 0, and its losses before their coefficients."""

    layer: int
    load_balancing_loss: float
    z_loss: float
    drop_rate: float
    max_load: float
    router_entropy: float


@dataclass(frozen=True)
class MoEFigures:
    """Routing of one iteration: dropped share of the (token, expert) pairs, max over mean load of the experts, and the
    mean entropy of the router's probabilities in nats. `layers` where each layer is asked for."""

    drop_rate: float
    max_load: float
    router_entropy: float
    layers: tuple[MoELayerFigures, ...] = ()


@dataclass(frozen=True)
class StartRecord:
    """A run begins at `iteration` (0, or the iteration of the checkpoint it resumes).

    `layout` has world, tp, pp, ep, esp, dp, edp; `config` is the full configuration, plain values or dataclasses.
    """

    version: str
    iteration: int
    config: object
    layout: Mapping[str, int]
    parameters: ParameterCounts
    moe_schedule: ScheduleChoice | None = None
    time: str = field(default_factory=now_text)


@dataclass(frozen=True)
class TrainRecord:
    """One iteration, or what is left of it when it was skipped.

    `losses` by Megatron's console names (`lm loss`, `sop loss`, `load_balancing_loss`, `z_loss`) in the order they are
    printed. `skipped` and `nan` are 0 or 1. A figure that was not measured is None. `spans_ms`: at the end of a log
    interval the milliseconds an iteration of each timer, by rank.
    """

    iteration: int
    train_iters: int
    consumed_samples: int
    global_batch_size: int
    losses: Mapping[str, float]
    learning_rate: float
    loss_scale: float
    iteration_time_ms: float
    throughput: Throughput
    grad_norm: float | None = None
    num_zeros: float | None = None
    params_norm: float | None = None
    skipped: int = 0
    nan: int = 0
    moe: MoEFigures | None = None
    memory: MemoryPeak | None = None
    spans_ms: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    moe_schedule_check: Mapping[str, object] | None = None  # what --moe-schedule-check tried in this iteration


@dataclass(frozen=True)
class ValidRecord:
    """An evaluation after `iteration`, token-weighted. `place` is Megatron's phrase, by default `iteration N`."""

    iteration: int
    consumed_samples: int
    losses: Mapping[str, float]
    split: Literal["valid", "test"] = "valid"
    place: str = ""


@dataclass(frozen=True)
class SaveRecord:
    """A checkpoint is complete: `seconds` until it was, `stall_seconds` of them training stood still."""

    iteration: int
    path: str
    seconds: float
    stall_seconds: float


@dataclass(frozen=True)
class EndRecord:
    """A run ends: why, with which exit code, after how many seconds."""

    iteration: int
    consumed_samples: int
    reason: str
    exit_code: int
    seconds: float
    time: str = field(default_factory=now_text)


Record = StartRecord | TrainRecord | ValidRecord | SaveRecord | EndRecord
