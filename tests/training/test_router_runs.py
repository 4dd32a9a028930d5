"""Whole runs with the router's options. References: one process, and the run that was never stopped."""

from pathlib import Path

import pytest
import torch

from tests.harness.layouts import Layout
from tests.harness.pools import Pools
from tests.training.runs import Outcome, flags, run_training, same_bits

EVERYTHING = (
    "--num-experts 4 --moe-expert-capacity-factor 2 --moe-router-score-function sigmoid --moe-aux-loss-coeff 0.01 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.02 "
    "--moe-router-num-groups 2 --moe-router-group-topk 1 --moe-router-topk-scaling-factor 1.5 "
    "--moe-shared-expert-intermediate-size 8 --moe-shared-expert-gate"
)
SPREAD = Layout(4, tp=2, ep=2)
SIZES = "--tensor-model-parallel-size 2 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
BIASES = [f"model.decoder.layers.{layer}.mlp.router.expert_bias" for layer in (0, 1)]


def _run(pools: Pools, layout: Layout, argv: list[str]) -> list[Outcome]:
    outcomes: list[Outcome] = pools.run(layout, run_training, argv)
    assert outcomes[0].error is None, outcomes[0].error
    return outcomes


@pytest.mark.parametrize("schedule", ["s1", "s2", "baseline"])
def test_losses_and_biases_are_those_of_one_process(pools: Pools, corpus: str, schedule: str) -> None:
    """The biases move by the loads of the whole step over all ranks: the same on each, as in one process."""
    exact = "--precision fp64 --train-iters 6"
    alone = _run(pools, Layout(1), flags(corpus, EVERYTHING, exact))[0]
    found = _run(pools, SPREAD, flags(corpus, EVERYTHING, exact, SIZES, f"--moe-schedule {schedule}"))
    for outcome in found:
        for name in ("lm_loss", "load_balancing_loss", "grad_norm"):
            assert outcome.column(name) == pytest.approx(alone.column(name), rel=1e-9)
        for name in BIASES:
            assert torch.equal(outcome.state[name], alone.state[name])
            assert outcome.state[name].abs().max() > 0.01, "they did move"


def test_a_resumed_run_is_bitwise_the_uninterrupted_one(pools: Pools, corpus: str, tmp_path: Path) -> None:
    """FC-11 and FC-29: biases, and the jitter's stream, in bf16."""
    argv = flags(corpus, EVERYTHING, SIZES, "--moe-input-jitter-eps 0.1 --precision bf16 --train-iters 6")
    whole = _run(pools, SPREAD, argv)
    folder = [*argv, "--save", str(tmp_path), "--load", str(tmp_path)]
    _run(pools, SPREAD, [*folder, "--exit-interval", "3"])
    for ours, theirs in zip(_run(pools, SPREAD, folder), whole, strict=True):
        assert ours.figures() == theirs.figures()[3:]
        assert same_bits(ours.state, theirs.state) == []
        assert ours.state[BIASES[0]].dtype == torch.float32


def test_another_router_does_not_load(pools: Pools, corpus: str, tmp_path: Path) -> None:
    """FC-20: settings of the router that change what the weights mean."""
    argv = flags(corpus, EVERYTHING, "--train-iters 1 --save", str(tmp_path))
    _run(pools, Layout(1), argv)
    other = flags(corpus, EVERYTHING, "--moe-router-topk-scaling-factor 2.5 --train-iters 2 --load", str(tmp_path))
    error = pools.run(Layout(1), run_training, other)[0].error
    assert error is not None and "--moe-router-topk-scaling-factor: 2.5 here, 1.5 in the checkpoint" in error[2]


def test_each_layer_is_told_where_it_is_asked_for(pools: Pools, corpus: str) -> None:
    """Means over the layers are the figures of the run."""
    outcome = _run(pools, SPREAD, flags(corpus, EVERYTHING, SIZES, "--moe-per-layer-logging"))[0]
    event = outcome.of("train")[-1]
    layers = event["moe"]["layers"]
    assert [one["layer"] for one in layers] == [0, 1]
    assert sum(one["load_balancing_loss"] for one in layers) / 2 == pytest.approx(event["load_balancing_loss"])
    assert sum(one["max_load"] for one in layers) / 2 == pytest.approx(event["moe"]["max_load"])
    plain = _run(pools, Layout(1), flags(corpus, EVERYTHING))[0]
    assert "layers" not in plain.of("train")[-1]["moe"]
