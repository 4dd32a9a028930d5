"""Layers of stages. References: Megatron-LM's placements, written by hand; each layer lies on one stage, in order."""

from itertools import pairwise

import pytest

from megatron_parm.config.stage_layers import layers_by_rank, stage_layers


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ((8, 1), [8]),
        ((8, 4), [2, 2, 2, 2]),
        ((8, 2, 3), [3, 5]),
        ((8, 2, None, 1), [7, 1]),
        ((10, 4, 1, 3), [1, 3, 3, 3]),
        ((5, 2, 2, 3), [2, 3]),
    ],
)
def test_layers_of_each_rank(sizes: tuple[int, ...], found: list[int]) -> None:
    assert layers_by_rank(*sizes) == found


def test_virtual_stages_take_turns_over_the_ranks() -> None:
    """Megatron's figure: 8 layers on 2 ranks in 2 virtual stages are 0-1 and 4-5 on rank 0, 2-3 and 6-7 on rank 1."""
    assert stage_layers([4, 4], 2) == (range(2), range(2, 4), range(4, 6), range(6, 8))
    assert stage_layers([2, 4, 6], 2) == (
        range(1), range(1, 3), range(3, 6), range(6, 7), range(7, 9), range(9, 12),
    )  # fmt: skip
    assert stage_layers([3, 5]) == (range(3), range(3, 8))


@pytest.mark.parametrize("virtual_stages", [1, 2, 4])
@pytest.mark.parametrize("by_rank", [[4, 4], [8, 4, 4], [4, 8, 8, 12]])
def test_every_layer_lies_on_one_stage_in_order(by_rank: list[int], virtual_stages: int) -> None:
    stages = stage_layers(by_rank, virtual_stages)
    assert [layer for stage in stages for layer in stage] == list(range(sum(by_rank)))
    assert all(before.stop == after.start for before, after in pairwise(stages))
    for rank, count in enumerate(by_rank):
        assert sum(len(stage) for stage in stages[rank :: len(by_rank)]) == count
