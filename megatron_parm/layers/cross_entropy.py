"""Cross-entropy over a vocabulary cut over tp, without joining the logits. Floor 4.

Each rank takes the maximum and the sum of exponentials of its own columns; only three numbers a token travel. The
backward, softmax - onehot, needs no further collective. Source: Shoeybi et al. 2019, section 3 (fused parallel loss).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_parm.parallel import transport
from megatron_parm.parallel.context import Axis
from megatron_parm.shapes import expect_shape

# Elements a pass takes at a time on a CPU, 4 MiB of float32, so that its four passes find them in the cache. Measured
# with 2048 x 50257 logits on 2 threads: 73 ms with 2 MiB, 77 with 4, 97 with 16, 117 in one piece; on a busy CPU every
# piece waits for the slowest thread, so not the smallest.
CACHED_ELEMENTS = 1 << 20


def vocabulary_cross_entropy(logits: Tensor, labels: Tensor, *, vocab_size: int, tp: Axis) -> Tensor:
    """Per-token loss [s, b] of `logits` [s, b, V/tp] for `labels` [s, b]. Call on all ranks of tp; identical there.

    Columns from `vocab_size` on are padding and take no part. A label outside of the vocabulary (a position without a
    target) has no predicted word: mask its loss out. Computed and returned in float32, float64 stays. Takes the logits
    over: in float32 and float64 their memory is reused, so do not read them afterwards.
    """
    expect_shape(labels, "s b", s=logits.shape[0], b=logits.shape[1])
    loss: Tensor = _VocabularyCrossEntropy.apply(logits, labels, vocab_size, tp)  # type: ignore[no-untyped-call]
    return loss


class _VocabularyCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(saved: Any, logits: Tensor, labels: Tensor, vocab_size: int, tp: Axis) -> Tensor:
        precision = torch.float64 if logits.dtype == torch.float64 else torch.float32
        columns = logits.shape[-1]
        scores = logits.detach().reshape(-1, columns).to(precision)  # [n, V/tp], the memory of the logits if it can be
        first = tp.rank * columns
        valid = min(max(vocab_size - first, 0), columns)
        target = labels.reshape(-1, 1) - first  # [n, 1]
        is_here = (target >= 0) & (target < valid)
        target = target.masked_fill(~is_here, 0)
        predicted = scores.gather(1, target).masked_fill(~is_here, 0)  # [n, 1]

        highest, total = _exponentiate_(scores, valid)  # [n, 1] each
        highest_of_all = transport.max_over(highest, tp)
        correction = torch.exp(highest - highest_of_all)
        sums = transport.sum_over(torch.stack([total * correction, predicted]), tp)  # [2, n, 1]
        loss = sums[0].log() - (sums[1] - highest_of_all)  # [n, 1]

        saved.save_for_backward(scores, correction / sums[0], target, is_here)
        saved.shape, saved.dtype = logits.shape, logits.dtype
        return loss.view(labels.shape)  # [s, b]

    @staticmethod
    @once_differentiable
    def backward(saved: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        exponentials, scale, target, is_here = saved.saved_tensors
        gradient = gradient.reshape(-1, 1)  # [n, 1]
        exponentials.mul_(gradient * scale)  # [n, V/tp], softmax * gradient
        exponentials.scatter_add_(1, target, -gradient * is_here)
        return exponentials.view(saved.shape).to(saved.dtype), None, None, None


def _exponentiate_(scores: Tensor, valid: int) -> tuple[Tensor, Tensor]:
    """Turn each row into exp(row - max), padding columns into 0. Returns the max and the sum of each row, [n, 1]."""
    highest = scores.new_full((scores.shape[0], 1), -torch.inf)
    total = scores.new_zeros((scores.shape[0], 1))
    scores[:, valid:] = 0
    if valid == 0:
        return highest, total
    rows = max(1, CACHED_ELEMENTS // valid) if scores.device.type == "cpu" else scores.shape[0]
    for start in range(0, scores.shape[0], rows):
        part = scores[start : start + rows, :valid]
        part_highest = highest[start : start + rows]
        torch.amax(part, 1, keepdim=True, out=part_highest)
        torch.sum(part.sub_(part_highest).exp_(), 1, keepdim=True, out=total[start : start + rows])
    return highest, total
