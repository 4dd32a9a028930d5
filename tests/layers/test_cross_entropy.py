"""Vocabulary-parallel cross-entropy: FC-33's known answer, torch's F.cross_entropy, and tp against one process."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_parm.layers import cross_entropy
from megatron_parm.layers.cross_entropy import vocabulary_cross_entropy
from megatron_parm.parallel.context import Axis, ParallelContext
from tests.harness.layouts import Layout
from tests.harness.pools import Pools
from tests.layers.parallel_check import TOLERANCE, TP_LAYOUTS

SINGLE = Axis.single("tp")


def _loss(ctx: ParallelContext, logits: Tensor, labels: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Loss and gradient of this rank's columns; the weights of the tokens differ."""
    local = logits.chunk(ctx.tp.size, -1)[ctx.tp.rank].clone().requires_grad_()
    loss = vocabulary_cross_entropy(local * 1, labels, vocab_size=vocab_size, tp=ctx.tp)
    (loss * torch.arange(1.0, 1 + labels.numel()).view(labels.shape)).sum().backward()
    return loss.detach(), local.grad


def reference(logits: Tensor, labels: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    logits = logits.clone().requires_grad_()
    words = logits[..., :vocab_size].flatten(0, 1)
    loss = F.cross_entropy(words, labels.flatten(), reduction="none").view(labels.shape)
    (loss * torch.arange(1.0, 1 + labels.numel()).view(labels.shape)).sum().backward()
    return loss.detach(), logits.grad


def case(columns: int, vocab_size: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    logits = scale * torch.randn(3, 2, columns, generator=generator, dtype=torch.float64)
    return logits, torch.randint(0, vocab_size, (3, 2), generator=generator)


# 7 words in 8 columns: the last rank has a padding column; 3 words in 8: ranks 2 and 3 of 4 have nothing else
@pytest.mark.parametrize("vocab_size", [8, 7, 3])
@pytest.mark.parametrize("layout", [Layout(1), *TP_LAYOUTS], ids=str)
def test_equals_torch_on_every_layout(pools: Pools, layout: Layout, vocab_size: int) -> None:
    logits, labels = case(8, vocab_size, scale=30.0)
    loss, gradient = reference(logits, labels, vocab_size)
    ranks = pools.run(layout, _loss, logits, labels, vocab_size)[: layout.tp]
    for found, _ in ranks:
        torch.testing.assert_close(found, loss, atol=TOLERANCE, rtol=0)
    joined = torch.cat([part for _, part in ranks], -1)
    torch.testing.assert_close(joined, gradient, atol=TOLERANCE, rtol=0)
    assert not joined[..., vocab_size:].any()


def test_known_answer_at_tp_2(pools: Pools) -> None:
    """FC-33: 0.4401897 for logits 0, 1, 2, 3 and label 3; ln 2 more is the fault of logits that are joined already."""
    logits = torch.arange(4, dtype=torch.float32).view(1, 1, 4)
    for loss, _ in pools.run(Layout(2, tp=2), _loss, logits, torch.tensor([[3]]), 4):
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx(0.4401897, abs=1e-6)


def test_padding_is_outside_of_the_softmax() -> None:
    zeros = torch.zeros(1, 1, 8)
    assert vocabulary_cross_entropy(zeros, torch.tensor([[3]]), vocab_size=7, tp=SINGLE).item() == pytest.approx(
        math.log(7), abs=1e-6
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_logits_are_taken_in_float32(dtype: torch.dtype) -> None:
    wide, labels = case(8, 7)
    logits = wide.to(dtype).requires_grad_()
    loss = vocabulary_cross_entropy(logits * 1, labels, vocab_size=7, tp=SINGLE)
    loss.sum().backward()
    expected, _ = reference(logits.detach().double(), labels, 7)
    assert loss.dtype == torch.float32
    assert logits.grad.dtype == dtype
    torch.testing.assert_close(loss.double(), expected, atol=1e-6, rtol=0)


def test_a_label_that_is_no_word_has_no_predicted_word() -> None:
    logits, _ = case(8, 8)
    logits.requires_grad_()
    loss = vocabulary_cross_entropy(logits * 1, torch.full((3, 2), -1), vocab_size=8, tp=SINGLE)
    torch.testing.assert_close(loss, logits.logsumexp(-1))
    (loss * 0).sum().backward()
    assert not logits.grad.any()


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([[[3e4, -3e4, 0.0]]]).requires_grad_()
    loss = vocabulary_cross_entropy(logits * 1, torch.tensor([[1]]), vocab_size=3, tp=SINGLE)
    loss.sum().backward()
    assert loss.item() == 6e4
    assert logits.grad.tolist() == [[[1.0, -1.0, 0.0]]]


def test_nan_is_not_lost() -> None:
    logits = torch.tensor([[[0.0, math.nan, 0.0]]])
    assert vocabulary_cross_entropy(logits, torch.tensor([[0]]), vocab_size=3, tp=SINGLE).isnan().all()


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = case(8, 7)
    whole = vocabulary_cross_entropy(logits.clone(), labels, vocab_size=7, tp=SINGLE)
    monkeypatch.setattr(cross_entropy, "CACHED_ELEMENTS", 28)  # 4 rows of 7, then the last 2
    assert torch.equal(vocabulary_cross_entropy(logits.clone(), labels, vocab_size=7, tp=SINGLE), whole)


def test_memory_is_reused_and_a_second_backward_is_refused() -> None:
    logits, labels = case(8, 8)
    logits.requires_grad_()
    product = logits * 1
    loss = vocabulary_cross_entropy(product, labels, vocab_size=8, tp=SINGLE).sum()
    (gradient,) = torch.autograd.grad(loss, product, retain_graph=True)
    assert gradient.data_ptr() == product.data_ptr()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, product)
