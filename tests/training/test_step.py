"""One step: accumulation, normalisation, the decision about a loss that is not finite.

References: closed forms on a model of one weight; whole runs of one process; the state before a step that was skipped.
"""

import functools
import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from megatron_parm.data.batches import Batch
from megatron_parm.grads.buffer import GradientBuffers
from megatron_parm.models.gpt import GPTModel
from megatron_parm.moe.losses import BackwardScale
from megatron_parm.optim.build import build_optimizer
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.sharding import make_parameter
from megatron_parm.training.forward_backward import SingleStage
from megatron_parm.training.step import StepResult, TrainStep
from tests.harness.layouts import Layout
from tests.harness.pools import Pools
from tests.training.runs import MOE, Outcome, flags, run_training, same_bits

EQUAL = 1e-5  # relative, float32: the same numbers added in another order
SINGLE = Layout(1)


class Weighted(nn.Module):
    """The loss of a token is its id times the one weight, so every loss and gradient is a mean of ids."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = make_parameter((1,), dtype=torch.float64, device=torch.device("cpu"))
        nn.init.ones_(self.weight)

    def forward(self, tokens: Tensor, *_: Any) -> Tensor:
        return tokens.double() * self.weight


def _batch(tokens: list[list[float]], mask: list[list[int]]) -> Batch:
    ids = torch.tensor(tokens)
    return {"tokens": ids, "labels": ids, "position_ids": ids, "loss_mask": torch.tensor(mask, dtype=torch.float32)}


# two micro-batches on each of two ranks: means 1.5, 5 | 7, none counted
RANK_0 = (_batch([[1, 2]], [[1, 1]]), _batch([[5, 9]], [[1, 0]]))
RANK_1 = (_batch([[7, 3]], [[1, 0]]), _batch([[4, 8]], [[0, 0]]))


def _make(ctx: ParallelContext, model: nn.Module, scale: BackwardScale, **settings: Any) -> TrainStep:
    buffers = GradientBuffers(dict(model.named_parameters()), ctx)
    optimizer = build_optimizer(buffers, "sgd", sgd_momentum=0.0)
    settings = {"max_norm": 0.0, "per_token_loss": False} | settings
    return TrainStep(SingleStage(model, scale), buffers, optimizer, ctx, **settings)


def _one_step(ctx: ParallelContext, per_token_loss: bool) -> tuple[float, float, float, float]:
    """(lm_loss, grad_norm, weight after SGD with rate 1, balance scale)."""
    model, scale = Weighted(), BackwardScale()
    stepping = _make(ctx, model, scale, per_token_loss=per_token_loss)
    batches = (RANK_0, RANK_1)[ctx.rank] if ctx.dp.size == 2 else (*RANK_0, *RANK_1)
    result = stepping.run(iter(batches), len(batches), 1.0, 0.0)
    return result.lm_loss, result.grad_norm, model.weight.item(), scale.value


@pytest.mark.parametrize("layout", [SINGLE, Layout(2)], ids=str)
def test_the_loss_is_the_mean_of_micro_batch_means_or_of_tokens(pools: Pools, layout: Layout) -> None:
    """A micro-batch without a counted token adds 0 and counts as one (FC-10, FC-32)."""
    by_micro_batch, by_token = (1.5 + 5 + 7 + 0) / 4, (1 + 2 + 5 + 7) / 4
    for loss, norm, weight, scale in pools.run(layout, _one_step, False):
        assert (loss, norm, weight) == pytest.approx((by_micro_batch, by_micro_batch, 1 - by_micro_batch), rel=1e-12)
        assert scale == 1 / (4 if layout.world == 1 else 2)
    for loss, norm, weight, _ in pools.run(layout, _one_step, True):
        assert (loss, norm, weight) == pytest.approx((by_token, by_token, 1 - by_token), rel=1e-12)


def test_a_batch_without_any_counted_token_changes_nothing() -> None:
    for per_token_loss in (False, True):
        model = Weighted()
        stepping = _make(ParallelContext.single(), model, BackwardScale(), per_token_loss=per_token_loss)
        result = stepping.run(iter([RANK_1[1]]), 1, 1.0, 0.0)
        assert result == StepResult((0.0,), 0.0, False) and model.weight.item() == 1.0


def test_gradients_start_anew_in_every_step_and_are_clipped_in_the_update_only() -> None:
    model = Weighted()
    stepping = _make(ParallelContext.single(), model, BackwardScale(), max_norm=0.5)
    for done in range(1, 4):
        result = stepping.run(iter(RANK_0), 2, 1.0, 0.0)
        assert result.grad_norm == pytest.approx(3.25)  # before clipping, and not a sum over steps
        assert model.weight.item() == pytest.approx(1 - 0.5 * done, abs=1e-5)


def test_a_step_that_is_not_finite_is_skipped_and_the_next_one_is_whole() -> None:
    model = Weighted()
    stepping = _make(ParallelContext.single(), model, BackwardScale())
    bad = _batch([[math.inf, 1]], [[1, 1]])
    result = stepping.run(iter([RANK_0[0], bad]), 2, 1.0, 0.1)
    assert result.is_skipped and not math.isfinite(result.lm_loss) and model.weight.item() == 1.0
    result = stepping.run(iter(RANK_0), 2, 1.0, 0.0)
    assert not result.is_skipped and model.weight.item() == pytest.approx(1 - 3.25)


# --- FC-32 in whole runs ---


def _run(pools: Pools, layout: Layout, argv: list[str], **more: Any) -> list[Outcome]:
    outcomes: list[Outcome] = pools.run(layout, run_training, argv, **more)
    assert all(outcome.error is None for outcome in outcomes), outcomes[0].error
    return outcomes


@pytest.mark.cover(
    dp=(1, 2, 4),
    micro_batch=(8, 4, 2, 1),
    eod_mask=(False, True),
    where=lambda dp, micro_batch, eod_mask: dp * micro_batch <= 8,
)
def test_any_cut_of_the_global_batch_gives_the_same_loss_and_norm(
    pools: Pools, corpus: str, dp: int, micro_batch: int, eod_mask: bool
) -> None:
    """With an uneven mask under the per-token option; every rank tells the same numbers (FC-37)."""
    more = "--eod-mask-loss --calculate-per-token-loss" if eod_mask else ""
    argv = flags(corpus, "--train-iters 2", more)
    whole = _run(pools, SINGLE, [*argv, "--micro-batch-size", "8"])[0]
    for cut in _run(pools, Layout(dp), [*argv, "--micro-batch-size", str(micro_batch)]):
        for name in ("lm_loss", "grad_norm"):
            assert cut.column(name) == pytest.approx(whole.column(name), rel=EQUAL)


def test_an_uneven_mask_without_the_per_token_option_weighs_micro_batches_alike(pools: Pools, corpus: str) -> None:
    """The stated rule: so the cut into micro-batches shows, and the cut over dp does not."""
    argv = flags(corpus, "--train-iters 1 --eod-mask-loss")
    by_size = {size: _run(pools, SINGLE, [*argv, "--micro-batch-size", str(size)])[0] for size in (8, 1)}
    assert by_size[8].column("lm_loss") != pytest.approx(by_size[1].column("lm_loss"), rel=EQUAL)
    for layout in (Layout(2), Layout(4)):
        spread = _run(pools, layout, [*argv, "--micro-batch-size", "1"])[0]
        assert spread.column("lm_loss") == pytest.approx(by_size[1].column("lm_loss"), rel=EQUAL)


# --- a loss that is not finite on one rank ---

SPREAD = Layout(4, tp=2, ep=2)
SIZES = "--tensor-model-parallel-size 2 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
BAD_STEP = 3
MICRO_BATCHES = 2


def _nan_on(where: int, rank: int) -> Any:
    """In the step `BAD_STEP` the loss of the last micro-batch is NaN on rank `where`."""
    calls = iter(range(1, 1000))

    forward = GPTModel.forward

    def spoiled(model: GPTModel, *inputs: Any) -> Tensor:
        losses = forward(model, *inputs)
        return losses * math.nan if rank == where and next(calls) == BAD_STEP * MICRO_BATCHES else losses

    return patch.object(GPTModel, "forward", spoiled)


@pytest.mark.parametrize("where", [0, 1, 3])
def test_nan_on_one_rank_stops_all_with_code_24_and_weights_unchanged(pools: Pools, corpus: str, where: int) -> None:
    """Whichever rank it is on: no rank updates, none waits, and each says why."""
    argv = flags(corpus, MOE, SIZES, "--train-iters 4")
    before = _run(pools, SPREAD, [*argv, "--exit-interval", "2"])
    outcomes = pools.run(SPREAD, run_training, argv, functools.partial(_nan_on, where))
    for stopped, good in zip(outcomes, before, strict=True):
        assert stopped.error is not None and stopped.error[:2] == ("NonFiniteError", 24)
        assert "iteration 3" in stopped.error[2] and "--no-check-for-nan-in-loss-and-grad" in stopped.error[2]
        assert "samples 16 to 23" in stopped.error[2]
        assert stopped.figures() == good.figures()
        assert same_bits(stopped.state, good.state) == []


def test_a_skipped_step_is_counted_and_leaves_weights_rates_and_moments(pools: Pools, corpus: str) -> None:
    argv = flags(corpus, MOE, SIZES, "--train-iters 3 --no-check-for-nan-in-loss-and-grad")
    before = _run(pools, SPREAD, [*argv, "--exit-interval", "2"])
    after = _run(pools, SPREAD, argv, fault=functools.partial(_nan_on, 2))
    for skipped, good in zip(after, before, strict=True):
        assert skipped.column("skipped") == [0, 0, 1]
        assert skipped.progress["skipped"] == 1 and skipped.progress["scheduled_samples"] == 16
        assert skipped.column("consumed_samples") == [8, 16, 24]
        assert skipped.column("learning_rate")[2] == good.column("learning_rate")[1]
        assert same_bits(skipped.state, good.state) == []
