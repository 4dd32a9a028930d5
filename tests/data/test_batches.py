"""Micro-batches with and without workers. Reference: samples stacked by hand, and the stream without workers."""

import subprocess
import sys
import textwrap
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_parm.data.batches import collate, micro_batches
from megatron_parm.data.gpt_dataset import DocumentRules, GPTDataset
from megatron_parm.data.indexed_dataset import IndexedDataset
from megatron_parm.data.samplers import CyclicSampler, SequentialSampler
from megatron_parm.data.token_index import build_token_index, plan_epochs
from tests.data.corpora import numbered_documents, write_documents

ROOT = Path(__file__).resolve().parents[2]
EOD = 9999


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    prefix = write_documents(tmp_path_factory.mktemp("batches") / "x", numbered_documents([9, 5, 17, 30, 3] * 8, EOD))
    source = IndexedDataset(prefix)
    plan = plan_epochs(source.num_tokens, 8, None, prefix)
    rules = DocumentRules(EOD, True, True, True)
    return GPTDataset(source, build_token_index(source.lengths, np.arange(40), plan, 1), 8, rules)


def same(first, second) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_collate_stacks_samples(dataset) -> None:
    batch = collate([dataset[3], dataset[5], dataset[7]])
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in batch.items()}
    assert shapes == {
        "tokens": ((3, 8), torch.int64),
        "labels": ((3, 8), torch.int64),
        "loss_mask": ((3, 8), torch.float32),
        "position_ids": ((3, 8), torch.int64),
        "attention_mask": ((3, 1, 8, 8), torch.bool),
    }
    for row, number in enumerate((3, 5, 7)):
        for name, tensor in batch.items():
            assert np.array_equal(tensor[row].numpy(), dataset[number][name])


class Mixed:
    """Samples of numbers of 8, 4 and 1 bytes, of odd counts, a single one among them."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, number):
        return {
            "mask": np.arange(3) > number,
            "one": np.array(number),
            "weight": np.full(5, number / 7, dtype=np.float32),
            "tokens": np.arange(number, number + 3),
        }


def test_numbers_of_any_size_come_back_from_workers() -> None:
    alone = list(micro_batches(Mixed(), SequentialSampler(6, 0, 3, 0, 1)))
    with_workers = list(micro_batches(Mixed(), SequentialSampler(6, 0, 3, 0, 1), num_workers=1))
    assert len(alone) == len(with_workers) == 2
    for first, second in zip(alone, with_workers, strict=True):
        assert same(first, second) and all(first[name].dtype == second[name].dtype for name in first)


def test_workers_change_nothing(dataset) -> None:
    sampler = CyclicSampler(len(dataset), 0, 3, 0, 1)
    count = 2 * len(dataset) // 3
    alone = list(islice(micro_batches(dataset, sampler), count))
    with_workers = list(islice(micro_batches(dataset, sampler, num_workers=2), count))
    assert len(alone) == len(with_workers) == count
    assert all(same(first, second) for first, second in zip(alone, with_workers, strict=True))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resume_continues_the_stream(dataset, num_workers) -> None:
    straight = list(micro_batches(dataset, SequentialSampler(24, 0, 2, 1, 2)))
    resumed = list(micro_batches(dataset, SequentialSampler(24, 12, 2, 1, 2), num_workers))
    assert len(resumed) == 3
    assert all(same(first, second) for first, second in zip(straight[3:], resumed, strict=True))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_default_random_state_is_left_alone(dataset, num_workers) -> None:
    """Else a resumed run, which opens its data once more, would draw other dropout masks."""
    before = torch.get_rng_state()
    next(micro_batches(dataset, SequentialSampler(8, 0, 2, 0, 1), num_workers))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_second_evaluation_reads_the_same_with_and_without_resume(dataset) -> None:  # FC-36
    straight = micro_batches(dataset, SequentialSampler(24, 0, 4, 0, 1))
    evaluations = [list(islice(straight, 2)) for _ in range(3)]
    consumed = 8  # counted by the trainer after the first evaluation, and saved
    resumed = list(islice(micro_batches(dataset, SequentialSampler(24, consumed, 4, 0, 1)), 2))
    assert all(same(first, second) for first, second in zip(evaluations[1], resumed, strict=True))
    assert not same(evaluations[0][0], resumed[0])


RANK = """
    import sys
    import numpy as np
    import torch
    import torch.distributed as dist
    from megatron_parm.data.batches import micro_batches
    from megatron_parm.data.build import GPTDataRules, build_gpt_datasets
    from megatron_parm.data.gpt_dataset import DocumentRules
    from megatron_parm.data.samplers import SequentialSampler

    def main(rank, folder):
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
        rules = GPTDataRules(8, 1234, 10000, DocumentRules(9999))
        train = build_gpt_datasets([f"{folder}/x"], (32, 0, 0), rules, split="1").train
        seen = []
        for batch in micro_batches(train, SequentialSampler(32, 0, 4, rank, 2), num_workers=2):
            gathered = [torch.empty_like(batch["tokens"]) for _ in range(2)]
            dist.all_gather(gathered, batch["tokens"])
            seen.append(torch.cat(gathered))
        expected = np.stack([train[number]["tokens"] for number in range(32)])
        assert np.array_equal(torch.cat(seen).numpy(), expected)
        dist.barrier()
        dist.destroy_process_group()
        print("ok")

    main(int(sys.argv[1]), sys.argv[2])
"""


def test_two_ranks_with_workers_after_gloo_has_started(tmp_path) -> None:  # FC-08: both start with a fresh cache
    write_documents(tmp_path / "x", numbered_documents([9, 5, 17, 30, 3] * 8, EOD))
    (tmp_path / "rank.py").write_text(textwrap.dedent(RANK))
    command = [sys.executable, str(tmp_path / "rank.py")]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path)],
            env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert all(output.endswith("ok\n") for output in outputs)
