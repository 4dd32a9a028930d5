"""Balancing without a loss: a bias on each expert's score that moves the choice, never the weight. Floor 5.

Once a step an expert that got more choices than the mean loses a fixed amount of bias, one that got fewer gains it.
Source: Wang et al. 2024 (auxiliary-loss-free load balancing); DeepSeek-V3; Megatron's
`--moe-router-enable-expert-bias`.
"""

from collections.abc import Iterable

import torch

from megatron_parm.moe.gate import Gate
from megatron_parm.moe.record import RoutingSummary


@torch.no_grad()
def update_expert_biases(gates: Iterable[Gate], summary: RoutingSummary, rate: float) -> None:
    """Move the bias of every gate that has one by `rate`. `summary` counts a whole step over all ranks.

    Needs no communication: the counts are the same on every rank, and so are the biases.
    """
    for gate in gates:
        if gate.expert_bias is not None:
            counts = summary.counts_of(gate.layer).to(gate.expert_bias.device)
            gate.expert_bias += rate * torch.sign(counts.mean() - counts).to(gate.expert_bias.dtype)
