"""Which expert slot each token goes to: the value that the gate hands to dispatch and combine. Floor 5.

Rows are places in the flattened buckets. With a capacity, every expert owns the same number of slots and row =
expert * slots + slot; a choice that finds no slot is dropped. Without a capacity (dropless), rows are the choices
sorted by expert and every choice is kept. Source: parm.md sections 1 and 4; Megatron's `--moe-token-drop-policy`.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

DropPolicy = Literal["probs", "position"]


@dataclass(frozen=True)
class Routing:
    """The choices of n tokens.

    expert, row, kept: `[n, k]`; weight: `[n, k]`, zero where dropped, carries the gradient to the gate. `row` is
    `num_rows` (one past the end) for a dropped choice. counts: `[E]` choices of each expert before drops. slots: rows
    an expert owns for each segment, or None when dropless; segments: source ranks whose tokens are routed side by side.
    """

    expert: Tensor
    row: Tensor
    weight: Tensor
    kept: Tensor
    counts: Tensor
    slots: int | None
    segments: int
    num_rows: int

    def of_segment(self, segment: int) -> "Routing":
        """The routing of one source rank's tokens; rows still point into the buckets of all segments."""
        part = self.expert.shape[0] // self.segments
        own = slice(segment * part, (segment + 1) * part)
        return replace(
            self,
            expert=self.expert[own],
            row=self.row[own],
            weight=self.weight[own],
            kept=self.kept[own],
            segments=1,
        )


def capacity_of(num_tokens: int, num_experts: int, topk: int, factor: float | None, minimum: int) -> int | None:
    """Slots an expert keeps: max(ceil(k f n / E), minimum). None without a factor (dropless)."""
    if factor is None:
        return None
    # as integers of millionths, so that f = E / k gives n exactly and never n + 1 by rounding
    slots = -(-round(topk * factor * num_tokens * 1_000_000) // (num_experts * 1_000_000))
    return max(slots, minimum)


def count_values(index: Tensor, size: int) -> Tensor:
    """How often each number below `size` stands in `index`: `[size]`. Unlike bincount it never waits for the device."""
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
    slots_multiple_of: int = 1,
) -> Routing:
    """Give every choice (`expert`, `weight`: `[n, k]`) a row, or drop it.

    `capacity` counts within each of `segments` equal runs of tokens; slots are rounded up to a multiple of
    `slots_multiple_of` and the extra ones stay empty. Policy "probs" keeps the choices of largest weight,
    "position" the first tokens.
    """
    counts = count_values(expert, num_experts)
    if capacity is None:
        row = _rank_within(expert.flatten(), counts, add_start=True).view_as(expert)
        kept = torch.ones_like(expert, dtype=torch.bool)
        return Routing(expert, row, weight, kept, counts, None, segments, expert.numel())
    slots = -(-capacity // slots_multiple_of) * slots_multiple_of
    owners = num_experts * segments
    segment = torch.arange(segments, device=expert.device).repeat_interleave(expert.numel() // segments)
    owner = expert.flatten() * segments + segment
    slot = _slots(owner, weight, owners, policy)
    kept = slot < capacity
    row = torch.where(kept, owner * slots + slot, owners * slots).view_as(expert)
    kept = kept.view_as(expert)
    return Routing(expert, row, weight * kept, kept, counts, slots, segments, owners * slots)


def _slots(owner: Tensor, weight: Tensor, num_owners: int, policy: DropPolicy) -> Tensor:
    """The place of each choice in the queue of its owner: `[n * k]`."""
    counts = count_values(owner, num_owners)
    if policy == "position":
        return _rank_within(owner, counts)
    by_weight = weight.detach().flatten().argsort(descending=True, stable=True)
    slot = torch.empty_like(owner)
    slot[by_weight] = _rank_within(owner[by_weight], counts)
    return slot


def _rank_within(owner: Tensor, counts: Tensor, *, add_start: bool = False) -> Tensor:
    """How many earlier entries have the same owner; with `add_start` the place after a stable sort by owner."""
    order = owner.argsort(stable=True)
    place_sorted = torch.arange(owner.numel(), device=owner.device)
    if not add_start:
        start = counts.cumsum(0) - counts
        place_sorted = place_sorted - start[owner[order]]
    ranked = torch.empty_like(owner)
    ranked[order] = place_sorted
    return ranked
