"""Dispatch and combine: tokens into expert buckets, and expert outputs back to tokens. Floor 5.

Buckets come as a list of chunks. A padded chunk is one dense tensor `[E, segments * c, h]`; a packed one is `Packed`:
the rows of the kept choices sorted by expert, with the numbers of rows that every rank holds. Gradients are exact for
dropped choices too: nothing flows to them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_parm.moe.routing import Routing, chunk_counts
from megatron_parm.parallel import transport
from megatron_parm.parallel.context import Axis

Loads = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Packed:
    """Rows `[r, h]` sorted by (peer, expert); counts[p][e]: rows of the e-th expert in the block of peer p.

    loads[w][E]: the rows of this chunk that rank w of the announcing axis sends to expert E; from it every rank knows
    what it will receive in every step. Empty before `announce`.
    """

    rows: Tensor
    counts: Loads
    loads: Loads = ()

    @property
    def splits(self) -> list[int]:
        """Rows in the block of each peer."""
        return [sum(block) for block in self.counts]


Buckets = Tensor | Packed


def dispatch(tokens: Tensor, routing: Routing) -> list[Buckets]:
    """Tokens `[n, h]` into the chunks of their buckets: `[E, segments * c, h]`, empty slots zero, or `Packed`."""
    topk = routing.expert.shape[1]
    copies = tokens.unsqueeze(1).expand(-1, topk, -1).flatten(0, 1)  # [n * k, h]
    rows = copies.new_zeros(routing.num_rows + 1, tokens.shape[1])  # the last row takes the dropped choices
    rows.index_copy_(0, routing.row.flatten(), copies)
    if routing.slots is not None:
        shape = (routing.chunks, routing.counts.shape[0], routing.segments * routing.slots, tokens.shape[1])
        return list(rows[:-1].view(shape).unbind(0))
    per_chunk = _counts_by_chunk(routing.kept_counts.tolist(), routing.chunks)
    sizes = [sum(counts) for counts in per_chunk]
    blocks = torch.split(rows[: sum(sizes)], sizes)
    return [Packed(block, (counts,)) for block, counts in zip(blocks, per_chunk, strict=True)]


def announce(parts: list[Buckets], axis: Axis) -> list[Buckets]:
    """Tell all ranks of `axis` how many rows go to each expert; padded buckets need no word. Call on all ranks."""
    if not isinstance(parts[0], Packed):
        return parts
    packed = [part for part in parts if isinstance(part, Packed)]
    if axis.size == 1:
        return [replace(part, loads=part.counts) for part in packed]
    mine = torch.tensor([part.counts[0] for part in packed], device=packed[0].rows.device)  # [chunks, E]
    everyone = transport.gather_stack(mine, axis).transpose(0, 1).tolist()  # [chunks][axis][E]
    return [
        replace(part, loads=tuple(tuple(counts) for counts in table))
        for part, table in zip(packed, everyone, strict=True)
    ]


def combine(parts: Sequence[Buckets], routing: Routing) -> Tensor:
    """Expert outputs back to tokens: sum over k of weight * row, `[n, h]`. A dropped choice adds nothing."""
    flat = [part.rows if isinstance(part, Packed) else part.flatten(0, 1) for part in parts]
    rows = flat[0] if len(flat) == 1 else torch.cat(flat)
    if rows.shape[0] == 0:
        rows = rows.sum(0, keepdim=True)  # one row of zeros through which backward goes as on every other rank
    row = torch.where(routing.kept, routing.row, 0)
    chosen = rows.index_select(0, row.flatten()).view(*row.shape, rows.shape[1])  # [n, k, h]
    weight = routing.weight.to(rows.dtype).unsqueeze(1)  # [n, 1, k]
    return torch.bmm(weight, chosen).squeeze(1)  # [n, h]


def _counts_by_chunk(counts: list[int], chunks: int) -> list[tuple[int, ...]]:
    return list(zip(*(chunk_counts(count, chunks) for count in counts), strict=True))
