"""Upcycling a dense checkpoint. Reference: the dense model's own logits, in float64."""

from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor

from megatron_parm.config.moe import Schedule
from megatron_parm.parallel import transport
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.training.trainer import Trainer
from tests.harness.layouts import Layout
from tests.harness.pools import Pools
from tests.training.runs import NUMBERS, Text, flags, make_trainer, run_training, same_bits

GATED = "--precision fp64 --swiglu --ffn-hidden-size 24"
EXPERTS = "--num-experts 4 --moe-expert-capacity-factor 2 --moe-use-upcycling"
SAME = 1e-12  # logits of order 1: the same numbers in another order
CORRUPT = 21


Dense = tuple[str, Tensor]


@pytest.fixture(scope="module")
def dense(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Dense:
    """The folder of a trained dense model with gated layers, and its logits at the end."""
    root = str(tmp_path_factory.mktemp("dense"))
    argv = flags(corpus, GATED, "--train-iters 3 --save", root)
    trainer = make_trainer(ParallelContext.single(), argv, [], Text())
    trainer.train()
    return root, _logits(trainer)


@torch.no_grad()
def _logits(trainer: Trainer) -> Tensor:
    """[s, b, V] of the model as it stands, on fixed tokens."""
    model, tp = trainer.run.built.model.eval(), trainer.run.ctx.tp
    tokens = torch.randint(0, NUMBERS, (3, 8), generator=torch.Generator().manual_seed(1))
    logits = model(tokens, torch.arange(8).expand(3, 8))  # [s, b, V/tp]
    return torch.cat(list(transport.gather_stack(logits, tp)), dim=-1)[..., : NUMBERS + 1]


def _start(ctx: ParallelContext, argv: list[str]) -> Tensor:
    trainer = make_trainer(ctx, argv, [], Text())
    assert trainer.progress.iteration == 0
    return _logits(trainer)


def _upcycled(pools: Pools, corpus: str, layout: Layout, root: str, more: str) -> list[Tensor]:
    sizes = (
        f"--tensor-model-parallel-size {layout.tp} --expert-model-parallel-size {layout.ep} "
        f"--expert-tensor-parallel-size {layout.esp}"
    )
    logits: list[Tensor] = pools.run(layout, _start, flags(corpus, GATED, EXPERTS, sizes, more, "--load", root))
    return logits


ALL_AXES = Layout(4, tp=2, esp=2, ep=2)


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        *((ALL_AXES, f"--moe-schedule {schedule}") for schedule in get_args(Schedule) if schedule != "auto"),
        (Layout(1), "--moe-schedule s1"),
        (Layout(4, tp=2, ep=2), "--moe-schedule baseline"),
        (Layout(1), "--moe-layer-freq 2"),
        (Layout(1), "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"),
    ],
    ids=str,
)
def test_the_model_starts_with_the_logits_of_the_dense_one(
    pools: Pools, corpus: str, dense: Dense, layout: Layout, more: str
) -> None:
    """Every schedule, the router's weights being initial."""
    root, wanted = dense
    assert wanted.std() > 0.01
    for logits in _upcycled(pools, corpus, layout, root, more):
        torch.testing.assert_close(logits, wanted, rtol=0, atol=SAME)


def test_weights_that_do_not_sum_to_1_would_show(pools: Pools, corpus: str, dense: Dense) -> None:
    """Negative control: a capacity that drops tokens is allowed with a note, and is another function."""
    root, wanted = dense
    (logits,) = _upcycled(pools, corpus, Layout(1), root, "--moe-expert-capacity-factor 0.3")
    assert (logits - wanted).abs().max() > 1e-3


def test_a_checkpoint_with_experts_is_refused(pools: Pools, corpus: str, dense: Dense, tmp_path: Path) -> None:
    common = flags(corpus, GATED, "--num-experts 4 --moe-expert-capacity-factor 2")
    start = [
        *common,
        "--moe-use-upcycling",
        "--load",
        dense[0],
        "--save",
        str(tmp_path),
        "--train-iters",
        "2",
        "--exit-interval",
        "1",
    ]
    first = pools.run(Layout(1), run_training, start)[0]
    assert first.error is None and first.progress["iteration"] == 1
    again = [*common, "--moe-use-upcycling", "--load", str(tmp_path), "--train-iters", "2"]
    refused = pools.run(Layout(1), run_training, again)[0].error
    assert refused is not None and refused[1] == CORRUPT
    assert "has experts already" in refused[2] and "leave the flag out" in refused[2]
    on = [word for word in again if word != "--moe-use-upcycling"]
    resumed = pools.run(Layout(1), run_training, on)[0]
    assert resumed.error is None and resumed.progress["iteration"] == 2


def test_a_restart_with_the_same_flags_goes_on(pools: Pools, corpus: str, dense: Dense, tmp_path: Path) -> None:
    """--pretrained-checkpoint names the dense model: the first start upcycles it, the second goes on, bit for bit."""
    common = flags(corpus, GATED, "--num-experts 4 --train-iters 4")
    argv = [*common, "--moe-use-upcycling", "--pretrained-checkpoint", dense[0]]
    (straight,) = pools.run(Layout(1), run_training, argv)
    assert straight.error is None and straight.progress["iteration"] == 4
    own = ["--save", str(tmp_path), "--load", str(tmp_path)]
    (first,) = pools.run(Layout(1), run_training, [*argv, *own, "--exit-interval", "2"])
    (second,) = pools.run(Layout(1), run_training, [*argv, *own])
    assert second.error is None, second.error
    assert first.figures() + second.figures() == straight.figures()
    assert same_bits(second.state, straight.state) == []
    assert "upcycled" in first.said and "upcycled" not in second.said
