"""Which schedule a layer shape gets under `--moe-schedule auto`. Floor 5.

The choice is the least predicted time among the schedules that can run the shape. It depends on the shape and the cost
model alone, so every rank makes the same one without talking. Source: parm.md sections 5 and 6.
"""

from dataclasses import dataclass

from megatron_parm.moe.cost import CostModel, LayerShape, predict
from megatron_parm.moe.schedules import SCHEDULES


@dataclass(frozen=True)
class Choice:
    """A schedule, its chunks, why, and the predicted milliseconds (forward and backward of a layer) of each
    candidate."""

    schedule: str
    chunks: int
    reason: str
    predicted_ms: dict[str, float]


def unable(schedule: str, shape: LayerShape) -> str | None:
    """Why `schedule` cannot run `shape`, or None if it can."""
    if schedule == "s1" and shape.num_tokens % shape.tp:
        return (
            f"s1 splits the {shape.num_tokens} tokens of a micro-batch over tp {shape.tp}, which does not divide them"
        )
    if schedule == "s2" and not shape.has_slots:
        return (
            "s2 splits expert slots over tp and so needs a capacity (--moe-expert-capacity-factor, in evaluation too)"
        )
    return None


def predictions(shape: LayerShape, model: CostModel) -> dict[str, float]:
    """Predicted milliseconds of every schedule that can run `shape`."""
    return {name: predict(name, shape, model) for name in SCHEDULES if unable(name, shape) is None}


def fixed(schedule: str, shape: LayerShape, model: CostModel) -> Choice:
    """The user's own choice, with the predictions for comparison."""
    return Choice(schedule, 1, f"--moe-schedule {schedule} was given", predictions(shape, model))


def choose(shape: LayerShape, model: CostModel) -> Choice:
    """The schedule of least predicted time; the first in the table among equals."""
    times = predictions(shape, model)
    best = min(times, key=lambda name: times[name])
    others = ", ".join(f"{name} {time:.2f} ms" for name, time in times.items() if name != best)
    factor = "dropless" if shape.capacity_factor is None else f"k f = {shape.topk * shape.capacity_factor:g}"
    reason = (
        f"{best} {times[best]:.2f} ms predicted for forward and backward of a layer, {others} "
        f"({factor}, tokens {shape.token_bytes / 1e6:.2f} MB, buckets {shape.bucket_bytes / 1e6:.2f} MB; "
        f"{model.source})"
    )
    return Choice(best, 1, reason, times)
