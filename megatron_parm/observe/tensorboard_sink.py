"""Records as TensorBoard scalars under Megatron's tags, each also ` vs samples`. Floor 2.

Source of the tags: `training_log` and `evaluate_and_print_results` of Megatron-LM 2.5 and Megatron-Core 0.12.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_parm.observe.console import perplexity
from megatron_parm.observe.json_lines import plain
from megatron_parm.observe.memory import MIB
from megatron_parm.observe.records import Record, StartRecord, TrainRecord, ValidRecord


@dataclass(frozen=True)
class TensorBoardTags:
    """Which of Megatron's optional tags are written; the defaults are Megatron's."""

    learning_rate: bool = True
    loss_scale: bool = True
    batch_size: bool = False
    timers: bool = False
    throughput: bool = False
    memory: bool = False
    validation_ppl: bool = False


def train_scalars(record: TrainRecord, tags: TensorBoardTags) -> dict[str, float]:
    """Tag -> value of a training iteration. `iteration-time` is in seconds, `throughput` in TFLOP/s a device."""
    optional: dict[str, float | None] = {
        "learning-rate": record.learning_rate if tags.learning_rate else None,
        "batch-size": record.global_batch_size if tags.batch_size else None,
        **record.losses,
        "loss-scale": record.loss_scale if tags.loss_scale else None,
        "grad-norm": record.grad_norm,
        "num-zeros": record.num_zeros,
        "params-norm": record.params_norm,
        "iteration-time": record.iteration_time_ms / 1000.0 if tags.timers else None,
        "throughput": record.throughput.tflops_per_second_per_device if tags.throughput else None,
    }
    if tags.timers:
        optional |= {f"{name}-time": max(times) / 1000.0 for name, times in record.spans_ms.items()}
    if record.memory is not None and tags.memory:
        optional["mem-max-allocated-bytes"] = record.memory.device_mib * MIB
        optional["mem-max-resident-bytes"] = record.memory.resident_mib * MIB
    if record.moe is not None:
        optional["moe-drop-rate"] = record.moe.drop_rate
        optional["moe-max-load"] = record.moe.max_load
        optional["moe-router-entropy"] = record.moe.router_entropy
        for one in record.moe.layers:
            figures = {name: value for name, value in asdict(one).items() if name != "layer"}
            optional |= {f"moe/{name}_layer_{one.layer}": value for name, value in figures.items()}
    return {tag: value for tag, value in optional.items() if value is not None}


def valid_scalars(record: ValidRecord, tags: TensorBoardTags) -> dict[str, float]:
    """Tag -> value of an evaluation; the test split has tags of its own."""
    word = "validation" if record.split == "valid" else "test"
    scalars: dict[str, float] = {}
    for name, loss in record.losses.items():
        scalars[f"{name} {word}"] = loss
        if tags.validation_ppl:
            scalars[f"{name} {word} ppl"] = perplexity(loss)
    return scalars


class TensorBoardSink:
    """Writes event files into `folder`; training scalars every `interval` iterations."""

    def __init__(
        self, folder: Path | str, tags: TensorBoardTags | None = None, interval: int = 1, queue_size: int = 1000
    ) -> None:
        # Imported here: a broken tensorboard or protobuf is this sink's failure, not the run's.
        from torch.utils.tensorboard import SummaryWriter

        self._tags = tags or TensorBoardTags()
        self._interval = interval
        self._writer = SummaryWriter(log_dir=str(folder), max_queue=queue_size)

    def write(self, record: Record) -> None:
        """Write the record's scalars; of a start its configuration as text; nothing of a save or an end."""
        if isinstance(record, StartRecord):
            text = json.dumps(plain(record), indent=2)
            self._writer.add_text("start", f"```\n{text}\n```", record.iteration)
        elif isinstance(record, TrainRecord) and record.iteration % self._interval == 0:
            self._add(train_scalars(record, self._tags), record.iteration, record.consumed_samples)
        elif isinstance(record, ValidRecord):
            self._add(valid_scalars(record, self._tags), record.iteration, record.consumed_samples)
            self._writer.flush()

    def close(self) -> None:
        """Write what is queued and close."""
        self._writer.close()

    def _add(self, scalars: dict[str, float], iteration: int, consumed_samples: int) -> None:
        for tag, value in scalars.items():
            self._writer.add_scalar(tag, value, iteration)
            self._writer.add_scalar(f"{tag} vs samples", value, consumed_samples)
