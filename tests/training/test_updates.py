"""Reductions beside backward, ZeRO-1 and fp16 in whole runs. Reference: the same run of one process, or without them.

A run in float64 must give one process's numbers to 1e-9 on every layout; a resume on the same layout, the same bits.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from megatron_parm.grads.buffer import GradientBuffers
from megatron_parm.grads.gaps import ExchangeGaps
from megatron_parm.grads.overlap import OverlappedReduction
from megatron_parm.grads.reduce import SequentialReduction
from megatron_parm.layers.attention import SelfAttention
from megatron_parm.optim.gather import ParameterGather
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.sharding import spec_of
from megatron_parm.training.trainer import Trainer
from tests.harness.layouts import Layout
from tests.harness.pools import Pools
from tests.training.runs import MOE, Outcome, flags, make_trainer, run_training, same_bits

EXACT = 1e-9  # float64: the same sums in another order
SINGLE = Layout(1)
LAYOUTS = (Layout(2), Layout(2, ep=2), Layout(4, ep=2), Layout(4, tp=2, ep=2), Layout(8, tp=2, esp=2, ep=2))
OVERLAP = "--overlap-grad-reduce --ddp-bucket-size 300"
ZERO = "--use-distributed-optimizer --ddp-bucket-size 500"
WAYS = (OVERLAP, f"{OVERLAP} --moe-grad-reduce anywhere", ZERO, f"{ZERO} {OVERLAP} --overlap-param-gather")


def _sizes(layout: Layout) -> str:
    return (
        f"--tensor-model-parallel-size {layout.tp} --expert-model-parallel-size {layout.ep} "
        f"--expert-tensor-parallel-size {layout.esp}"
    )


def _run(pools: Pools, layout: Layout, argv: list[str], *more: str, fault: Any = None) -> list[Outcome]:
    words = [*argv, *f"{_sizes(layout)} --micro-batch-size 1 {' '.join(more)}".split()]
    outcomes: list[Outcome] = pools.run(layout, run_training, words, fault)
    return outcomes


def _figures(outcome: Outcome) -> list[float]:
    assert outcome.error is None, outcome.error
    return [value for name in ("lm_loss", "load_balancing_loss", "grad_norm") for value in outcome.column(name)]


@pytest.mark.cover(layout=LAYOUTS, way=WAYS)
def test_every_way_to_update_equals_one_process(pools: Pools, corpus: str, layout: Layout, way: str) -> None:
    """Two or more micro-batches a step, evaluation between steps, norms and counts of the logs included."""
    argv = flags(
        corpus, MOE, "--precision fp64 --train-iters 3 --eval-interval 2 --eval-iters 1 --moe-aux-loss-coeff 0"
    )
    argv += ["--log-num-zeros-in-grad", "--log-params-norm"]
    alone = _run(pools, SINGLE, argv)[0]
    for outcome in _run(pools, layout, argv, way):
        assert _figures(outcome) == pytest.approx(_figures(alone), rel=EXACT)
        assert outcome.column("params_norm") == pytest.approx(alone.column("params_norm"), rel=EXACT)
        assert outcome.column("lm_loss", "valid") == pytest.approx(alone.column("lm_loss", "valid"), rel=EXACT)


@contextmanager
def _own_parts_only(rank: int) -> Iterator[None]:
    with patch.object(ParameterGather, "run", lambda self: None):
        yield


@contextmanager
def _every_micro_batch_is_the_last(rank: int) -> Iterator[None]:
    """What a reduction that does not count does: a bucket goes out after the first micro-batch."""
    begin = OverlappedReduction.begin

    def once(self: OverlappedReduction, num_micro_batches: int) -> None:
        begin(self, 1)

    with patch.object(OverlappedReduction, "begin", once):
        yield


def test_control_parameters_that_are_not_gathered_are_detected(pools: Pools, corpus: str) -> None:
    argv = flags(corpus, MOE, "--precision fp64 --train-iters 3")
    alone = _figures(_run(pools, SINGLE, argv)[0])
    wrong = _figures(_run(pools, Layout(2), argv, ZERO, fault=_own_parts_only)[0])
    assert wrong != pytest.approx(alone, rel=1e-6)


def test_control_a_bucket_that_is_sent_too_early_is_an_error(pools: Pools, corpus: str) -> None:
    argv = flags(corpus, MOE, "--precision fp64 --train-iters 1")
    with pytest.raises(AssertionError, match="came after its bucket was sent"):
        _run(pools, Layout(2), argv, OVERLAP, fault=_every_micro_batch_is_the_last)


def _held(ctx: ParallelContext, argv: list[str]) -> dict[str, float]:
    """Elements of the first moment over elements of the parameters of this rank, by role."""
    trainer = make_trainer(ctx, argv, [], None)
    moments = trainer.run.optimizer.state_tensors()["exp_avg"]
    kept, whole = Counter[str](), Counter[str]()
    for name, parameter in trainer.run.built.model.named_parameters():
        role = spec_of(parameter).role
        kept[role] += moments[name].numel()
        whole[role] += parameter.numel()
    return {role: kept[role] / whole[role] for role in whole}


@pytest.mark.parametrize("layout", [Layout(4), Layout(4, ep=2), Layout(4, ep=4)], ids=str)
def test_each_replica_keeps_its_share_of_the_moments(pools: Pools, corpus: str, layout: Layout) -> None:
    """1/dp of the dense parameters and 1/edp of the experts', within 5 %; with one replica all of those."""
    argv = [*flags(corpus, MOE, ZERO, _sizes(layout), "--hidden-size 64 --micro-batch-size 1")]
    for shares in pools.run(layout, _held, argv):
        assert shares == pytest.approx({"dense": 1 / layout.grid.dp, "expert": 1 / layout.grid.edp}, rel=0.05)


def test_what_a_rank_is_going_to_hold_is_said_at_the_start(pools: Pools, corpus: str) -> None:
    """bf16 by hand: 2 bytes a weight, 4 a gradient, 12 a master with its two moments, or its share under ZeRO-1."""
    argv = flags(corpus, "--bf16 --hidden-size 64 --train-iters 1 --micro-batch-size 1 --global-batch-size 2")
    for layout, way, share in ((SINGLE, "", 1), (Layout(2), ZERO, 2)):
        outcome = pools.run(layout, run_training, [*argv, *way.split()])[0]
        count = outcome.of("start")[0]["parameters"]["per_rank"] / 2**20
        line = next(line for line in outcome.said.splitlines() if "memory of a rank" in line)
        for part, size in (("weights", 2 * count), ("gradients", 4 * count), ("optimizer", 12 * count / share)):
            told = float(line.split(f"{part} ")[1].split(",")[0])
            assert told == pytest.approx(size, abs=0.05 + 0.02 * size)
        assert "activations" in line and "MoE" not in line


# --- checkpoints ---


def test_a_sharded_run_resumes_bit_for_bit(pools: Pools, corpus: str, tmp_path: Path) -> None:
    layout, way = Layout(4, ep=2), f"{ZERO} {OVERLAP} --overlap-param-gather --bf16"
    argv = flags(corpus, MOE, "--attention-dropout 0.1 --hidden-dropout 0.1")
    straight = _run(pools, layout, argv, way)
    save = f"--save {tmp_path} --load {tmp_path}"
    _run(pools, layout, argv, way, save, "--exit-interval 2")
    for resumed, whole in zip(_run(pools, layout, argv, way, save), straight, strict=True):
        assert resumed.figures() == whole.figures()[2:]
        assert same_bits(resumed.state, whole.state) == []


@pytest.mark.parametrize("target", [Layout(2, ep=2), Layout(4, tp=2, ep=2), SINGLE], ids=str)
@pytest.mark.parametrize("first_is_sharded", [True, False])
def test_sharded_and_whole_state_load_each_other_on_any_replicas(
    pools: Pools, corpus: str, tmp_path: Path, target: Layout, first_is_sharded: bool
) -> None:
    """FC-18. Reference: the run that neither changes its layout nor shards."""
    argv = flags(corpus, MOE, "--precision fp64 --moe-aux-loss-coeff 0")
    whole = _run(pools, SINGLE, argv)[0]
    save = f"--save {tmp_path} --load {tmp_path}"
    ways = (ZERO, "") if first_is_sharded else ("", ZERO)
    _run(pools, Layout(4, ep=2), argv, save, "--exit-interval 2", ways[0])
    for outcome in _run(pools, target, argv, save, ways[1]):
        losses = outcome.column("lm_loss") + outcome.column("grad_norm")
        assert losses == pytest.approx(whole.column("lm_loss")[2:] + whole.column("grad_norm")[2:], rel=EXACT)


# --- precision ---


def test_fp16_skips_overflows_on_all_ranks_and_changes_only_counters(pools: Pools, corpus: str) -> None:
    """A scale of 2^60 overflows: with hysteresis 1 it is halved in every step, and no weight moves meanwhile."""
    argv = flags(corpus, MOE, "--fp16 --initial-loss-scale 1152921504606846976 --hysteresis 1 --train-iters 3")
    layout = Layout(2, ep=2)
    start = _run(pools, layout, argv, "--skip-train")
    for outcome, before in zip(_run(pools, layout, argv), start, strict=True):
        assert outcome.error is None and outcome.column("skipped") == [1, 1, 1]
        assert outcome.column("loss_scale") == [2.0**60, 2.0**59, 2.0**58]
        assert outcome.progress["skipped"] == 3 and outcome.progress["scheduled_samples"] == 0
        weights = {name for name in outcome.state if name.startswith(("model.", "optimizer."))}
        assert not weights & set(same_bits(outcome.state, before.state))


def test_fp16_follows_fp32_and_its_scale_survives_a_resume(pools: Pools, corpus: str, tmp_path: Path) -> None:
    """Half precision has 11 bits: losses within 1 % of float32 over 4 steps."""
    scale = "--initial-loss-scale 1024 --loss-scale-window 2"
    layout = Layout(2, ep=2)
    wide = _run(pools, layout, flags(corpus, MOE))[0]
    argv = flags(corpus, MOE, "--fp16", scale, f"--save {tmp_path} --load {tmp_path}")
    first = _run(pools, layout, argv, "--exit-interval 3")[0]
    rest = _run(pools, layout, argv)[0]
    assert first.column("loss_scale") + rest.column("loss_scale") == [1024, 1024, 2048, 2048]
    assert first.column("lm_loss") + rest.column("lm_loss") == pytest.approx(wide.column("lm_loss"), rel=1e-2)


def test_gradients_travel_in_bf16_when_asked(pools: Pools, corpus: str) -> None:
    """8 bits: near the run that sends float32, and not equal to it."""
    argv = flags(corpus, MOE, "--bf16")
    for way in ("", ZERO):
        wide, narrow = (_run(pools, Layout(2), argv, way, more)[0] for more in ("", "--grad-reduce-in-bf16"))
        assert narrow.column("grad_norm") == pytest.approx(wide.column("grad_norm"), rel=2e-2)
        assert narrow.column("grad_norm") != wide.column("grad_norm")


# --- guards ---


@contextmanager
def _nan_gradient(where: int, parameter: str, rank: int) -> Iterator[None]:
    """On rank `where` the gradient of one parameter is NaN before it is reduced."""
    spoiled = {cls: cls.finish for cls in (SequentialReduction, OverlappedReduction)}

    def finish(self: Any, divisor: float) -> None:
        buffers: GradientBuffers = self._buffers
        if rank == where:
            buffers.gradient_of(parameter).view(-1)[0] = math.nan
        spoiled[type(self)](self, divisor)

    with patch.object(SequentialReduction, "finish", finish):
        yield


@pytest.mark.parametrize("where", [0, 3])
@pytest.mark.parametrize("way", ["", ZERO])
def test_a_nan_gradient_stops_all_ranks_naming_rank_and_parameter(
    pools: Pools, corpus: str, where: int, way: str
) -> None:
    name = "decoder.layers.1.mlp.experts.weight1"
    fault = functools.partial(_nan_gradient, where, name)
    for outcome in _run(pools, Layout(4, ep=2), flags(corpus, MOE), way, fault=fault):
        assert outcome.error is not None and outcome.error[:2] == ("NonFiniteError", 24)
        assert f"(rank {where}: gradient of {name})" in outcome.error[2]


@contextmanager
def _flipped_bit(where: int, rank: int) -> Iterator[None]:
    """After the second step one bit of a weight is another on rank `where`."""
    compare = Trainer._compare_replicas

    def flip_and_compare(self: Trainer) -> None:
        if rank == where and self.progress.iteration == 2:
            weight = self.run.buffers.parameters["decoder.final_layernorm.weight"]
            weight.data.view(torch.int32)[3] ^= 1
        compare(self)

    with patch.object(Trainer, "_compare_replicas", flip_and_compare):
        yield


@contextmanager
def _nan_in_forward(where: int, layer: int, rank: int) -> Iterator[None]:
    """On rank `where` one number of what a layer's attention gives is NaN; every layer after it is spoiled too."""
    forward = SelfAttention.forward
    calls = itertools.count()

    def spoiled(self: SelfAttention, *given: Any) -> torch.Tensor:
        output = forward(self, *given)
        is_here = rank == where and next(calls) % 2 == layer  # of two layers
        return output * torch.where(torch.arange(output.shape[-1]) == 0, math.nan, 1.0) if is_here else output

    with patch.object(SelfAttention, "forward", spoiled):
        yield


@pytest.mark.parametrize("layer", [0, 1])
def test_a_nan_born_in_forward_stops_all_ranks_naming_rank_and_layer(pools: Pools, corpus: str, layer: int) -> None:
    fault = functools.partial(_nan_in_forward, 1, layer)
    for outcome in _run(pools, Layout(2), flags(corpus, MOE), fault=fault):
        assert outcome.error is not None and outcome.error[:2] == ("NonFiniteError", 24)
        assert f"rank 1: its loss is not finite, forward of decoder.layers.{layer}.self_attention" in outcome.error[2]
        assert "rank 0:" not in outcome.error[2]


@pytest.mark.parametrize(("layout", "named"), [(Layout(4), "rank 2 of dp"), (Layout(2), "ranks 0, 1 of dp")], ids=str)
def test_a_flipped_bit_in_a_replica_stops_the_run_with_code_25(
    pools: Pools, corpus: str, layout: Layout, named: str
) -> None:
    """Of four the odd one is named, of two both. A run without a fault passes."""
    argv = flags(corpus, MOE, "--check-weight-hash-across-dp-replicas-interval 2")
    fault = functools.partial(_flipped_bit, layout.world - 2 if layout.world == 4 else 1)
    for outcome in _run(pools, layout, argv, fault=fault):
        assert outcome.error is not None and outcome.error[:2] == ("CorruptionError", 25)
        assert f"decoder.final_layernorm.weight on {named}" in outcome.error[2]
        assert "iteration 2" in outcome.error[2]
    for sound in (Layout(4, tp=2, ep=2), Layout(4, ep=2)):
        assert all(outcome.error is None for outcome in _run(pools, sound, argv, ZERO))


# --- when reductions may start ---


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def test_the_gap_is_closed_only_while_a_watched_layer_runs_backward() -> None:
    log: list[str] = []
    before, watched, after = (_Layer() for _ in range(3))
    gaps = ExchangeGaps([watched])
    gaps.when_open(lambda: log.append("opened"))
    for layer, name in ((before, "before"), (watched, "watched"), (after, "after")):
        layer.weight.register_post_accumulate_grad_hook(
            functools.partial(lambda name, _: log.append(f"{name} {gaps.is_open}"), name)
        )
    for _ in range(2):
        log.clear()
        after(watched(before(torch.ones(1)))).sum().backward()
        assert log == ["after True", "watched False", "opened", "before True"]
