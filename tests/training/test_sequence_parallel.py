"""Whole runs with --sequence-parallel. References: one process, the ranks among themselves, the uninterrupted run."""

from pathlib import Path

import pytest
import torch

from tests.harness.layouts import Layout
from tests.harness.pools import Pools
from tests.training.runs import MOE, Outcome, flags, run_training, same_bits

EQUAL = 1e-4  # relative, float32 over 3 iterations; FC-24's own limit
LAYOUTS = [Layout(2, tp=2), Layout(2, tp=2, ep=2), Layout(4, tp=2, ep=2, esp=2), Layout(4, tp=4, ep=2, esp=2)]


def _sizes(layout: Layout) -> str:
    return (
        f"--sequence-parallel --tensor-model-parallel-size {layout.tp} --expert-model-parallel-size {layout.ep} "
        f"--expert-tensor-parallel-size {layout.esp}"
    )


def _run(pools: Pools, layout: Layout, argv: list[str]) -> list[Outcome]:
    outcomes: list[Outcome] = pools.run(layout, run_training, argv)
    assert all(outcome.error is None for outcome in outcomes), outcomes[0].error
    return outcomes


@pytest.mark.cover(layout=LAYOUTS, schedule=["baseline", "s1", "s2"])
def test_losses_equal_one_process_and_replicas_stay_bitwise_equal(
    pools: Pools, corpus: str, layout: Layout, schedule: str
) -> None:
    """FC-24: gate, norms, positions and row biases over the tp ranks, of which each used its own slice."""
    argv = flags(corpus, MOE, f"--train-iters 3 --micro-batch-size 4 --moe-schedule {schedule}")
    (alone,) = _run(pools, Layout(1), argv)
    outcomes = _run(pools, layout, [*argv, *_sizes(layout).split()])
    for outcome in outcomes:
        for name in ("lm_loss", "load_balancing_loss", "grad_norm"):
            assert outcome.column(name) == pytest.approx(alone.column(name), rel=EQUAL)
    kinds = ("router", "layernorm", "position", "linear_proj.bias")
    replicated = [name for name in outcomes[0].state if any(kind in name for kind in kinds)]
    assert len(replicated) > 40
    for rank, outcome in enumerate(outcomes):
        first = outcomes[rank // layout.tp * layout.tp].state
        assert [name for name in replicated if not torch.equal(outcome.state[name], first[name])] == []


def test_a_resumed_run_draws_on_bit_for_bit(pools: Pools, corpus: str, tmp_path: Path) -> None:
    """Dropout of slices draws from the stream that differs on tp, which a checkpoint keeps for each rank."""
    layout = LAYOUTS[2]
    argv = flags(corpus, MOE, "--hidden-dropout 0.3 --attention-dropout 0.3", _sizes(layout))
    golden = _run(pools, layout, [*argv, "--train-iters", "4"])
    places = ["--save", str(tmp_path), "--load", str(tmp_path)]
    _run(pools, layout, [*argv, *places, "--train-iters", "4", "--exit-interval", "2"])
    resumed = _run(pools, layout, [*argv, *places, "--train-iters", "4"])
    for after, wanted in zip(resumed, golden, strict=True):
        assert after.column("iteration") == [3, 4]
        assert same_bits(after.state, wanted.state) == []
    assert len({outcome.state["sharded"].numpy().tobytes() for outcome in golden}) == layout.world
