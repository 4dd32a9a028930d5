"""Whole runs with recomputation against the same runs without: every figure and every bit. FC-22."""

from typing import Any

import pytest

from megatron_parm.parallel.context import ParallelContext
from tests.harness.collectives import counted
from tests.harness.layouts import Layout
from tests.harness.pools import Pools
from tests.training.runs import DROPOUT, MOE, Outcome, flags, run_training, same_bits

SELECTIVE = "--recompute-granularity selective --recompute-modules"
WAYS = {
    "attention": "--recompute-activations",
    "experts": f"{SELECTIVE} moe",
    "everything selective": f"{SELECTIVE} core_attn layernorm mlp moe",
    "whole layers": "--recompute-granularity full",
    "of 2021": "--checkpoint-activations --activations-checkpoint-method uniform --checkpoint-num-layers 2",
    "first layer": "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
}
LAYOUTS = [Layout(1), Layout(2, tp=2), Layout(4, tp=2, ep=2, esp=2), Layout(4, ep=2, esp=2)]
# three losses' worth of figures: z-loss, balance loss, and with a limited capacity the drops
EXPERTS = f"{MOE} --moe-z-loss-coeff 0.001 --moe-layer-freq ([1]+[0])"


def _argv(corpus: str, layout: Layout, schedule: str, more: str = "") -> list[str]:
    sizes = (
        f"--tensor-model-parallel-size {layout.tp} --expert-model-parallel-size {layout.ep} "
        f"--expert-tensor-parallel-size {layout.esp}"
    )
    return flags(corpus, EXPERTS, DROPOUT, f"--moe-schedule {schedule} --train-iters 2", sizes, more)


def _run(pools: Pools, layout: Layout, argv: list[str]) -> list[Outcome]:
    outcomes: list[Outcome] = pools.run(layout, run_training, argv)
    assert all(outcome.error is None for outcome in outcomes), outcomes[0].error
    return outcomes


@pytest.mark.cover(
    layout=LAYOUTS,
    way=list(WAYS),
    schedule=["baseline", "s1", "s2"],
    more=["", "--moe-expert-capacity-factor -1", "--sequence-parallel", "--bf16 --fp32-residual-connection"],
    where=lambda layout, way, schedule, more: "factor" not in more or schedule != "s2",
)
def test_every_figure_and_every_bit_is_that_of_a_run_without(
    pools: Pools, corpus: str, layout: Layout, way: str, schedule: str, more: str
) -> None:
    """FC-22: losses, balance loss, z-loss, drops and loads are counted once; weights, moments and streams agree."""
    argv = _argv(corpus, layout, schedule, more)
    plain = _run(pools, layout, argv)
    again = _run(pools, layout, [*argv, *WAYS[way].split()])
    for found, wanted in zip(again, plain, strict=True):
        assert found.figures() == wanted.figures()
        for name in ("z_loss", "moe"):
            assert found.column(name) == wanted.column(name)
        assert same_bits(found.state, wanted.state) == []


def _collectives(ctx: ParallelContext, argv: list[str]) -> list[str]:
    calls: list[str] = []
    with counted(calls):
        assert run_training(ctx, argv).error is None
    return calls


@pytest.mark.parametrize(
    ("schedule", "capacity"),
    [(name, "") for name in ("baseline", "s1", "s2", "s1h", "s2h")]
    + [(name, "--moe-expert-capacity-factor -1") for name in ("baseline", "s1", "s1h")],
)
def test_experts_run_again_without_their_collectives_and_whole_layers_with_them(
    pools: Pools, corpus: str, schedule: str, capacity: str
) -> None:
    """All ranks call the same ones in the same order, as many each time."""
    layout = Layout(4, tp=2, ep=2, esp=2)
    found: dict[str, list[str]] = {}
    for way in ("", f"{SELECTIVE} core_attn layernorm mlp moe", "--recompute-granularity full"):
        first, *others = pools.run(layout, _collectives, _argv(corpus, layout, schedule, f"{capacity} {way}"))
        assert all(calls == first for calls in others)
        found[way] = first
    plain, selective, full = found.values()
    assert selective == plain
    assert len(full) > len(plain)


def _idle(pools: Pools, corpus: str, more: str) -> Any:
    argv = _argv(corpus, Layout(4, ep=4), "s1", f"--moe-expert-capacity-factor -1 --micro-batch-size 1 {more}")
    return [outcome.figures() for outcome in _run(pools, Layout(4, ep=4), argv)]


def test_ranks_whose_experts_got_few_tokens_recompute_alike(pools: Pools, corpus: str) -> None:
    """8 tokens and 16 choices over 4 experts on 4 ranks: what is kept may be empty, and nobody waits."""
    wanted = _idle(pools, corpus, "")
    for way in ("experts", "whole layers"):
        assert _idle(pools, corpus, WAYS[way]) == wanted


@pytest.mark.parametrize("way", ["", "whole layers", "everything selective"])
def test_stages_pass_on_a_stream_in_fp32_and_recompute_alike(pools: Pools, corpus: str, way: str) -> None:
    """A bf16 model over two stages, with micro-batches in flight, against one process; nothing is added in another
    order but the norm of all gradients."""
    argv = flags(corpus, MOE, "--train-iters 2 --micro-batch-size 2 --bf16 --fp32-residual-connection")
    (alone,) = _run(pools, Layout(1), argv)
    more = f"--pipeline-model-parallel-size 2 {WAYS[way]}" if way else "--pipeline-model-parallel-size 2"
    for outcome in _run(pools, Layout(2, pp=2), [*argv, *more.split()]):
        for name in ("lm_loss", "load_balancing_loss", "grad_norm"):
            assert outcome.column(name) == pytest.approx(alone.column(name), rel=1e-3)
