"""An MoE layer written token by token, in plain torch, as the judge of every schedule.

It shares no code with the package. One call is one data-parallel rank's micro-batch; `slices` says into how many equal
runs of tokens the capacity is counted (tp for s1, else 1).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


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
) -> NaiveResult:
    num_experts = weights["router.weight"].shape[0]
    logits = tokens @ weights["router.weight"].t()
    probabilities = logits.softmax(-1)
    n = tokens.shape[0]
    choices: list[list[tuple[int, Tensor]]] = []  # per token: (expert, weight)
    for t in range(n):
        order = sorted(range(num_experts), key=lambda e: -logits[t, e].item())[:topk]
        chosen = probabilities[t, order] if pre_softmax else logits[t, order].softmax(-1)
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
    share = torch.tensor(counts, dtype=tokens.dtype) / (topk * n)
    balance = num_experts * (share * probabilities.mean(0)).sum()
    z = (logits.exp().sum(-1).log() ** 2).mean()
    entropy = -(probabilities * probabilities.log()).sum(-1).mean()
    return NaiveResult(torch.stack(output), balance, z, dropped, counts, entropy)


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
