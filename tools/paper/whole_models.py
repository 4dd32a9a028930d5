"""Whole models with experts, shaped like GPT-2 and BERT-Base: their sizes, their flags, what their logs say."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from megatron_parm.errors import DataError
from megatron_parm.observe.json_lines import number_of, read_run

SCHEDULES = ("baseline", "deepspeed", "s1", "s2", "auto")
FACTOR, TOPK = 1.25, 2


@dataclass(frozen=True)
class Corpus:
    """Tokenized text and its tokenizer."""

    prefix: Path
    tokenizer: tuple[str, ...]


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of GPT-2 and BERT-Base by default; `shrunk` divides them for a small machine."""

    layers: int = 12
    hidden: int = 768
    heads: int = 12
    seq: int = 1024
    micro_batch: int = 4

    def shrunk(self, scale: int) -> "ModelSizes":
        """At least 2 layers and 4 heads; the width of a head stays whole."""
        if scale == 1:
            return self
        return ModelSizes(
            layers=max(self.layers // scale, 2),
            hidden=max(self.hidden // scale, 32),
            heads=4,
            seq=max(self.seq // scale, 16),
            micro_batch=1,
        )


@dataclass(frozen=True)
class ModelRun:
    """One run: `kind` gpt or bert; `purpose` time, or curve, where no expert can overflow and seq is a quarter."""

    kind: str
    schedule: str
    tp: int
    esp: int
    purpose: str
    turn: int

    @property
    def key(self) -> str:
        """Its name in result files."""
        return f"{self.kind}-tp{self.tp}-esp{self.esp}-{self.purpose}-{self.schedule}-{self.turn}"

    @property
    def script(self) -> str:
        """The entrance that trains it."""
        return "pretrain_gpt.py" if self.kind == "gpt" else "pretrain_bert.py"


def flags_of(
    run: ModelRun, sizes: ModelSizes, world: int, steps: int, corpus: Corpus, cost_model: Path, log: Path
) -> list[str]:
    """The flags of the training run, in fp32 without dropout, an expert layer in every block."""
    seq = sizes.seq if run.kind == "gpt" else max(sizes.seq // 2, 16)
    seq = seq if run.purpose == "time" else max(seq // 4, 16)
    ep = world // run.esp
    experts = max(8, ep)
    factor = FACTOR if run.purpose == "time" else experts / TOPK
    values: dict[str, object] = {
        "num-layers": sizes.layers,
        "hidden-size": sizes.hidden,
        "ffn-hidden-size": 4 * sizes.hidden,
        "num-attention-heads": sizes.heads,
        "seq-length": seq,
        "max-position-embeddings": seq,
        "hidden-dropout": 0,
        "attention-dropout": 0,
        "num-experts": experts,
        "moe-router-topk": TOPK,
        "moe-aux-loss-coeff": 0.01,
        "moe-expert-capacity-factor": f"{factor:g}",
        "moe-schedule": run.schedule,
        "tensor-model-parallel-size": run.tp,
        "expert-model-parallel-size": ep,
        "expert-tensor-parallel-size": run.esp,
        "micro-batch-size": sizes.micro_batch,
        "global-batch-size": sizes.micro_batch * world // run.tp,
        "train-iters": steps,
        "lr": 1e-3,
        "lr-warmup-iters": max(steps // 10, 1),
        "data-path": corpus.prefix,
        "split": "90,8,2",
        "num-workers": 0,
        "eval-iters": 0,
        "log-interval": 1,
        "log-json": log,
    }
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    words += corpus.tokenizer
    return [*words, "--moe-cost-model", str(cost_model)] if run.schedule == "auto" else words


def read_model_run(log: Path, run: ModelRun, warmup: int) -> dict[str, Any]:
    """What the log of a finished run says. Raises DataError for one that is too short."""
    events = read_run(log).events
    train = [event for event in events if event["event"] == "train"]
    if len(train) <= warmup:
        raise DataError(f"{log} holds {len(train)} iterations, not more than the {warmup} of the warm-up")
    start: Any = next(event for event in events if event["event"] == "start")
    timed: Any = train[warmup:]
    times = [number_of(event["iteration_time_ms"]) for event in timed]
    schedule, last = start["moe_schedule"], timed[-1]
    return {
        "key": run.key,
        "kind": run.kind,
        "schedule": run.schedule,
        "tp": run.tp,
        "esp": run.esp,
        "purpose": run.purpose,
        "turn": run.turn,
        "ran": f"{schedule['name']} x {schedule['chunks']}",
        "parameters": start["parameters"]["total"],
        "step_ms": median(times),
        "least_ms": min(times),
        "most_ms": max(times),
        "tokens_per_second": median(number_of(event["tokens_per_second"]) for event in timed),
        "resident_mib": last["memory"]["resident_mib"],
        "losses": [number_of(event["lm_loss"]) for event in train],
    }


def communication_share(figures: Any) -> float:
    """The part of a step in which a rank only waits for collectives, by the trace's analysis: the mean of the ranks."""
    ranks: Sequence[Any] = figures
    shares = [rank["exposed"] * rank["communication_ms"] / rank["window_ms"] for rank in ranks if rank["window_ms"]]
    return sum(shares) / len(shares) if shares else 0.0


def largest_spread(curves: Sequence[Sequence[float]]) -> float:
    """How far the curves lie apart at any step, relative to the first of them."""
    steps = min((len(curve) for curve in curves), default=0)
    apart = [
        max(abs(curve[step] - curves[0][step]) for curve in curves) / max(abs(curves[0][step]), 1e-12)
        for step in range(steps)
    ]
    return max(apart, default=0.0)
