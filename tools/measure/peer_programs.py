"""The programs that a comparison with the peers starts, ours among them, and how each one's result is read."""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from megatron_parm.errors import ConfigError
from tools.measure.launcher import ROOT, Launcher

PEERS = ROOT / "tools/peers"
OURS, OURS_SLICED = "ours", "ours, sequence parallel"
PADDED, NOT_PADDED, DEEPSPEED = "megatron-core, padded", "megatron-core, not padded", "deepspeed"


@dataclass
class Program:
    """One program: how it is started, what it is compared with, and the milliseconds of each of its launches.

    `read` takes the median milliseconds and a word on what ran from the file that the program wrote.
    """

    name: str
    against: str
    python: str
    script: str
    arguments: list[str]
    read: Callable[[Path], tuple[float, str]]
    rounds_ms: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failure: str | None = None

    @property
    def is_ours(self) -> bool:
        """Whether the peers are compared with it."""
        return self.name in (OURS, OURS_SLICED)


def read_ours(path: Path) -> tuple[float, str]:
    """The row of auto, and what it chose."""
    row = json.loads(path.read_text(encoding="utf-8"))["results"][-1]
    return float(row["median_ms"]), f"{row['chosen']['schedule']} x {row['chosen']['chunks']}"


def read_peer(path: Path) -> tuple[float, str]:
    """What a program of tools/peers wrote."""
    found = json.loads(path.read_text(encoding="utf-8"))
    return float(found["median_ms"]), f"version {found['version']}"


def read_run(path: Path, warmup: int) -> tuple[float, str]:
    """The iterations of a training run's log after the warm-up, and the schedule of its layers."""
    events: list[dict[str, Any]] = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    times = [event["iteration_time_ms"] for event in events if event["event"] == "train"][warmup:]
    schedule = next(event["moe_schedule"] for event in events if event["event"] == "start")
    return median(times), f"{schedule['name']} x {schedule['chunks']}"


def _sizes(flags: argparse.Namespace, launcher: Launcher) -> dict[str, object]:
    """The layer's flags that every program has in these words."""
    return {
        "tp": flags.tp,
        "ep": flags.ep or launcher.world // flags.esp,
        "esp": flags.esp,
        "hidden": flags.hidden,
        "ffn": flags.ffn,
        "num-experts": flags.num_experts,
        "topk": flags.topk,
        "capacity-factor": flags.capacity_factor,
        "warmup": flags.warmup,
        "iters": flags.iters,
    }


def _words(values: dict[str, object]) -> list[str]:
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def layer_programs(flags: argparse.Namespace, launcher: Launcher, peers: tuple[str, ...]) -> list[Program]:
    """One MoE layer. Each peer is compared with ours under what its own layer takes: slices of the sequence or all."""
    sizes = _words(_sizes(flags, launcher))
    ours = [*sizes, "--seq", str(flags.tokens), "--schedules", "auto"]
    theirs = [*sizes, "--tokens", str(flags.tokens)]
    bench, mcore = str(ROOT / "tools/bench_moe_layer.py"), str(PEERS / "mcore_layer.py")
    sliced = [*ours, "--sequence-parallel"] if flags.tp > 1 else ours
    every = {
        "mcore": [
            Program(OURS_SLICED, "", sys.executable, bench, sliced, read_ours),
            Program(PADDED, OURS_SLICED, flags.mcore_python, mcore, [*theirs, "--pad"], read_peer),
            Program(NOT_PADDED, OURS_SLICED, flags.mcore_python, mcore, theirs, read_peer),
        ],
        "deepspeed": [
            Program(OURS, "", sys.executable, bench, ours, read_ours),
            Program(DEEPSPEED, OURS, flags.deepspeed_python, str(PEERS / "deepspeed_layer.py"), theirs, read_peer),
        ],
    }
    return [program for peer in peers for program in every[peer]]


def step_programs(flags: argparse.Namespace, launcher: Launcher) -> list[Program]:
    """A whole training step of a GPT with experts in every layer, on random tokens. Raises ConfigError."""
    if flags.mcore_python is None:
        raise ConfigError("--step needs --mcore-python: it compares with Megatron-Core's GPT")
    sizes = _sizes(flags, launcher)
    theirs = _words({**sizes, "tokens": flags.tokens, "layers": flags.layers, "heads": flags.heads})
    theirs += ["--vocab", str(flags.vocab)]
    ours: dict[str, object] = {
        "num-layers": flags.layers,
        "hidden-size": flags.hidden,
        "ffn-hidden-size": flags.ffn,
        "num-attention-heads": flags.heads,
        "seq-length": flags.tokens,
        "max-position-embeddings": flags.tokens,
        "position-embedding-type": "rope",
        "hidden-dropout": 0,
        "attention-dropout": 0,
        "num-experts": flags.num_experts,
        "moe-router-topk": flags.topk,
        "moe-aux-loss-coeff": 0.01,
        "moe-expert-capacity-factor": flags.capacity_factor,
        "tensor-model-parallel-size": flags.tp,
        "expert-model-parallel-size": sizes["ep"],
        "expert-tensor-parallel-size": flags.esp,
        "micro-batch-size": 1,
        "global-batch-size": launcher.world // flags.tp,
        "train-iters": flags.warmup + flags.iters,
        "lr": 1e-3,
        "tokenizer-type": "NullTokenizer",
        "vocab-size": flags.vocab - 1,
        "eval-iters": 0,
        "moe-cost-model": flags.cost_model,
        "num-workers": 0,
    }
    given = _words({name: value for name, value in ours.items() if value is not None})
    given += ["--mock-data", "--disable-bias-linear", *(["--sequence-parallel"] if flags.tp > 1 else [])]
    mcore = str(PEERS / "mcore_gpt_step.py")
    return [
        Program(
            OURS_SLICED,
            "",
            sys.executable,
            str(ROOT / "pretrain_gpt.py"),
            given,
            lambda path: read_run(path, flags.warmup),
        ),
        Program(PADDED, OURS_SLICED, flags.mcore_python, mcore, [*theirs, "--pad"], read_peer),
        Program(NOT_PADDED, OURS_SLICED, flags.mcore_python, mcore, theirs, read_peer),
    ]
