"""An MoE layer written token by token, in plain torch, as the judge of every schedule.

It shares no code with the package. One call is one data-parallel rank's micro-batch; `slices` says into how many equal
runs of tokens the capacity is counted (tp for s1, else 1).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class NaiveRouter:
    """The router's options: `score` softmax or sigmoid, (groups, chosen groups), a bias on the choice, and so on."""

    score: str = "softmax"
    groups: tuple[int, int] | None = None
    scaling: float = 1.0
    bias: tuple[float, ...] | None = None
    balancing: str = "aux_loss"
    forced: bool = False


@dataclass
class NaiveResult:
    output: Tensor
    balance_loss: Tensor
    z_loss: Tensor
    dropped: int
    counts: list[int]
    entropy: Tensor


def naive_moe(
    tokens: Tensor,
    weights: dict[str, Tensor],
    *,
    topk: int,
    factor: float | None,
    minimum: int = 1,
    pre_softmax: bool = False,
    policy: str = "probs",
    slices: int = 1,
    gated: bool = False,
    router: NaiveRouter | None = None,
    batch: int = 1,
    noise: Tensor | None = None,
    is_text: list[bool] | None = None,
) -> NaiveResult:
    router = router or NaiveRouter()
    num_experts = weights["router.weight"].shape[0]
    seen = tokens if noise is None else tokens * noise
    logits = seen @ weights["router.weight"].t()
    probabilities = logits.softmax(-1)
    if router.score == "sigmoid":
        scores = 1 / (1 + (-logits).exp())
        probabilities = scores / scores.sum(-1, keepdim=True)
    n = tokens.shape[0]
    text = [t for t in range(n) if is_text is None or is_text[t]]
    shares = None
    if router.balancing == "sinkhorn":
        shares = torch.zeros_like(logits)
        shares[text] = _sinkhorn(logits[text].detach())
    choices: list[list[tuple[int, Tensor]]] = []  # per token: (expert, weight)
    for t in range(n):
        if t not in text:
            choices.append([])
            continue
        ranking = shares[t] if shares is not None else probabilities[t].detach() if pre_softmax else logits[t].detach()
        order = _chosen(ranking, t, topk, router)
        chosen = _weights(logits[t], order, topk, pre_softmax, router)
        choices.append([(e, chosen[i]) for i, e in enumerate(order)])
    counts = [sum(e == expert for token in choices for e, _ in token) for expert in range(num_experts)]
    output, dropped = [torch.zeros_like(tokens[0]) for _ in range(n)], 0
    part = n // slices
    for first in range(0, n, part):
        capacity = part * topk if factor is None else max(math.ceil(topk * factor * part / num_experts), minimum)
        for expert in range(num_experts):
            queue = [(t, w) for t in range(first, first + part) for e, w in choices[t] if e == expert]
            if policy == "probs":
                queue.sort(key=lambda entry: -entry[1].item())
            dropped += max(0, len(queue) - capacity)
            for t, w in queue[:capacity]:
                output[t] = output[t] + w * _expert(tokens[t], weights, expert, gated)
    liked = [[e for e, _ in token] for token in choices]
    if (router.bias is not None or router.groups) and not router.forced:
        liked = [sorted(range(num_experts), key=lambda e: -probabilities[t, e].item())[:topk] for t in range(n)]
        liked = [liked[t] if t in text else [] for t in range(n)]
    sequences = range(batch) if router.balancing == "seq_aux_loss" else [None]
    parts = []
    for sequence in sequences:
        own = [t for t in text if sequence is None or t % batch == sequence]
        loads = [sum(e == expert for t in own for e in liked[t]) for expert in range(num_experts)]
        share = torch.tensor(loads, dtype=tokens.dtype) / (topk * len(own))
        parts.append(num_experts * (share * probabilities[own].mean(0)).sum())
    balance = torch.stack(parts).mean()
    for t in range(n) if "shared_experts.linear_fc1.weight" in weights else ():
        output[t] = output[t] + _shared(tokens[t], weights, gated)
    z = (logits[text].exp().sum(-1).log() ** 2).mean()
    entropy = -(probabilities[text] * probabilities[text].log()).sum(-1).mean()
    return NaiveResult(torch.stack(output), balance, z, dropped, counts, entropy)


def _chosen(ranking: Tensor, token: int, topk: int, router: NaiveRouter) -> list[int]:
    """The experts of one token, best first."""
    num_experts = ranking.shape[0]
    if router.forced:
        return [(token * topk + i) % num_experts for i in range(topk)]
    values = ranking.tolist()
    if router.score == "sigmoid":
        values = [1 / (1 + math.exp(-value)) for value in values]
    if router.bias is not None:
        values = [value + offset for value, offset in zip(values, router.bias, strict=True)]
    open_experts = list(range(num_experts))
    if router.groups is not None:
        number, chosen = router.groups
        size = num_experts // number
        groups = [list(range(g * size, (g + 1) * size)) for g in range(number)]
        best = sorted(groups, key=lambda g: -sum(sorted((values[e] for e in g), reverse=True)[: topk // chosen]))
        open_experts = [e for group in best[:chosen] for e in group]
    return sorted(open_experts, key=lambda e: -values[e])[:topk]


def _weights(logits: Tensor, order: list[int], topk: int, pre_softmax: bool, router: NaiveRouter) -> Tensor:
    if router.balancing == "sinkhorn" and not router.forced:
        return 1 / (1 + (-logits[order]).exp()) if topk == 1 else logits.softmax(-1)[order]
    if router.score == "sigmoid":
        scores = 1 / (1 + (-logits[order]).exp())
        return router.scaling * (scores / scores.sum() if topk > 1 else scores)
    return router.scaling * (logits.softmax(-1)[order] if pre_softmax else logits[order].softmax(-1))


def _sinkhorn(logits: Tensor) -> Tensor:
    """Rows and columns of exp(logits) scaled by turns until the columns' factors stand still (S-BASE, Megatron)."""
    cost = logits.exp()
    column, error = torch.ones(cost.shape[1], dtype=cost.dtype), 1.0
    while error > 1e-4:
        row = 1 / cost.shape[0] / ((column * cost).sum(1) + 1e-8)
        before, column = column, 1 / cost.shape[1] / ((row.unsqueeze(1) * cost).sum(0) + 1e-8)
        error = (before - column).abs().mean().item()
    return column * cost * row.unsqueeze(1)


def _shared(token: Tensor, weights: dict[str, Tensor], gated: bool) -> Tensor:
    """The expert of every token, times its own sigmoid gate where it has one."""
    names = {"weight1": "linear_fc1.weight", "bias1": "linear_fc1.bias", "weight2": "linear_fc2.weight"}
    names["bias2"] = "linear_fc2.bias"
    own = {
        f"experts.{name}": weights[f"shared_experts.{dense}"].unsqueeze(0)
        for name, dense in names.items()
        if f"shared_experts.{dense}" in weights
    }
    output = _expert(token, own, 0, gated)
    if "shared_experts.gate_weight" in weights:
        output = output * torch.sigmoid(weights["shared_experts.gate_weight"][0] @ token)
    return output


def _expert(token: Tensor, weights: dict[str, Tensor], expert: int, gated: bool) -> Tensor:
    first = weights["experts.weight1"][expert]
    bias = weights["experts.bias1"][expert] if "experts.bias1" in weights else None
    if gated:
        gate, up = first[0] @ token, first[1] @ token
        if bias is not None:
            gate, up = gate + bias[0], up + bias[1]
        hidden = gate * torch.sigmoid(gate) * up
    else:
        hidden = first @ token if bias is None else first @ token + bias
        hidden = F.gelu(hidden)
    out = weights["experts.weight2"][expert] @ hidden
    return out if bias is None else out + weights["experts.bias2"][expert]
