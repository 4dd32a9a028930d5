"""Records with every field set, shared by the tests of the sinks."""

from dataclasses import dataclass
from pathlib import Path

from megatron_parm.observe.flops import Throughput
from megatron_parm.observe.memory import MemoryPeak
from megatron_parm.observe.records import (
    EndRecord,
    MoEFigures,
    ParameterCounts,
    Record,
    SaveRecord,
    ScheduleChoice,
    StartRecord,
    TrainRecord,
    ValidRecord,
)


@dataclass(frozen=True)
class TinyConfig:
    """A stand-in for a run's configuration."""

    hidden_size: int = 32
    load: Path = Path("runs/a")
    lr: float = 0.001


START = StartRecord(
    version="0.1",
    iteration=0,
    config=TinyConfig(),
    layout={"world": 4, "tp": 2, "pp": 1, "ep": 2, "esp": 1, "dp": 2, "edp": 2},
    parameters=ParameterCounts(total=1234567, per_rank=400000),
    moe_schedule=ScheduleChoice("s1", 1, "s1: 4.1 ms predicted, s2 5.0 ms", {"s1": 4.1, "s2": 5.0}),
    time="2025-01-01T00:00:00+00:00",
)
TRAIN = TrainRecord(
    iteration=3,
    train_iters=20,
    consumed_samples=24,
    global_batch_size=8,
    losses={"lm loss": 1.0 / 3.0, "load_balancing_loss": 1.25},
    learning_rate=0.00015,
    loss_scale=1.0,
    iteration_time_ms=12.34,
    throughput=Throughput(648.3, 10372.8, 0.5, 0.125),
    grad_norm=2.5,
    num_zeros=7.0,
    params_norm=11.125,
    moe=MoEFigures(drop_rate=0.0, max_load=1.5, router_entropy=1.38),
    memory=MemoryPeak(resident_mib=200.0, device_mib=2.0),
    spans_ms={"forward": (4.0, 3.0), "backward": (8.0, 8.0)},
)
VALID = ValidRecord(iteration=3, consumed_samples=24, losses={"lm loss": 9.2})
SAVE = SaveRecord(iteration=3, path="runs/a/iter_0000003", seconds=0.5, stall_seconds=0.25)
END = EndRecord(
    iteration=20,
    consumed_samples=160,
    reason="--train-iters reached",
    exit_code=0,
    seconds=9.5,
    time="2025-01-01T00:00:10+00:00",
)
ALL_RECORDS: tuple[Record, ...] = (START, TRAIN, VALID, SAVE, END)
