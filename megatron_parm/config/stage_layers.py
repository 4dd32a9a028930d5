"""Which layers each pipeline stage holds. Floor 1.

Stages are numbered in the order in which a token passes them; stage i runs on pipeline rank i % pp. Without virtual
stages a rank holds one run of layers; with v of them it holds v shorter runs, each pp stages after the one before.
Source: Megatron-LM's interleaved schedule (Narayanan 2021, section 2.2) and its --decoder-*-pipeline-num-layers.
"""

from collections.abc import Sequence


def layers_by_rank(num_layers: int, pp: int, first: int | None = None, last: int | None = None) -> list[int]:
    """How many layers each pipeline rank holds: `first` and `last` where given, the others as many each.

    The caller has checked that they come out even.
    """
    if pp == 1:
        return [num_layers]
    fixed = {0: first, pp - 1: last}
    placed = [count for count in fixed.values() if count is not None]
    others = pp - len(placed)
    rest = (num_layers - sum(placed)) // others if others else 0
    return [rest if (count := fixed.get(rank)) is None else count for rank in range(pp)]


def stage_layers(by_rank: Sequence[int], virtual_stages: int = 1) -> tuple[range, ...]:
    """The layers of every stage, `virtual_stages` stages a rank; each rank's number must divide by them."""
    stages, start = [], 0
    for _ in range(virtual_stages):
        for count in by_rank:
            stages.append(range(start, start + count // virtual_stages))
            start = stages[-1].stop
    return tuple(stages)
