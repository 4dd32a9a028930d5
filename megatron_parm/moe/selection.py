"""From router scores to experts and weights: top-k, groups, sinkhorn, forced balance. Pure functions. Floor 5.

Source: Megatron-Core's router flags; DeepSeek-V3 (sigmoid scores, groups, bias), S-BASE (sinkhorn), ST-MoE.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

ScoreFunction = Literal["softmax", "sigmoid"]

TINY = 1e-20  # keeps the sum of sigmoid scores from being a divisor of 0, as in Megatron
SINKHORN_TOLERANCE = 1e-4  # mean change of the experts' factors at which sinkhorn ends, as in Megatron
SINKHORN_EPSILON = 1e-8
SINKHORN_ROUNDS = 1000  # most rounds; it ends after some tens


@dataclass(frozen=True)
class SelectionRules:
    """How experts are chosen from logits `[n, E]` and weighed.

    pre_softmax: softmax over all experts before top-k instead of over the chosen ones. num_groups, group_topk: experts
    stand in groups of equal size, a token goes to its best groups only. scaling: multiplies the weights.
    """

    topk: int
    score_function: ScoreFunction = "softmax"
    pre_softmax: bool = False
    num_groups: int | None = None
    group_topk: int | None = None
    scaling: float | None = None


def select(logits: Tensor, rules: SelectionRules, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(expert `[n, k]`, weight `[n, k]`), the best choice first. `bias` `[E]` moves the choice, never the weight."""
    scores = _scores(logits, rules)
    with torch.no_grad():
        ranking = scores if bias is None else scores + bias
        expert = _best(ranking, rules)
    return expert, weigh(logits, expert, rules)


def weigh(logits: Tensor, expert: Tensor, rules: SelectionRules) -> Tensor:
    """The weights `[n, k]` of the chosen experts `[n, k]`, by whatever rule they were chosen."""
    weight = _scores(logits, rules).gather(1, expert)
    if rules.score_function == "sigmoid":
        if rules.topk > 1:
            weight = weight / (weight.sum(-1, keepdim=True) + TINY)
    elif not rules.pre_softmax:
        weight = weight.softmax(-1)
    return weight if rules.scaling is None else weight * rules.scaling


def probabilities_of(logits: Tensor, score_function: ScoreFunction) -> Tensor:
    """Each token's share of every expert, `[n, E]`: what balance losses and the entropy are taken of."""
    if score_function == "softmax":
        return logits.softmax(-1)
    scores = logits.sigmoid()
    return scores / (scores.sum(-1, keepdim=True) + TINY)


def _scores(logits: Tensor, rules: SelectionRules) -> Tensor:
    if rules.score_function == "sigmoid":
        return logits.sigmoid()
    return logits.softmax(-1) if rules.pre_softmax else logits


def _best(scores: Tensor, rules: SelectionRules) -> Tensor:
    """The k best experts of each token, in its best groups where there are groups."""
    if rules.num_groups is not None and rules.group_topk is not None:
        grouped = scores.unflatten(1, (rules.num_groups, -1))  # type: ignore[no-untyped-call]  # [n, groups, E/groups]
        of_group = grouped.topk(rules.topk // rules.group_topk, dim=-1).values.sum(-1)  # [n, groups]
        best_groups = of_group.topk(rules.group_topk, dim=-1).indices
        is_open = torch.zeros_like(of_group, dtype=torch.bool).scatter_(1, best_groups, True)
        scores = grouped.masked_fill(~is_open.unsqueeze(-1), -torch.inf).flatten(1)  # [n, E]
    return scores.topk(rules.topk, dim=-1).indices


@torch.no_grad()
def sinkhorn(logits: Tensor) -> Tensor:
    """exp(logits) `[n, E]` with rows and columns scaled so that every token and every expert has an even share.

    Each row is scaled by its maximum first, which the row factors take back: no exponential overflows.
    """
    cost = (logits - logits.amax(1, keepdim=True)).exp()
    num_tokens, num_experts = cost.shape
    column = torch.ones_like(cost[0])
    for _ in range(SINKHORN_ROUNDS):
        row = 1 / (num_tokens * ((cost * column).sum(1) + SINKHORN_EPSILON))
        previous, column = column, 1 / (num_experts * ((row.unsqueeze(1) * cost).sum(0) + SINKHORN_EPSILON))
        if (previous - column).abs().mean() <= SINKHORN_TOLERANCE:
            break
    return column * cost * row.unsqueeze(1)


def select_by_sinkhorn(logits: Tensor, shares: Tensor | None, topk: int) -> tuple[Tensor, Tensor]:
    """(expert, weight) `[n, k]`: chosen by `shares` `[n, E]` of `sinkhorn`, in evaluation (None) by the logits.

    Weights are probabilities over all experts, for top-1 the sigmoid of the logit.
    """
    expert = (logits if shares is None else shares).topk(topk, dim=-1).indices
    probabilities = logits.sigmoid() if topk == 1 else logits.softmax(-1)
    return expert, probabilities.gather(1, expert)


def balanced_experts(num_tokens: int, first: int, num_experts: int, topk: int, device: torch.device) -> Tensor:
    """Experts `[n, k]` by turns, from the token of number `first` on: all loads are equal to within one choice."""
    turn = torch.arange(first * topk, (first + num_tokens) * topk, device=device)
    return (turn % num_experts).view(num_tokens, topk)
