"""Evaluation is token-weighted, over micro-batches and data-parallel ranks. Reference: sums made by hand."""

from itertools import chain

import pytest
import torch
from torch import Tensor, nn

from megatron_parm.data.batches import Batch
from megatron_parm.moe.losses import BackwardScale
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.training.evaluate import evaluate
from megatron_parm.training.forward_backward import SingleStage
from tests.harness.layouts import Layout
from tests.harness.pools import Pools
from tests.training.runs import DROPOUT, MOE, flags, run_training


class Echo(nn.Module):
    """The loss of a token is its id; notes the mode it was called in."""

    def __init__(self) -> None:
        super().__init__()
        self.modes: list[bool] = []

    def forward(self, tokens: Tensor, *_: object) -> Tensor:
        self.modes.append(self.training)
        return tokens.float()


def _batch(ids: list[float], mask: list[int]) -> Batch:
    tokens = torch.tensor([ids])
    return {
        "tokens": tokens,
        "labels": tokens,
        "position_ids": tokens,
        "loss_mask": torch.tensor([mask], dtype=torch.float32),
    }


# loss sums and token counts 2 / 1 and 90 / 9
LIGHT = _batch([2.0] + [50.0] * 9, [1] + [0] * 9)
FULL = _batch([10.0] * 9 + [50.0], [1] * 9 + [0])


def _evaluate(ctx: ParallelContext) -> tuple[tuple[float, ...], list[bool], bool]:
    model = Echo()
    batches = iter([LIGHT, FULL]) if ctx.dp.size == 1 else iter([(LIGHT, FULL)[ctx.rank]])
    return evaluate(SingleStage(model, BackwardScale()), batches, 2 // ctx.dp.size, ctx), model.modes, model.training


@pytest.mark.parametrize("layout", [Layout(1), Layout(2)], ids=str)
def test_each_counted_token_weighs_alike(pools: Pools, layout: Layout) -> None:
    """FC-38: 92 / 10 = 9.2 whether the batches are on one rank or two; a mean of means would give 6."""
    for losses, modes, is_training in pools.run(layout, _evaluate):
        assert losses == pytest.approx((9.2,), rel=1e-6)
        assert not any(modes) and is_training


def test_nothing_counted_is_a_loss_of_0() -> None:
    assert evaluate(SingleStage(Echo(), BackwardScale()), iter([_batch([3.0], [0])]), 1, ParallelContext.single()) == (
        0.0,
    )


def test_it_reads_no_more_than_it_was_asked_to() -> None:
    batches = chain([LIGHT, FULL], iter(()))
    evaluate(SingleStage(Echo(), BackwardScale()), batches, 1, ParallelContext.single())
    assert next(batches) is FULL


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        (Layout(1), "--micro-batch-size 8"),
        (Layout(2), "--micro-batch-size 1"),
        (Layout(4, tp=2, ep=2), "--micro-batch-size 4 --tensor-model-parallel-size 2 --expert-model-parallel-size 2"),
    ],
    ids=["micro8", "dp2-micro1", "tp2-ep2-micro4"],
)
def test_validation_does_not_change_with_the_cut(pools: Pools, corpus: str, layout: Layout, more: str) -> None:
    """FC-38 in a whole run with uneven masks, dropout off while evaluating; the same number on every rank."""
    argv = flags(corpus, MOE, DROPOUT, "--eod-mask-loss --train-iters 1 --lr 0 --min-lr 0 --eval-iters 2")
    alone = pools.run(Layout(1), run_training, [*argv, "--micro-batch-size", "2"])[0]
    for outcome in pools.run(layout, run_training, [*argv, *more.split(), "--expert-tensor-parallel-size", "1"]):
        assert outcome.error is None
        assert outcome.column("lm_loss", "valid") == pytest.approx(alone.column("lm_loss", "valid"), rel=1e-6)
    assert len(alone.column("lm_loss", "valid")) == 2
