"""A checkpoint of any layout goes on on any other: tp, pp with virtual stages, ep, esp, dp, ZeRO-1, padding.

References: the state that was saved, gathered into whole tensors, bitwise; the losses of the run that was never
stopped, on one process, in float64, so that the order of sums is all that may differ. Without `--full` every layout is
loaded on the next of its list, and three losses are compared in place of ten.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_parm.parallel.context import ParallelContext
from megatron_parm.training.bert_family import BERT
from megatron_parm.training.gpt_family import GPT
from megatron_parm.training.resume import model_tensors, optimizer_tensors
from megatron_parm.training.trainer import Trainer
from tests.data.bert_texts import random_sentences, write_sentences, write_vocabulary
from tests.harness.layouts import SINGLE, Layout
from tests.harness.pools import Pool, Pools
from tests.training.runs import MOE, Event, Text, flags, make_trainer

SAME_LOSS = 1e-9  # relative, float64: other layouts add the same numbers in another order
SAVED_AT = 2
RUN = "--num-layers 4 --micro-batch-size 1 --global-batch-size 4 --precision fp64 --clip-grad 1.0"
SENTENCES = "--tokenizer-type BertWordPieceLowerCase --seq-length 32 --max-position-embeddings 32"
VOCABULARY_ROWS = ("word_embeddings.weight", "output_layer.weight", "output_layer.bias")


@dataclass(frozen=True)
class Place:
    """A layout with what else decides how a rank holds the state."""

    layout: Layout
    zero1: bool = False
    virtual: int = 1
    divisor: int = 1

    @property
    def flags(self) -> str:
        """Its flags."""
        one = self.layout
        return (
            f"--tensor-model-parallel-size {one.tp} --pipeline-model-parallel-size {one.pp} "
            f"--make-vocab-size-divisible-by {self.divisor}"
            + (" --use-distributed-optimizer" if self.zero1 else "")
            + (f" --num-virtual-stages-per-pipeline-rank {self.virtual}" if self.virtual > 1 else "")
        )

    @property
    def expert_flags(self) -> str:
        """Those of the experts."""
        return (
            f"--expert-model-parallel-size {self.layout.ep} --expert-tensor-parallel-size {self.layout.esp} "
            "--moe-schedule s1"
        )

    def __str__(self) -> str:
        more = ("-zero1" if self.zero1 else "") + (f"-v{self.virtual}" if self.virtual > 1 else "")
        return str(self.layout) + more + (f"-pad{self.divisor}" if self.divisor > 1 else "")


PLACES: dict[str, tuple[Place, ...]] = {
    "gpt-moe": (
        Place(SINGLE),
        Place(Layout(4, tp=2, esp=2, ep=2), zero1=True),
        Place(Layout(2, ep=2), divisor=3),
        Place(Layout(4, pp=2, ep=2), zero1=True),
        Place(Layout(8, tp=2, pp=2, esp=2, ep=2)),
        Place(Layout(2, pp=2), virtual=2),
        Place(Layout(4, tp=4, ep=4), divisor=5),
        Place(Layout(4), zero1=True),
        Place(Layout(4, tp=1, esp=2, ep=2)),
    ),
    "gpt-dense": (
        Place(SINGLE),
        Place(Layout(4, tp=2), zero1=True),
        Place(Layout(4, tp=2, pp=2), virtual=2),
        Place(Layout(2), divisor=7),
        Place(Layout(4, tp=4)),
    ),
    "bert-moe": (
        Place(SINGLE),
        Place(Layout(4, tp=2, esp=2, ep=2)),
        Place(Layout(4, ep=2), zero1=True, divisor=9),
        Place(Layout(2, tp=2)),
    ),
    "bert-dense": (Place(SINGLE), Place(Layout(4, tp=2), zero1=True), Place(Layout(2), divisor=11)),
}


def _pairs(distances: Sequence[int]) -> Iterator[Any]:
    for kind, places in PLACES.items():
        for first, saved in enumerate(places):
            for distance in distances:
                if distance < len(places):
                    loaded = places[(first + distance) % len(places)]
                    yield pytest.param(kind, saved, loaded, id=f"{kind}: {saved} to {loaded}")


Piece = tuple[Tensor, tuple[slice, ...], tuple[int, ...]]


@dataclass
class Outcome:
    """One rank's part of the state before the first and after the last step, and the losses."""

    before: dict[str, Piece]
    after: dict[str, Piece]
    losses: list[float]
    error: str = ""


def _pieces(trainer: Trainer) -> dict[str, Piece]:
    run = trainer.run
    run.optimizer.settle()
    tensors = model_tensors(run.built) | optimizer_tensors(run)
    return {name: (local.clone(), spec.box, spec.global_shape) for name, (local, spec) in tensors.items()}


def _train(ctx: ParallelContext, argv: list[str], is_bert: bool) -> Outcome:
    events: list[Event] = []
    trainer = make_trainer(ctx, argv, events, Text(), BERT if is_bert else GPT)
    before = _pieces(trainer)
    trainer.train()
    losses = [event["lm_loss"] for event in events if event["event"] == "train"]
    return Outcome(before, _pieces(trainer), losses)


def _whole(ranks: Sequence[dict[str, Piece]]) -> dict[str, Tensor]:
    """The whole tensors; where ranks hold the same box they must agree bitwise, and no element may be missing."""
    found: dict[str, Tensor] = {}
    for pieces in ranks:
        for name, (local, box, shape) in pieces.items():
            whole = found.setdefault(name, torch.full(shape, float("nan"), dtype=local.dtype))
            here = whole[box]
            assert torch.equal(torch.where(here.isnan(), local, here), local), f"replicas of {name} differ"
            whole[box] = local
    for name, whole in found.items():
        assert not whole.isnan().any(), f"a part of {name} lies on no rank"
    return found


def _differing(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    """Names whose tensors are not bitwise equal, save for the number of zero rows that pad a vocabulary."""
    assert ours.keys() == theirs.keys()
    found = []
    for name, mine in ours.items():
        rows = min(len(mine), len(theirs[name])) if name.endswith(VOCABULARY_ROWS) else len(mine)
        padding = (mine[rows:], theirs[name][rows:]) if name.endswith(VOCABULARY_ROWS) else ()
        same = torch.equal(mine[:rows], theirs[name][:rows]) and all(not rest.any() for rest in padding)
        found += [] if same else [name]
    return found


class Runs:
    """Runs of the four models; what was saved, and the run that was never stopped, are made once."""

    def __init__(self, pools: Pools, corpora: dict[str, str], folder: Path, steps: int) -> None:
        self.pools = pools
        self.steps = steps  # after the save
        self._corpora = corpora
        self._folder = folder
        self._saved: dict[tuple[str, Place], tuple[Path, dict[str, Tensor]]] = {}
        self._straight: dict[tuple[str, Place], Outcome] = {}

    def run(self, kind: str, place: Place, *more: str) -> list[Outcome]:
        """Train the model of that kind at a place."""
        model, size = kind.split("-")
        experts = f"{MOE} {place.expert_flags}" if size == "moe" else ""
        argv = flags(self._corpora[model], RUN, SENTENCES if model == "bert" else "", experts, place.flags, *more)
        argv += ["--train-iters", str(SAVED_AT + self.steps)]
        if model == "bert":
            at = argv.index("--vocab-size")
            del argv[at : at + 2]
        outcomes: list[Outcome] = self.pools.run(place.layout, _train, argv, model == "bert")
        return outcomes

    def saved(self, kind: str, place: Place) -> tuple[Path, dict[str, Tensor]]:
        """A folder with a checkpoint at iteration 2, and the state that was saved."""
        if (kind, place) not in self._saved:
            root = self._folder / f"{kind}-{place}"
            outcomes = self.run(kind, place, f"--save {root} --exit-interval {SAVED_AT}")
            self._saved[kind, place] = root, _whole([outcome.after for outcome in outcomes])
        return self._saved[kind, place]

    def straight(self, kind: str, place: Place) -> list[float]:
        """The losses of the run that was never stopped."""
        if (kind, place) not in self._straight:
            self._straight[kind, place] = self.run(kind, place)[0]
        return self._straight[kind, place].losses


@pytest.fixture(scope="module")
def runs(pools: Pools, corpus: str, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Runs:
    folder = tmp_path_factory.mktemp("reshard")
    write_vocabulary(folder / "vocab.txt")
    prefix = write_sentences(folder / "text", random_sentences(150))
    return Runs(
        pools,
        {"gpt": corpus, "bert": f"{prefix} --vocab-file {folder / 'vocab.txt'}"},
        folder,
        10 if pytestconfig.getoption("--full") else 3,
    )


def _check(runs: Runs, kind: str, saved: Place, loaded: Place) -> None:
    root, state = runs.saved(kind, saved)
    outcomes = runs.run(kind, loaded, f"--load {root}")
    assert _differing(_whole([outcome.before for outcome in outcomes]), state) == []
    golden = runs.straight(kind, Place(SINGLE))[SAVED_AT:]
    for outcome in outcomes:
        assert len(outcome.losses) == runs.steps
        assert outcome.losses == pytest.approx(golden, rel=SAME_LOSS)


@pytest.mark.parametrize(("kind", "saved", "loaded"), list(_pairs((1,))))
def test_a_run_goes_on_on_another_layout(runs: Runs, kind: str, saved: Place, loaded: Place) -> None:
    """Weights and moments are those that were saved, bitwise; the next losses those of the run without a break."""
    _check(runs, kind, saved, loaded)


@pytest.mark.full
@pytest.mark.parametrize(("kind", "saved", "loaded"), list(_pairs(range(2, 9))))
def test_every_other_pair(runs: Runs, kind: str, saved: Place, loaded: Place) -> None:
    _check(runs, kind, saved, loaded)


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("gpt-moe", PLACES["gpt-moe"][1]),
        ("gpt-moe", PLACES["gpt-moe"][5]),
        ("gpt-dense", PLACES["gpt-dense"][1]),
        ("bert-moe", PLACES["bert-moe"][1]),
    ],
    ids=str,
)
def test_on_the_same_layout_it_is_bitwise(runs: Runs, kind: str, place: Place) -> None:
    root, state = runs.saved(kind, place)
    outcomes = runs.run(kind, place, f"--load {root}")
    assert _differing(_whole([outcome.before for outcome in outcomes]), state) == []
    assert outcomes[0].losses == runs.straight(kind, place)[SAVED_AT:]


def test_moments_that_are_not_those_of_the_checkpoint_would_be_seen(runs: Runs) -> None:
    """Negative control: the same weights, fresh moments."""
    root, state = runs.saved("gpt-moe", Place(SINGLE))
    outcomes = runs.run("gpt-moe", Place(SINGLE), f"--load {root} --no-load-optim --override-opt_param-scheduler")
    differing = _differing(_whole([outcome.before for outcome in outcomes]), state)
    assert differing and all(name.startswith("optimizer.") for name in differing)
    golden = runs.straight("gpt-moe", Place(SINGLE))[SAVED_AT:]
    assert outcomes[0].losses[0] == pytest.approx(golden[0], rel=SAME_LOSS)
    assert outcomes[0].losses[2:] != pytest.approx(golden[2:], rel=1e-5)


def test_three_ranks_go_on_from_the_cut_moments_of_two(runs: Runs, corpus: str, tmp_path: Path) -> None:
    """FC-18: ZeRO-1 on a number of ranks that no tensor divides by, at an equal global batch."""
    argv = flags(corpus, RUN, f"--global-batch-size 6 --train-iters {SAVED_AT + 3}", "--use-distributed-optimizer")
    (alone,) = runs.pools.run(SINGLE, _train, argv, False)
    saving = [*argv, "--save", str(tmp_path), "--exit-interval", str(SAVED_AT)]
    state = _whole([outcome.after for outcome in runs.pools.run(Layout(2), _train, saving, False)])
    three = Pool(3)
    try:
        outcomes = three.run_layout(Layout(3), _train, [*argv, "--load", str(tmp_path)], False)
    finally:
        three.kill()
    assert _differing(_whole([outcome.before for outcome in outcomes]), state) == []
    for outcome in outcomes:
        assert outcome.losses == pytest.approx(alone.losses[SAVED_AT:], rel=SAME_LOSS)


def test_there_are_more_than_a_hundred_pairs() -> None:
    assert len(list(_pairs(range(1, 9)))) >= 100
