"""Micro-batches of a step. Reference: Megatron's rule, micro-batches = global / (micro x dp); by hand."""

import pytest

from megatron_parm.errors import ConfigError
from megatron_parm.pipeline.micro_batches import BatchPlan


@pytest.mark.parametrize(
    ("global_batch", "micro_batch", "dp", "expected"),
    [(8, 2, 2, 2), (8, 8, 1, 1), (8, 1, 1, 8), (0, 3, 4, 1), (12, 3, 4, 1)],
)
def test_number_of_micro_batches(global_batch: int, micro_batch: int, dp: int, expected: int) -> None:
    plan = BatchPlan.of(global_batch, micro_batch, dp)
    assert plan.num_micro_batches_at(0) == plan.num_micro_batches_at(1000) == expected
    assert plan.global_batch_size_at(0) == expected * micro_batch * dp


@pytest.mark.parametrize(
    ("global_batch", "micro_batch", "dp", "words"),
    [
        (10, 2, 4, ["--global-batch-size 10", "--micro-batch-size 2", "4 data-parallel ranks = 8", "8 or 16"]),
        (4, 2, 4, ["--global-batch-size 8", "or --micro-batch-size 1"]),
        (24, 5, 4, ["20 or 40", "--micro-batch-size 3"]),
        (8, 0, 1, ["--micro-batch-size 0"]),
        (-8, 1, 1, ["--global-batch-size -8"]),
    ],
)
def test_sizes_that_do_not_fit(global_batch: int, micro_batch: int, dp: int, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        BatchPlan.of(global_batch, micro_batch, dp)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("global_batch", [7, 10, 23])
def test_the_remedies_work(global_batch: int) -> None:
    with pytest.raises(ConfigError) as caught:
        BatchPlan.of(global_batch, 3, 2)
    remedy = str(caught.value).split("use --global-batch-size ")[1]
    sizes, _, micro = remedy.partition(", or --micro-batch-size ")
    for size in sizes.split(" or "):
        BatchPlan.of(int(size), 3, 2)
    if micro:
        BatchPlan.of(global_batch, int(micro), 2)
