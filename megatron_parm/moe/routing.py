"""Which bucket row each token goes to: the value that the gate hands to dispatch and combine. Floor 5.

Rows are places in the buckets, flattened. Buckets come in chunks (`--moe-pipeline-chunks`), each contiguous. Padded
buckets give every expert the same number of slots per chunk; a choice that finds no slot is dropped and slots that
nobody takes stay empty. Packed buckets hold the kept choices only, sorted by expert within a chunk. Source: parm.md
sections 1 and 4; Megatron's `--moe-token-drop-policy` and `--moe-pad-expert-input-to-capacity`.
"""

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from megatron_parm.observe.trace import NO_TRACE, Trace

DropPolicy = Literal["probs", "position"]


@dataclass(frozen=True)
class Routing:
    """The choices of n tokens.

    expert, row, kept: `[n, k]`; weight: `[n, k]`, zero where dropped, carries the gradient to the gate. `row` is
    `num_rows` (one past the end) for a dropped choice. counts: `[E]` choices of each expert before drops; kept_counts:
    `[E]` after. slots: rows of an expert in one chunk for each segment, None where the buckets are packed. segments:
    source ranks whose tokens are routed side by side. num_rows: rows of all buckets; of packed ones an upper bound that
    needs no look at the device.
    """

    expert: Tensor
    row: Tensor
    weight: Tensor
    kept: Tensor
    counts: Tensor
    kept_counts: Tensor
    slots: int | None
    segments: int
    chunks: int
    num_rows: int
    trace: Trace = field(default=NO_TRACE, compare=False, repr=False)  # told of dispatch and combine

    def of_segment(self, segment: int) -> "Routing":
        """The routing of one source rank's tokens; rows still point into the buckets of all segments."""
        part = self.expert.shape[0] // self.segments
        own = slice(segment * part, (segment + 1) * part)
        return replace(self, expert=self.expert[own], row=self.row[own], weight=self.weight[own], kept=self.kept[own])


def capacity_of(num_tokens: int, num_experts: int, topk: int, factor: float | None, minimum: int) -> int | None:
    """Slots an expert keeps: max(ceil(k f n / E), minimum). None without a factor (dropless)."""
    if factor is None:
        return None
    # as integers of millionths, so that f = E / k gives n exactly and never n + 1 by rounding
    slots = -(-round(topk * factor * num_tokens * 1_000_000) // (num_experts * 1_000_000))
    return max(slots, minimum)


def chunk_counts(count: int, chunks: int) -> list[int]:
    """How many of `count` rows of an expert each chunk gets: as even as can be."""
    ends = [-(-count * chunk // chunks) for chunk in range(chunks + 1)]
    return [end - start for start, end in pairwise(ends)]


def count_values(index: Tensor, size: int, is_text: Tensor | None = None) -> Tensor:
    """How often each number below `size` stands in `index`: `[size]`. Unlike bincount it never waits for the device.

    is_text: bool `[n]`, the rows of `index` `[n, k]` that count; None: all.
    """
    if is_text is not None:
        return count_values(torch.where(is_text.unsqueeze(1), index, size), size + 1)[:-1]
    index = index.flatten()
    return index.new_zeros(size).scatter_add_(0, index, torch.ones_like(index))


def place(
    expert: Tensor,
    weight: Tensor,
    num_experts: int,
    capacity: int | None,
    *,
    policy: DropPolicy = "probs",
    segments: int = 1,
    padded: bool = True,
    slots_multiple_of: int = 1,
    chunks: int = 1,
    is_text: Tensor | None = None,
) -> Routing:
    """Give every choice (`expert`, `weight`: `[n, k]`) a row, or drop it.

    `capacity` counts within each of `segments` equal runs of tokens; None keeps everything and packs the buckets.
    Policy "probs" keeps the choices of largest weight, "position" the first tokens. Slots of padded buckets are rounded
    up so that each chunk has a multiple of `slots_multiple_of`. is_text: bool `[n]`, False for padding, whose choices
    take no slot and count nowhere; None: all is text. The capacity does not depend on it.
    """
    counts = count_values(expert, num_experts, is_text)
    everything = torch.ones_like(expert, dtype=torch.bool)
    if capacity is None and is_text is None:
        row = _packed_rows(expert, counts, chunks)
        return Routing(expert, row, weight, everything, counts, counts, None, segments, chunks, row.numel())
    owners = num_experts * segments
    segment = torch.arange(segments, device=expert.device).repeat_interleave(expert.numel() // segments)
    owner = expert.flatten() * segments + segment  # [n * k]
    kept = everything if is_text is None else everything & is_text.unsqueeze(1)
    if capacity is not None:
        slot = _slots(torch.where(kept.flatten(), owner, owners), weight, owners + 1, policy)  # padding queues apart
        kept = kept & (slot < capacity).view_as(expert)
    kept_or_none = torch.where(kept, expert, num_experts)
    kept_counts = count_values(kept_or_none, num_experts + 1)[:-1]
    if capacity is None or not padded:
        row = torch.where(kept, _packed_rows(kept_or_none, kept_counts, chunks), expert.numel())
        return Routing(expert, row, weight * kept, kept, counts, kept_counts, None, segments, chunks, row.numel())
    per_chunk = -(-capacity // (slots_multiple_of * chunks)) * slots_multiple_of
    chunk, within = slot // per_chunk, slot % per_chunk
    row = ((chunk * owners + owner) * per_chunk + within).view_as(expert)
    num_rows = chunks * owners * per_chunk
    row = torch.where(kept, row, num_rows)
    return Routing(expert, row, weight * kept, kept, counts, kept_counts, per_chunk, segments, chunks, num_rows)


def _packed_rows(expert: Tensor, counts: Tensor, chunks: int) -> Tensor:
    """The place of each choice after a stable sort by (chunk, expert); chunks cut each expert's rows evenly.

    `counts`: `[E]`; an expert of number E or above is none, and comes last.
    """
    key, num_experts = expert.flatten(), counts.shape[0]
    if chunks > 1:
        sizes = torch.cat([counts, counts.new_ones(1)])
        chunk = _rank_within(key, sizes) * chunks // sizes[key]
        key = torch.where(key < num_experts, chunk * num_experts + key, chunks * num_experts)
    row = torch.empty_like(key)
    row[key.argsort(stable=True)] = torch.arange(key.numel(), device=key.device)
    return row.view_as(expert)


def _slots(owner: Tensor, weight: Tensor, num_owners: int, policy: DropPolicy) -> Tensor:
    """The place of each choice in the queue of its owner: `[n * k]`."""
    counts = count_values(owner, num_owners)
    if policy == "position":
        return _rank_within(owner, counts)
    by_weight = weight.detach().flatten().argsort(descending=True, stable=True)
    slot = torch.empty_like(owner)
    slot[by_weight] = _rank_within(owner[by_weight], counts)
    return slot


def _rank_within(owner: Tensor, counts: Tensor) -> Tensor:
    """How many earlier entries have the same owner."""
    order = owner.argsort(stable=True)
    start = counts.cumsum(0) - counts
    ranked = torch.empty_like(owner)
    ranked[order] = torch.arange(owner.numel(), device=owner.device) - start[owner[order]]
    return ranked
