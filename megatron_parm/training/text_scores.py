"""What a trained GPT makes of given texts: the loss of every token, and whether it would have written the end. Floor 7.

Windows and texts are dealt out over data-parallel ranks, each counted once, so a result does not depend on the layout.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_parm.models.gpt import GPTModel
from megatron_parm.parallel import transport
from megatron_parm.parallel.collectives import all_gather
from megatron_parm.parallel.context import ParallelContext


@dataclass(frozen=True)
class Span:
    """Ids of which each but the first is predicted from those before it, and the first that counts."""

    ids: tuple[int, ...]
    first: int


@dataclass(frozen=True)
class TextLoss:
    """nats in all, and tokens counted."""

    total: float
    tokens: int

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.total / max(self.tokens, 1)

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(self.loss)


def sliding_windows(ids: Sequence[int], length: int, stride: int) -> list[Span]:
    """Windows of up to `length` predictions over `ids`; every id but the first counts in exactly one.

    A window counts the ids that the one before it did not reach: all of the first, then `stride` each, with
    `length - stride` predictions before them as context.
    """
    spans, reached = [], 0
    for start in range(0, max(len(ids) - 1, 0), stride):
        stop = min(start + length, len(ids) - 1)
        spans.append(Span(tuple(ids[start : stop + 1]), reached + 1 - start))
        reached = stop
        if stop == len(ids) - 1:
            break
    return spans


def text_loss(model: GPTModel, spans: Sequence[Span], batch_size: int, ctx: ParallelContext) -> TextLoss:
    """The loss of what counts in `spans`. Call on all ranks."""
    sums = torch.zeros(2, dtype=torch.float64, device=ctx.device)
    for tokens, labels, counts in _batches(spans, batch_size, ctx):
        losses = _forward(model, tokens, labels)  # [b, s]
        sums += torch.stack([(losses.double() * counts).sum(), counts.sum()])
    total, tokens = transport.sum_over(sums, ctx.dp).tolist()
    return TextLoss(total, int(tokens))


def exact_endings(model: GPTModel, spans: Sequence[Span], batch_size: int, ctx: ParallelContext) -> int:
    """Of how many spans everything that counts is the likeliest token after what stands before it. On all ranks."""
    right = torch.zeros(1, dtype=torch.float64, device=ctx.device)
    for tokens, labels, counts in _batches(spans, batch_size, ctx):
        logits = _forward(model, tokens, None)  # [s, b, V/tp]
        whole = all_gather(logits, model.tp, 2)[..., : model.shape.vocab_size]  # [s, b, V]
        is_right = (whole.argmax(-1).t() == labels) | (counts == 0)  # [b, s]
        right += (is_right.all(dim=1) & (counts.sum(1) > 0)).sum()
    return int(transport.sum_over(right, ctx.dp).item())


@torch.no_grad()
def _forward(model: GPTModel, tokens: Tensor, labels: Tensor | None) -> Tensor:
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    output: Tensor = model(tokens, positions, labels)
    return output


def _batches(spans: Sequence[Span], batch_size: int, ctx: ParallelContext) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Tokens, labels, and 1 where a prediction counts, [b, s] each; the same shapes on every rank.

    What fills a row follows what counts, so no causal model sees it there.
    """
    block = batch_size * ctx.dp.size
    for start in range(0, len(spans), block):
        group = spans[start : start + block]
        width = max(len(span.ids) for span in group) - 1
        mine = list(group[ctx.dp.rank :: ctx.dp.size])
        rows = -(-len(group) // ctx.dp.size)
        tokens, labels = (torch.zeros(rows, width, dtype=torch.int64) for _ in range(2))
        counts = torch.zeros(rows, width, dtype=torch.float64)
        for row, span in enumerate(mine):
            ids, last = torch.tensor(span.ids), len(span.ids) - 1
            tokens[row, :last], labels[row, :last] = ids[:-1], ids[1:]
            counts[row, span.first - 1 : last] = 1
        yield tokens.to(ctx.device), labels.to(ctx.device), counts.to(ctx.device)
