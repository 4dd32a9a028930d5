"""Which schedule, in how many chunks, a layer shape gets under `--moe-schedule auto`. Floor 5.

The choice is the least predicted time among what can run the shape. It depends on the shape and the cost model alone,
so ranks that hold the same model make the same choice. Source: parm.md sections 5 and 6.
"""

from dataclasses import dataclass

from megatron_parm.moe.cost import CHUNK_COUNTS, CostModel, LayerShape, predict
from megatron_parm.moe.schedules import SCHEDULES, STARTS_FROM_SLICES


@dataclass(frozen=True)
class Choice:
    """A schedule, its chunks, why, and the predicted milliseconds (forward and backward of a layer) of each candidate.

    predicted_ms: by `name` for one chunk, else `name x chunks`.
    """

    schedule: str
    chunks: int
    reason: str
    predicted_ms: dict[str, float]


def candidate_name(schedule: str, chunks: int) -> str:
    """How a candidate is shown: `s1`, or `s1 x 2` in two chunks."""
    return schedule if chunks == 1 else f"{schedule} x {chunks}"


def named_candidate(name: str) -> tuple[str, int]:
    """The schedule and chunks that `candidate_name` shows so."""
    schedule, _, chunks = name.partition(" x ")
    return schedule, int(chunks or 1)


def drops_alike(first: str, second: str, shape: LayerShape) -> bool:
    """Whether both schedules drop the same tokens of `shape`, whatever the router says. Source: parm.md section 4.

    Those that start from slices count the capacity within each tp slice of the tokens.
    """
    if shape.tp == 1 or shape.capacity_factor is None:
        return True
    can_drop = shape.slots < shape.num_experts * shape.num_tokens
    return not can_drop or (first in STARTS_FROM_SLICES) == (second in STARTS_FROM_SLICES)


def unable(schedule: str, shape: LayerShape) -> str | None:
    """Why `schedule` cannot run `shape`, or None if it can."""
    if schedule in STARTS_FROM_SLICES and shape.num_tokens % shape.tp:
        return (
            f"{schedule} splits the {shape.num_tokens} tokens of a micro-batch over tp {shape.tp}: they do not divide"
        )
    if schedule in ("s2", "s2h", "deepspeed") and not shape.has_slots:
        return f"{schedule} splits expert slots over tp and so needs a capacity, in training and in evaluation"
    if schedule == "s1n" and shape.pads:
        return "s1n sends kept choices only and so cannot pad expert inputs to the capacity"
    if schedule == "deepspeed" and shape.esp not in (1, shape.tp):
        return f"deepspeed needs esp {shape.esp} to be 1 or tp {shape.tp}"
    return None


def predictions(
    shape: LayerShape, model: CostModel, chunk_counts: tuple[int, ...] = CHUNK_COUNTS
) -> dict[tuple[str, int], float]:
    """Predicted milliseconds of every (schedule, chunks) that can run `shape`."""
    able = [name for name in SCHEDULES if unable(name, shape) is None]
    return {(name, chunks): predict(name, chunks, shape, model) for name in able for chunks in chunk_counts}


def choose(shape: LayerShape, model: CostModel, schedule: str = "auto", chunks: int | None = None) -> Choice:
    """The candidate of least predicted time; the first in the table among equals.

    A `schedule` other than auto and `chunks` other than None are the user's own and are kept.
    """
    times = predictions(shape, model, CHUNK_COUNTS if chunks is None else (chunks,))
    allowed = [key for key in times if schedule in ("auto", key[0])]
    best = min(allowed, key=lambda key: times[key])
    named = {candidate_name(*key): time for key, time in times.items()}
    if schedule != "auto" and chunks is not None:
        return Choice(schedule, chunks, f"--moe-schedule {schedule} was given", named)
    others = sorted((key for key in times if key != best), key=lambda key: times[key])
    shown = ", ".join(f"{candidate_name(*key)} {times[key]:.2f} ms" for key in others[:3])
    factor = "dropless" if shape.capacity_factor is None else f"k f = {shape.topk * shape.capacity_factor:g}"
    reason = (
        f"{times[best]:.2f} ms predicted for forward and backward of a layer; next {shown} ({factor}, tokens "
        f"{shape.token_bytes / 1e6:.2f} MB, buckets {shape.rows * shape.row_bytes / 1e6:.2f} MB; {model.source})"
    )
    return Choice(*best, reason, named)
