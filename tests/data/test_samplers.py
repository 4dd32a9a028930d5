"""Samples of each micro-batch. Reference: the rules of Megatron's two samplers, written out for small numbers."""

from itertools import islice

import pytest
import torch

from megatron_parm.data.samplers import CyclicSampler, SequentialSampler, build_sampler
from megatron_parm.errors import ConfigError


def blocks(kind, total, consumed, micro, dp, count, **options):
    """Per block the lists of all dp ranks."""
    ranks = [islice(iter(kind(total, consumed, micro, rank, dp, **options)), count) for rank in range(dp)]
    return list(zip(*ranks, strict=True))


def test_sequential_blocks_are_dealt_in_order() -> None:
    assert blocks(SequentialSampler, 13, 0, 2, 3, 99) == [([0, 1], [2, 3], [4, 5]), ([6, 7], [8, 9], [10, 11])]
    assert blocks(SequentialSampler, 13, 4, 2, 2, 99) == [([4, 5], [6, 7]), ([8, 9], [10, 11])]


@pytest.mark.parametrize("consumed", [0, 8, 16, 24])
def test_a_global_batch_has_the_same_samples_for_every_dp(consumed) -> None:
    for micro, dp in ((1, 1), (2, 2), (4, 2), (1, 8), (8, 1), (2, 4)):
        taken = blocks(SequentialSampler, 32, consumed, micro, dp, 8 // (micro * dp))
        assert sorted(i for block in taken for part in block for i in part) == list(range(consumed, consumed + 8))


def test_the_tail_is_left_out_on_all_ranks_alike() -> None:  # FC-31
    assert blocks(SequentialSampler, 5, 0, 2, 2, 99) == [([0, 1], [2, 3])]
    assert blocks(SequentialSampler, 3, 0, 2, 2, 99) == []
    assert blocks(SequentialSampler, 5, 5, 2, 2, 99) == []


def test_cyclic_sharded_known_order() -> None:
    order = torch.randperm(4, generator=torch.Generator().manual_seed(0)).tolist()
    next_order = torch.randperm(4, generator=torch.Generator().manual_seed(1)).tolist()
    taken = blocks(CyclicSampler, 9, 0, 2, 2, 4)  # 9 samples, blocks of 4: two blocks an epoch, buckets of 4
    first = [i for block in taken[:2] for i in block[0]]
    second = [i for block in taken[:2] for i in block[1]]
    assert first == order and second == [4 + i for i in order]
    assert [i for block in taken[2:] for i in block[0]] == next_order


def test_cyclic_unsharded_known_order() -> None:
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0)).tolist()
    taken = blocks(CyclicSampler, 9, 0, 2, 2, 2, is_sharded=False)
    assert [i for block in taken for i in block[0]] == order[0::2]
    assert [i for block in taken for i in block[1]] == order[1::2]


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize(("total", "micro", "dp"), [(9, 2, 2), (16, 2, 2), (23, 3, 2), (10, 1, 3), (7, 2, 3)])
def test_cyclic_epochs_repeat_nothing_and_resume_exactly(total, micro, dp, sharded) -> None:
    per_epoch = total // (micro * dp)
    straight = blocks(CyclicSampler, total, 0, micro, dp, 3 * per_epoch + 1, is_sharded=sharded)
    for epoch in range(3):
        taken = [i for block in straight[epoch * per_epoch :][:per_epoch] for part in block for i in part]
        assert len(set(taken)) == len(taken) == per_epoch * micro * dp
        assert set(taken) <= set(range(total))
    for done in range(3 * per_epoch):
        resumed = blocks(CyclicSampler, total, done * micro * dp, micro, dp, 1, is_sharded=sharded)
        assert resumed[0] == straight[done]


def test_what_cannot_work_is_named() -> None:
    with pytest.raises(ConfigError, match=r"3 samples are fewer.*--micro-batch-size 2 \* 2"):
        CyclicSampler(3, 0, 2, 0, 2)
    with pytest.raises(ConfigError, match=r"6 consumed samples.*--micro-batch-size 2 \* 2"):
        CyclicSampler(16, 6, 2, 0, 2)
    with pytest.raises(ConfigError, match="--dataloader-type external"):
        build_sampler("external", 8, 0, 1, 0, 1)


def test_build_by_name() -> None:
    assert isinstance(build_sampler("single", 8, 0, 1, 0, 1), SequentialSampler)
    assert build_sampler("cyclic", 8, 0, 1, 0, 1, is_sharded=False) == CyclicSampler(8, 0, 1, 0, 1, False)
