"""Choosing experts. References: values by hand, and what each rule is defined to bring about."""

import pytest
import torch

from megatron_parm.moe.selection import (
    SelectionRules,
    balanced_experts,
    probabilities_of,
    select,
    select_by_sinkhorn,
    sinkhorn,
)


def _random(tokens: int = 64, experts: int = 8, scale: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    return scale * torch.randn(tokens, experts, generator=generator, dtype=torch.float64)


def test_sigmoid_weights_by_hand() -> None:
    """Logits ln 3, 0, -ln 3: scores 3/4, 1/2, 1/4; the two best weigh 3/5 and 2/5."""
    logits = torch.tensor([[1.0, 3.0, 1 / 3]], dtype=torch.float64).log()
    expert, weight = select(logits, SelectionRules(2, "sigmoid", scaling=10.0))
    assert expert.tolist() == [[1, 0]]
    torch.testing.assert_close(weight, torch.tensor([[6.0, 4.0]], dtype=torch.float64), rtol=1e-13, atol=0)
    torch.testing.assert_close(
        probabilities_of(logits, "sigmoid"), torch.tensor([[2 / 6, 3 / 6, 1 / 6]], dtype=torch.float64)
    )


def test_a_bias_moves_the_choice_and_not_the_weight() -> None:
    """Without it 0 and 1 are chosen; a bias lifts 2 over 0, whose place it takes with its own score."""
    logits = torch.tensor([[1.0, 2.0, 0.0]], dtype=torch.float64)
    bias = torch.tensor([0.0, 0.0, 0.3])
    expert, weight = select(logits, SelectionRules(2, "sigmoid"), bias)
    assert expert.tolist() == [[1, 2]]
    scores = logits.sigmoid()[0, [1, 2]]
    torch.testing.assert_close(weight[0], scores / scores.sum(), rtol=1e-13, atol=0)


def test_the_best_groups_win_over_the_best_expert() -> None:
    """Groups (9, 0) and (5, 5): by the sum of its best two the second is better, although it lacks the best expert."""
    logits = torch.tensor([[9.0, 0.0, 5.0, 5.5]], dtype=torch.float64)
    expert, _ = select(logits, SelectionRules(2, num_groups=2, group_topk=1))
    assert expert.tolist() == [[3, 2]]
    assert select(logits, SelectionRules(2))[0].tolist() == [[0, 3]]


def test_every_choice_lies_in_as_many_groups_as_allowed() -> None:
    expert, _ = select(_random(), SelectionRules(4, "sigmoid", num_groups=4, group_topk=2))
    assert all(len({e // 2 for e in token}) == 2 for token in expert.tolist())


@pytest.mark.parametrize("shift", [0.0, 600.0])
def test_sinkhorn_gives_every_token_and_every_expert_an_even_share(shift: float) -> None:
    """Sums 1/n and 1/E, to the tolerance at which it ends; exp(600) alone would be fatal in float32."""
    shares = sinkhorn((_random() + shift).float())
    torch.testing.assert_close(shares.sum(0), torch.full((8,), 1 / 8), rtol=1e-2, atol=0)
    torch.testing.assert_close(shares.sum(1), torch.full((64,), 1 / 64), rtol=0.1, atol=0)


def test_sinkhorn_chooses_more_evenly_than_the_scores() -> None:
    logits = _random()
    logits[:, 0] += 3
    plain, _ = select_by_sinkhorn(logits, None, 1)
    even, weight = select_by_sinkhorn(logits, sinkhorn(logits), 1)
    assert torch.bincount(plain.flatten()).max() > 1.5 * torch.bincount(even.flatten()).max()
    assert torch.equal(weight, logits.sigmoid().gather(1, even)), "weights are those of the scores"


@pytest.mark.parametrize(("tokens", "experts", "topk"), [(8, 8, 2), (7, 4, 3), (5, 8, 1), (6, 4, 4)])
def test_turns_are_even_and_never_name_an_expert_twice(tokens: int, experts: int, topk: int) -> None:
    """Also from a token in the middle on: a slice of the micro-batch continues the turns of the slice before."""
    whole = balanced_experts(tokens, 0, experts, topk, torch.device("cpu"))
    counts = torch.bincount(whole.flatten(), minlength=experts)
    assert counts.max() - counts.min() <= 1
    assert all(len(set(token)) == topk for token in whole.tolist())
    assert torch.equal(balanced_experts(tokens - 3, 3, experts, topk, torch.device("cpu")), whole[3:])
