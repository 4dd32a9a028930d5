"""Balance losses, and how they reach the gradient without passing through the model's output. Floor 5.

A loss is attached to the routing weights: forward it changes nothing, backward it starts a gradient of its own. So any
pipeline schedule works, and no loss is carried from layer to layer. Source: parm.md section 3.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


class BackwardScale:
    """What a balance loss is multiplied by in backward: 1 / micro-batches times the loss scale, set by the trainer."""

    def __init__(self, value: float = 1.0) -> None:
        self.value = value


class _AttachLoss(Function):
    @staticmethod
    def forward(saved: Any, carrier: Tensor, loss: Tensor, scale: BackwardScale) -> Tensor:
        saved.scale, saved.loss = scale, (loss.dtype, loss.device)
        return carrier.view_as(carrier)

    @staticmethod
    def backward(saved: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        dtype, device = saved.loss
        return gradient, torch.full((), saved.scale.value, dtype=dtype, device=device), None


def attach_loss(carrier: Tensor, loss: Tensor, scale: BackwardScale) -> Tensor:
    """`carrier` unchanged; whenever its gradient is computed, `loss` (a scalar) gets the gradient `scale.value`."""
    attached = _AttachLoss.apply(carrier, loss, scale)  # type: ignore[no-untyped-call]
    assert isinstance(attached, Tensor)
    return attached


def load_balancing_loss(probabilities: Tensor, counts: Tensor, num_tokens: int | Tensor, topk: int) -> Tensor:
    """E * sum_e (count_e / (k n)) * (sum_t p_te / n), the part of the tokens given.

    probabilities: `[n_here, E]` over all experts; counts: `[E]` choices of all `num_tokens` tokens before drops.
    Where a schedule cuts the tokens, `num_tokens` and counts are those of the whole micro-batch and the parts add up.
    Here and below tokens are those that count: rows of padding are zero, and `num_tokens` is without them.
    """
    share_of_choices = counts.to(probabilities.dtype) / (topk * num_tokens)
    mean_probability = probabilities.sum(dim=0) / num_tokens
    return probabilities.shape[1] * torch.dot(share_of_choices, mean_probability)


def sequence_balancing_loss(
    probabilities: Tensor, counts: Tensor, sample: Tensor, lengths: int | Tensor, topk: int
) -> Tensor:
    """The load-balancing loss of each sequence on its own, their mean: the part of the tokens given.

    sample: `[n_here]`, the sequence of each token; counts: `[samples, E]`; lengths: tokens of each whole sequence, one
    number for all or `[samples, 1]`. Source: DeepSeek-V3, section 2.1.2; Megatron's seq_aux_loss.
    """
    num_samples, num_experts = counts.shape
    membership = torch.nn.functional.one_hot(sample, num_samples).to(probabilities.dtype)  # [n_here, samples]
    mean_probability = membership.t() @ probabilities / lengths  # [samples, E]
    share_of_choices = counts.to(probabilities.dtype) / (topk * lengths)
    return num_experts * (share_of_choices * mean_probability).sum() / num_samples


def z_loss(logits: Tensor, num_tokens: int | Tensor, is_text: Tensor | None = None) -> Tensor:
    """Mean over tokens of logsumexp(logits)^2, the part of the tokens given. Source: Zoph 2022, ST-MoE.

    is_text: bool `[n_here]`, the tokens that count; None: all.
    """
    squares = torch.logsumexp(logits, dim=-1).square()
    return (squares if is_text is None else squares * is_text).sum() / num_tokens
