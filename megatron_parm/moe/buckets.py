"""Dispatch and combine: tokens into expert slots, and expert outputs back to tokens. Floor 5.

With a capacity the buckets are one dense tensor `[E, segments * c, h]`; dropless they are `Ragged`: the rows of all
choices sorted by expert, with their counts. Gradients are exact for dropped choices too: nothing flows to them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_parm.moe.routing import Routing

Counts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Ragged:
    """Rows `[r, h]` sorted by (peer, expert).

    counts[p][e]: rows of the e-th expert in the block of peer p. home: after an exchange, the counts of what was sent,
    which is what comes back.
    """

    rows: Tensor
    counts: Counts
    home: Counts | None = None

    @property
    def splits(self) -> list[int]:
        """Rows in the block of each peer."""
        return [sum(block) for block in self.counts]


Buckets = Tensor | Ragged


def dispatch(tokens: Tensor, routing: Routing) -> Buckets:
    """Tokens `[n, h]` into buckets: `[E, segments * c, h]`, empty slots zero, or `Ragged` of one block."""
    topk = routing.expert.shape[1]
    copies = tokens.unsqueeze(1).expand(-1, topk, -1).flatten(0, 1)  # [n * k, h]
    if routing.slots is None:
        rows = copies.new_empty(routing.num_rows, tokens.shape[1])
        rows.index_copy_(0, routing.row.flatten(), copies)
        return Ragged(rows, (tuple(routing.counts.tolist()),))
    spilled = copies.new_zeros(routing.num_rows + 1, tokens.shape[1])  # the last row takes the dropped choices
    spilled.index_copy_(0, routing.row.flatten(), copies)
    return spilled[:-1].view(routing.counts.shape[0], -1, tokens.shape[1])  # [E, segments * c, h]


def combine(buckets: Buckets, routing: Routing) -> Tensor:
    """Expert outputs back to tokens: sum over k of weight * row, `[n, h]`. A dropped choice adds nothing."""
    rows = buckets.rows if isinstance(buckets, Ragged) else buckets.flatten(0, 1)
    row = torch.where(routing.kept, routing.row, 0)
    chosen = rows.index_select(0, row.flatten()).view(*row.shape, rows.shape[1])  # [n, k, h]
    weight = routing.weight.to(rows.dtype).unsqueeze(1)  # [n, 1, k]
    return torch.bmm(weight, chosen).squeeze(1)  # [n, h]
