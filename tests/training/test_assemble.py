"""What a run is made of. References: the samples of one process; numbers by hand."""

from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_parm.config.parser import parse_run_config
from megatron_parm.config.run import RunConfig, check_run, resolve
from megatron_parm.errors import LayoutError
from megatron_parm.observe.log import Log
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.launch import LaunchEnvironment
from megatron_parm.training.assemble import (
    Assembly,
    assemble,
    join_ranks,
    make_model,
    make_schedule,
    make_tokenizer,
    named_layout,
)
from megatron_parm.training.progress_state import RunProgress
from tests.harness.layouts import Layout
from tests.harness.pools import Pools
from tests.training.runs import MOE, Text, flags

SINGLE = Layout(1)


def _config(argv: list[str], world: int = 1) -> RunConfig:
    config, _ = parse_run_config(argv)
    check_run(config, world)
    return resolve(config, world)


def _assemble(ctx: ParallelContext, argv: list[str], **more: Any) -> Assembly:
    said = Text()
    return assemble(_config(argv, ctx.world.size), ctx, Log(ctx.rank, out=said, err=said), **more)


def _samples(ctx: ParallelContext, argv: list[str], steps: int, consumed: int) -> list[list[list[int]]]:
    """The token rows that this rank reads in each step."""
    run = _assemble(ctx, argv)
    assert run.datasets.train is not None
    stream = run.batches(run.datasets.train, consumed)
    found = []
    for _ in range(steps):
        batches = list(islice(stream, run.plan.num_micro_batches_at(0)))
        found.append([row for batch in batches for row in batch["tokens"].tolist()])
    return found


def _by_step(parts: list[list[list[list[int]]]], ranks: range) -> list[list[list[int]]]:
    """All rows of each step, over some ranks, sorted."""
    return [sorted(row for rank in ranks for row in parts[rank][step]) for step in range(len(parts[0]))]


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_every_data_parallel_size_reads_the_same_global_batches(pools: Pools, corpus: str, micro_batch: int) -> None:
    """None repeated, none skipped, also when the number of ranks changes on the way."""
    argv = flags(corpus, f"--micro-batch-size {micro_batch}")
    (alone,) = pools.run(SINGLE, _samples, argv, 4, 0)
    wanted = [sorted(rows) for rows in alone]
    assert all(len(rows) == 8 for rows in wanted) and wanted[0] != wanted[1]
    assert _by_step(pools.run(Layout(4), _samples, argv, 4, 0), range(4)) == wanted
    assert _by_step(pools.run(Layout(2), _samples, argv, 2, 16), range(2)) == wanted[2:]


def test_tp_peers_read_the_same_rows(pools: Pools, corpus: str) -> None:
    parts = pools.run(Layout(4, tp=2), _samples, [*flags(corpus), "--tensor-model-parallel-size", "2"], 2, 0)
    assert parts[0] == parts[1] != parts[2] == parts[3]


def test_the_samples_asked_for_follow_the_flags_and_the_start(corpus: str) -> None:
    """278 samples an epoch: 4 x 8 need one; 40 iterations need two; a start far ahead asks for what is to come."""

    def length(more: str, **start: int) -> int | None:
        run = _assemble(ParallelContext.single(), flags(corpus, more), start=RunProgress(**start) if start else None)
        return None if run.datasets.train is None else len(run.datasets.train)

    assert length("") == 278
    assert length("--train-iters 40") == 556
    assert length("--train-iters 40", iteration=20, consumed_train_samples=160) == 556
    assert length("--train-iters 4", iteration=2, consumed_train_samples=270) == 556
    assert length("--train-iters 4", iteration=9, consumed_train_samples=72) == 278
    assert length("--skip-train --eval-iters 1") is None


def test_the_end_of_a_document_is_asked_of_the_tokenizer_only_where_it_means_something(corpus: str) -> None:
    run = _assemble(ParallelContext.single(), flags(corpus, "--eod-mask-loss --reset-position-ids --train-iters 30"))
    assert run.datasets.train is not None
    masked = 0
    for number in range(100):
        sample = run.datasets.train[number]
        ends = torch.tensor(sample["tokens"]) == 30
        assert torch.equal(torch.tensor(sample["loss_mask"]) == 0, ends)
        masked += int(ends.sum())
    assert masked > 10
    plain = _assemble(ParallelContext.single(), flags(corpus)).datasets.train
    assert plain is not None and all(plain[number]["loss_mask"].all() for number in range(100))


def test_a_padded_vocabulary_is_kept_where_it_can_be_cut(corpus: str) -> None:
    ctx, config = ParallelContext.single(), _config(flags(corpus, "--make-vocab-size-divisible-by 8"))
    for saved, rows in ((None, 32), (48, 48), (31, 31), (30, 32)):
        assert make_model(config, 31, ctx, saved)[2] == rows


def test_extra_ids_enlarge_the_vocabulary(corpus: str) -> None:
    tokenizer, vocab_size = make_tokenizer(_config(flags(corpus, "--vocab-extra-ids 5")))
    assert (tokenizer.eod, tokenizer.vocab_size, vocab_size) == (30, 36, 36)


def test_the_schedules_are_those_of_the_flags(corpus: str) -> None:
    """In samples: 3 iterations of warm-up, 10 of decay, 8 at once."""
    schedule = make_schedule(_config(flags(corpus, "--train-iters 10 --lr-warmup-iters 3 --weight-decay 0.2")))
    assert (schedule.warmup_samples, schedule.decay_samples) == (24, 80)
    assert [schedule.learning_rate(samples) for samples in (0, 12, 24, 80)] == pytest.approx([0, 5e-3, 1e-2, 1e-3])
    assert schedule.weight_decay(5) == 0.2


def test_deterministic_mode_is_torchs(corpus: str) -> None:
    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(False)
        make_model(_config(flags(corpus)), 31, ParallelContext.single())
        assert not torch.are_deterministic_algorithms_enabled()
        make_model(_config(flags(corpus, "--deterministic-mode")), 31, ParallelContext.single())
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(before)


def _layout(ctx: ParallelContext) -> dict[str, int]:
    return named_layout(ctx)


def test_the_layout_by_name(pools: Pools) -> None:
    found = pools.run(Layout(8, tp=2, ep=2, esp=2), _layout)
    assert found == [{"world": 8, "tp": 2, "pp": 1, "ep": 2, "esp": 2, "dp": 4, "edp": 2}] * 8
    assert list(found[0]) == ["world", "tp", "pp", "ep", "esp", "dp", "edp"]


def _streams(ctx: ParallelContext, argv: list[str]) -> tuple[Tensor, Tensor]:
    """Numbers of the replicated and of the sharded stream."""
    run = _assemble(ctx, argv)
    return torch.rand(4, generator=run.random_states.replicated), torch.rand(4)


def test_dropout_draws_alike_on_tp_peers_and_apart_elsewhere(pools: Pools, corpus: str) -> None:
    argv = flags(corpus, MOE, "--tensor-model-parallel-size 2")
    (a, b, c, d) = pools.run(Layout(4, tp=2), _streams, argv)
    assert torch.equal(a[0], b[0]) and torch.equal(c[0], d[0]) and not torch.equal(a[0], c[0])
    sharded = [one[1] for one in (a, b, c, d)]
    assert not any(torch.equal(sharded[i], sharded[j]) for i in range(4) for j in range(i))


def test_sizes_are_checked_before_any_rendezvous(corpus: str) -> None:
    """Nobody listens at this address: a rank that tried would wait."""
    environment = LaunchEnvironment(0, 3, 0, 3, "192.0.2.1", 9, 0)
    config, _ = parse_run_config(flags(corpus, "--tensor-model-parallel-size 2"))
    with pytest.raises(LayoutError, match="--tensor-model-parallel-size 2"):
        join_ranks(config, environment, Log(0))


def test_joining_alone_fills_in_the_defaults(corpus: str) -> None:
    config, _ = parse_run_config(flags(corpus, "--global-batch-size 0 --distributed-backend nccl"))
    said = Text()
    environment = LaunchEnvironment(0, 1, 0, 1, "127.0.0.1", 29500, 0)
    joined, ctx = join_ranks(config, environment, Log(0, err=said))
    assert ctx.world.size == 1 and joined.global_batch_size == 2 and joined.model.ffn_hidden_size == 64
    if not torch.cuda.is_available():
        assert ctx.device.type == "cpu" and "warning: --distributed-backend nccl" in said.text
