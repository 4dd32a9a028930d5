"""Losses and endings of given texts. References: a bigram worked by hand, one forward pass for each prediction."""

import math

import pytest
import torch
from torch import Tensor, nn

from megatron_parm.models.gpt import GPTModel
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.training.text_scores import Span, exact_endings, sliding_windows, text_loss
from tests.harness.layouts import Layout
from tests.harness.pools import Pools
from tests.training.test_generate import WORDS, _model

ALONE = ParallelContext.single()
TEXT = [30, 4, 5, 9, 1, 1, 7, 22, 3, 14, 2, 8, 8, 29, 0, 6]


class Bigram(nn.Module):
    """Over 13 words: b = a + 1 follows a with probability 1/2, each of the twelve others with 1/24."""

    def __init__(self) -> None:
        super().__init__()
        self.tp = ALONE.tp
        self.shape = type("Shape", (), {"vocab_size": 13})()

    def forward(self, tokens: Tensor, positions: Tensor, labels: Tensor | None) -> Tensor:
        if labels is not None:
            return torch.log(torch.where(labels == tokens + 1, 2, 24).double())
        padded = torch.full((*tokens.shape, 16), math.log(1 / 24))
        padded.scatter_(2, (tokens + 1).unsqueeze(2), math.log(1 / 2))
        padded[..., 13:] = 9.0  # rows that pad the vocabulary are no words
        return padded.transpose(0, 1)


def test_windows_count_every_token_once_with_what_context_there_is() -> None:
    spans = sliding_windows(list(range(8)), length=4, stride=2)
    assert spans == [Span((0, 1, 2, 3, 4), 1), Span((2, 3, 4, 5, 6), 3), Span((4, 5, 6, 7), 3)]
    assert sliding_windows([5], 4, 2) == [] and sliding_windows([5, 6], 4, 4) == [Span((5, 6), 1)]
    for count in range(2, 30):
        for length in range(1, 7):
            for stride in range(1, length + 1):
                counted = [
                    i for span in sliding_windows(list(range(count)), length, stride) for i in span.ids[span.first :]
                ]
                assert counted == list(range(1, count))


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_loss_and_endings_are_the_hand_computed_ones(batch_size: int) -> None:
    """0>1 1>2 2>5 counts 3 of 3; 4>7 7>8 counts the last: of four, 0>1, 1>2 and 7>8 have 1/2, 2>5 has 1/24."""
    spans = [Span((0, 1, 2, 5), 1), Span((4, 7, 8), 2)]
    found = text_loss(Bigram(), spans, batch_size, ALONE)  # type: ignore[arg-type]
    assert (found.tokens, found.total) == (4, pytest.approx(3 * math.log(2) + math.log(24)))
    assert found.perplexity == pytest.approx((2**3 * 24) ** 0.25)
    assert exact_endings(Bigram(), spans, batch_size, ALONE) == 1  # type: ignore[arg-type]


def _by_hand(model: GPTModel, ids: list[int], length: int, stride: int) -> float:
    """A forward pass of its own for every prediction, with the context of its window."""
    total = 0.0
    for place in range(1, len(ids)):
        window = max(0, -(-(place - length) // stride)) * stride
        seen = torch.tensor([ids[window:place]])
        logits = model(seen, torch.arange(seen.shape[1]).unsqueeze(0))[-1, 0, :WORDS]
        total -= float(torch.log_softmax(logits.double(), -1)[ids[place]])
    return total


def test_a_perplexity_over_windows_is_that_of_single_predictions() -> None:
    model = _model(ALONE, "--init-method-std 0.3").eval()
    with torch.no_grad():
        for length, stride in ((8, 3), (5, 5), (4, 1)):
            found = text_loss(model, sliding_windows(TEXT, length, stride), 2, ALONE)
            assert found.tokens == len(TEXT) - 1
            assert found.total == pytest.approx(_by_hand(model, TEXT, length, stride), rel=1e-5)
        wrong = text_loss(model, sliding_windows(TEXT, 8, 8), 2, ALONE)  # control: another context
        assert wrong.total != pytest.approx(_by_hand(model, TEXT, 8, 3), rel=1e-4)


def _scores(ctx: ParallelContext, more: str) -> tuple[float, int, int]:
    model = _model(ctx, f"--init-method-std 0.3 {more}").eval()
    spans = sliding_windows(TEXT, 4, 2)
    found = text_loss(model, spans, 2, ctx)
    return found.loss, found.tokens, exact_endings(model, spans, 2, ctx)


@pytest.mark.parametrize("layout", [Layout(2), Layout(2, tp=2), Layout(4, tp=2, esp=2, ep=2)], ids=str)
def test_every_layout_gives_the_figures_of_one_process(pools: Pools, layout: Layout) -> None:
    """On two replicas the seven windows leave one without a window of the last batch."""
    (alone,) = pools.run(Layout(1), _scores, "")
    sizes = (
        f"--tensor-model-parallel-size {layout.tp} --expert-model-parallel-size {layout.ep} "
        f"--expert-tensor-parallel-size {layout.esp}"
    )
    for loss, tokens, right in pools.run(layout, _scores, sizes):
        assert (tokens, right) == alone[1:] and loss == pytest.approx(alone[0], rel=1e-5)
