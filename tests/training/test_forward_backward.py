"""Micro-batches forward and backward on one stage. References: closed forms on a model of one weight."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_parm.data.batches import Batch
from megatron_parm.moe.losses import BackwardScale
from megatron_parm.training import forward_backward
from megatron_parm.training.forward_backward import SingleStage
from megatron_parm.training.objective import NEXT_TOKEN, Objective


class Weighted(nn.Module):
    """The loss of a token is its id times the one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, tokens: Tensor, *_: Any) -> Tensor:
        return tokens.double() * self.weight


def _batch(tokens: list[float], mask: list[int]) -> Batch:
    ids = torch.tensor([tokens])
    return {"tokens": ids, "labels": ids, "position_ids": ids, "loss_mask": torch.tensor([mask], dtype=torch.float32)}


MICRO_BATCHES = (_batch([1, 2], [1, 1]), _batch([5, 9], [1, 0]))
DIVISORS = [torch.tensor([4.0], dtype=torch.float64), torch.tensor([2.0], dtype=torch.float64)]


@pytest.mark.parametrize("loss_scale", [1.0, 1024.0])
def test_the_loss_scale_reaches_gradients_and_balance_losses_but_not_the_loss(loss_scale: float) -> None:
    """3 / 4 + 5 / 2; without the scale in one of the three places the equality is off by 1024."""
    model, scale = Weighted(), BackwardScale()
    total = SingleStage(model, scale).run(MICRO_BATCHES, DIVISORS, loss_scale=loss_scale)
    assert total.dtype == torch.float64 and not total.requires_grad
    assert total.item() == 3.25
    assert model.weight.grad is not None and model.weight.grad.item() == 3.25 * loss_scale
    assert scale.value == loss_scale / 2


def _two_losses(model: nn.Module, batch: Batch, hidden: Tensor | None = None) -> Tensor:
    first = NEXT_TOKEN.sums(model, batch)[0]
    return torch.stack([first, 10 * first])


def test_several_losses_are_told_apart_and_trained_for_together() -> None:
    """3 / 4 + 5 / 2 and 30 / 8 + 50 / 1; each has a divisor of its own."""
    model = Weighted()
    objective = Objective(("lm loss", "other loss"), _two_losses, lambda batch: torch.ones(2, dtype=torch.float64))
    divisors = [torch.tensor(values, dtype=torch.float64) for values in ([4.0, 8.0], [2.0, 1.0])]
    total = SingleStage(model, BackwardScale(), objective).run(MICRO_BATCHES, divisors)
    assert total.tolist() == [3.25, 53.75]
    assert model.weight.grad is not None and model.weight.grad.item() == 57.0
    assert objective.named((1.0, 2.0)) == {"lm loss": 1.0, "other loss": 2.0}


def test_the_sums_of_next_tokens_take_the_mask_as_it_is() -> None:
    assert NEXT_TOKEN.sums(Weighted(), MICRO_BATCHES[1]).tolist() == [5.0]
    assert NEXT_TOKEN.counts(MICRO_BATCHES[1]).tolist() == [1.0]


def test_batches_stay_where_they_are_on_the_same_device() -> None:
    batch = MICRO_BATCHES[0]
    moved: Iterator[Any] = iter(forward_backward.to_device(batch, torch.device("cpu")).values())
    assert all(a is b for a, b in zip(moved, batch.values(), strict=True))
