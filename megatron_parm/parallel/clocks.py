"""How far the clocks of the ranks stand apart. Floor 3.

A message that rank r sent after its clock showed `before_r` has arrived when the clock of rank 0 shows `after_0`, and
the other way round. So the offset of r lies between `before_r - after_0` and `after_r - before_0`, in every round; the
narrowest bounds of all rounds hold.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron_parm.parallel import transport
from megatron_parm.parallel.context import Axis

ROUNDS = 20


@dataclass(frozen=True)
class ClockOffset:
    """This rank's clock minus that of rank 0 is `offset_ns`, give or take `uncertainty_ns`."""

    offset_ns: int
    uncertainty_ns: int


def offset_within(lower: int, upper: int) -> ClockOffset:
    """The offset between two bounds: 0 where it may be (ranks of one machine share a clock), else the middle."""
    offset = 0 if lower <= 0 <= upper else (lower + upper) // 2
    return ClockOffset(offset, max(upper - offset, offset - lower))


def bounds(first: Sequence[Sequence[int]], own: Sequence[Sequence[int]]) -> tuple[int, int]:
    """The bounds of a rank's offset from (before, after) of every round, of rank 0 and of its own."""
    lower = max(before - after_0 for (before, _), (_, after_0) in zip(own, first, strict=True))
    upper = min(after - before_0 for (_, after), (before_0, _) in zip(own, first, strict=True))
    return lower, upper


def clock_offset(world: Axis, now_ns: Callable[[], int], device: torch.device) -> ClockOffset:
    """This rank's offset. Call on all ranks of `world`."""
    if world.size == 1:
        return ClockOffset(0, 0)
    rounds: list[tuple[int, int]] = []
    for _ in range(ROUNDS):
        before = now_ns()
        transport.gather_stack(torch.tensor([before], device=device), world).tolist()  # waits for every rank
        rounds.append((before, now_ns()))
    everyone = transport.gather_stack(torch.tensor(rounds, device=device), world).tolist()  # [world, rounds, 2]
    return offset_within(*bounds(everyone[0], everyone[world.rank]))
