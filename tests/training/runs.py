"""Small whole runs for the tests of training: a corpus, flags, and a run inside a worker of a pool.

A run here is what `pretrain` does between joining the ranks and leaving them, on a context that the pool made.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_parm.config.parser import parse_run_config
from megatron_parm.config.run import check_run, resolve
from megatron_parm.data.indexed_writer import IndexedWriter
from megatron_parm.errors import MegatronParmError
from megatron_parm.observe.json_lines import as_event
from megatron_parm.observe.log import Log
from megatron_parm.observe.records import Record
from megatron_parm.observe.sinks import Recorder
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.training import entrance
from megatron_parm.training.checkpoint_flags import settings_of_checkpoint
from megatron_parm.training.family import ModelFamily
from megatron_parm.training.gpt_family import GPT
from megatron_parm.training.resume import model_tensors, open_checkpoint, optimizer_tensors
from megatron_parm.training.trainer import Trainer

NUMBERS = 30  # the NullTokenizer's; its end of document is one more id
Event = dict[str, Any]

TINY = """
--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --max-position-embeddings 8
--attention-dropout 0 --hidden-dropout 0 --init-method-std 0.1 --make-vocab-size-divisible-by 1
--micro-batch-size 2 --global-batch-size 8 --train-iters 4 --lr 1e-2 --min-lr 1e-3 --eval-iters 0
--split 80,10,10 --num-workers 0 --log-interval 1 --progress-bar off
--tokenizer-type NullTokenizer --distributed-backend gloo
"""
MOE = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 --moe-expert-capacity-factor 2"
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"


def write_corpus(prefix: Path, num_documents: int = 120, numbers: int = NUMBERS, seed: int = 7) -> str:
    """Documents of 5 to 40 random numbers, each ended by the id after the last number; returns the prefix."""
    random = np.random.RandomState(seed)
    with IndexedWriter(prefix, np.dtype("u2")) as writer:
        for _ in range(num_documents):
            writer.add_document(np.append(random.randint(0, numbers, random.randint(5, 41)), numbers))
    return str(prefix)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The prefix of a small corpus."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "numbers")


def flags(corpus: str, *more: str, numbers: int = NUMBERS) -> list[str]:
    """The tiny run on `corpus`; later flags win over earlier ones."""
    return [*f"{TINY} --data-path {corpus} --vocab-size {numbers}".split(), *" ".join(more).split()]


class Kept:
    """A sink that keeps events."""

    def __init__(self, events: list[Event]) -> None:
        self._events = events

    def write(self, record: Record) -> None:
        self._events.append(dict(as_event(record)))

    def close(self) -> None:
        pass


@dataclass
class Outcome:
    """What a run did on one rank. `state`: this rank's weights, optimizer state and random streams at its end."""

    events: list[Event] = field(default_factory=list)
    said: str = ""
    error: tuple[str, int, str] | None = None  # class, exit code, message
    state: Mapping[str, Tensor] = field(default_factory=dict)
    progress: dict[str, int] = field(default_factory=dict)

    def of(self, kind: str) -> list[Event]:
        """The events of one kind."""
        return [event for event in self.events if event["event"] == kind]

    def column(self, name: str, kind: str = "train") -> list[Any]:
        """One figure of every event of a kind."""
        return [event[name] for event in self.of(kind)]

    def figures(self) -> list[tuple[Any, ...]]:
        """What must repeat exactly in a run that goes on: everything but times."""
        names = ("iteration", "consumed_samples", "lm_loss", "load_balancing_loss", "grad_norm", "learning_rate")
        return [tuple(event.get(name) for name in names) for event in self.of("train")]


class Text:
    """A stream that keeps what is written."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


def make_trainer(
    ctx: ParallelContext, argv: list[str], events: list[Event], said: Any, family: ModelFamily = GPT
) -> Trainer:
    """A trainer for these flags, resumed from its checkpoint if they name one."""
    config, _ = parse_run_config(argv, model=family.kind, saved=settings_of_checkpoint)
    check_run(config, ctx.world.size)
    config = resolve(config, ctx.world.size)
    log = Log(ctx.rank, out=said, err=said)
    saved = open_checkpoint(config, ctx, log)
    recorder = Recorder(log.warn_once)
    recorder.add("kept", lambda: Kept(events))
    return entrance.make_trainer(config, ctx, log, recorder, saved, family)


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    """This rank's weights, optimizer state and random streams, copied."""
    run = trainer.run
    tensors = {name: local for name, (local, _) in {**model_tensors(run.built), **optimizer_tensors(run)}.items()}
    return {name: tensor.clone() for name, tensor in {**tensors, **run.random_states.state_dict()}.items()}


def run_training(
    ctx: ParallelContext, argv: list[str], fault: Callable[[int], Any] | None = None, family: ModelFamily = GPT
) -> Outcome:
    """Train as `pretrain` would; one of our errors ends it and is told in the outcome.

    `fault` makes, for this rank, a context manager under which the run goes on after it was assembled.
    """
    said, outcome = Text(), Outcome()
    trainer = None
    try:
        trainer = make_trainer(ctx, argv, outcome.events, said, family)
        with nullcontext() if fault is None else fault(ctx.rank):
            trainer.train()
    except MegatronParmError as error:
        outcome.error = type(error).__name__, error.exit_code, str(error)
    finally:
        torch.use_deterministic_algorithms(False)
    if trainer is not None:
        outcome.state, outcome.progress = state_of(trainer), trainer.progress.to_state()
    outcome.said = said.text
    return outcome


def same_bits(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> list[str]:
    """The names whose tensors are not bitwise equal."""
    assert ours.keys() == theirs.keys()
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]
