"""Balance losses. References: values worked out by hand from parm.md's definition (docstrings)."""

import math

import pytest
import torch
from torch import Tensor

from megatron_parm.moe.losses import BackwardScale, attach_loss, load_balancing_loss, z_loss


def test_balance_loss_by_hand() -> None:
    """Top-1, 2 experts, p_0 of 4 tokens .9 .8 .6 .3: counts 3 and 1, mean p .65 and .35; 2 (3/4 .65 + 1/4 .35)."""
    first = torch.tensor([0.9, 0.8, 0.6, 0.3], dtype=torch.float64)
    probabilities = torch.stack([first, 1 - first], dim=1)
    loss = load_balancing_loss(probabilities, torch.tensor([3, 1]), 4, 1)
    assert loss.item() == pytest.approx(1.15, rel=1e-14)


@pytest.mark.parametrize("topk", [1, 2, 4])
def test_balance_loss_is_1_when_balanced_and_e_over_k_at_worst(topk: int) -> None:
    uniform = torch.full((8, 4), 0.25, dtype=torch.float64)
    even = torch.full((4,), 8 * topk // 4)
    assert load_balancing_loss(uniform, even, 8, topk).item() == pytest.approx(1.0, rel=1e-14)
    # all tokens sure of the same k experts: k (1 / k) (1 / k) E
    chosen = torch.zeros(8, 4, dtype=torch.float64)
    chosen[:, :topk] = 1 / topk
    counts = torch.tensor([8] * topk + [0] * (4 - topk))
    assert load_balancing_loss(chosen, counts, 8, topk).item() == pytest.approx(4 / topk, rel=1e-14)


def test_parts_of_the_tokens_add_up_with_the_counts_of_all() -> None:
    """What s1 relies on. With each part's own counts they would not: the loss is quadratic."""
    probabilities = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).softmax(-1)
    expert = probabilities.argmax(-1)
    counts = torch.bincount(expert, minlength=4)
    whole = load_balancing_loss(probabilities, counts, 8, 1)
    parts = sum(load_balancing_loss(part, counts, 8, 1) for part in probabilities.chunk(2))
    own = [torch.bincount(part, minlength=4) for part in expert.chunk(2)]
    wrong = sum(load_balancing_loss(p, 2 * c, 8, 1) for p, c in zip(probabilities.chunk(2), own, strict=True))
    torch.testing.assert_close(parts, whole, rtol=1e-14, atol=0)
    assert abs(wrong - whole) > 1e-3


def test_balance_loss_pushes_down_the_crowded_expert_through_p_alone() -> None:
    """d/dp_te = E count_e / (k n n): 2 * 3 / 16 and 2 * 1 / 16."""
    probabilities = torch.full((4, 2), 0.5, dtype=torch.float64, requires_grad=True)
    load_balancing_loss(probabilities, torch.tensor([3, 1]), 4, 1).backward()
    assert probabilities.grad is not None
    torch.testing.assert_close(
        probabilities.grad, torch.tensor([[0.375, 0.125]] * 4, dtype=torch.float64), rtol=1e-14, atol=0
    )


def test_z_loss_by_hand() -> None:
    """logsumexp of (0, 0) is ln 2, of (ln 3, 0) is ln 4: ((ln 2)^2 + (ln 4)^2) / 2 = 5 (ln 2)^2 / 2."""
    logits = torch.tensor([[0.0, 0.0], [math.log(3), 0.0]], dtype=torch.float64)
    assert z_loss(logits, 2).item() == pytest.approx(2.5 * math.log(2) ** 2, rel=1e-14)
    assert sum(z_loss(part, 2) for part in logits.chunk(2)).item() == pytest.approx(2.5 * math.log(2) ** 2, rel=1e-14)


def test_z_loss_of_large_scores_is_finite() -> None:
    """Reference: logsumexp(1000, 0) = 1000 to every digit of float32."""
    assert z_loss(torch.tensor([[1000.0, 0.0]]), 1).item() == 1e6


def _attached(scale: BackwardScale) -> tuple[Tensor, Tensor, Tensor]:
    carrier = torch.tensor([1.0, 2.0], requires_grad=True)
    parameter = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    return carrier, parameter, attach_loss(carrier, 5 * parameter, scale)


def test_an_attached_loss_changes_no_value() -> None:
    carrier, _, attached = _attached(BackwardScale())
    assert torch.equal(attached, carrier)


def test_an_attached_loss_starts_its_own_gradient_at_the_scale_of_that_moment() -> None:
    scale = BackwardScale()
    carrier, parameter, attached = _attached(scale)
    scale.value = 0.25  # set after forward: the trainer learns the loss scale late
    (attached * torch.tensor([7.0, 11.0])).sum().backward()
    assert carrier.grad is not None and carrier.grad.tolist() == [7.0, 11.0]
    assert parameter.grad is not None and parameter.grad.dtype == torch.float64
    assert parameter.grad.item() == 5 * 0.25


def test_the_loss_counts_even_where_the_carriers_gradient_is_zero() -> None:
    _, parameter, attached = _attached(BackwardScale(2.0))
    (attached * 0).sum().backward()
    assert parameter.grad is not None and parameter.grad.item() == 10.0


def test_two_losses_on_one_carrier_both_arrive() -> None:
    carrier = torch.ones(2, requires_grad=True)
    a, b = torch.tensor(1.0, requires_grad=True), torch.tensor(1.0, requires_grad=True)
    scale = BackwardScale(0.5)
    attach_loss(attach_loss(carrier, 2 * a, scale), 3 * b, scale).sum().backward()
    assert (a.grad, b.grad) == (torch.tensor(1.0), torch.tensor(1.5))
