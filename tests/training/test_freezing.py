"""Frozen parameters and factors of the learning rate in whole runs.

References: the initial weights bit for bit, one process in float64, and updates of plain gradient descent.
"""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from megatron_parm.parallel.context import ParallelContext
from tests.harness.layouts import SINGLE, Layout
from tests.harness.pools import Pools
from tests.training.runs import MOE, Outcome, flags, make_trainer, run_training, state_of

EXACT = 1e-9  # float64: the same sums in another order
FROZEN = "--freeze embedding.* decoder.layers.0.* *.router.*"
RUN = "--precision fp64 --train-iters 3 --moe-aux-loss-coeff 0 --micro-batch-size 1"
ZERO = "--use-distributed-optimizer --ddp-bucket-size 500"
WAYS = [
    (SINGLE, ""),
    (Layout(2), f"{ZERO} --overlap-grad-reduce --overlap-param-gather"),
    (Layout(2, pp=2), ""),
    (Layout(2, pp=2), "--pipeline-schedule zero-bubble"),
    (Layout(2, tp=2), "--sequence-parallel --recompute-granularity full"),
    (Layout(4, pp=2), f"{ZERO} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1"),
    (Layout(8, tp=2, esp=2, ep=2), f"{ZERO} --moe-schedule s1"),
]


def _sizes(layout: Layout) -> str:
    return (
        f"--tensor-model-parallel-size {layout.tp} --expert-model-parallel-size {layout.ep} "
        f"--expert-tensor-parallel-size {layout.esp} --pipeline-model-parallel-size {layout.pp}"
    )


def _initial(ctx: ParallelContext, argv: list[str]) -> Mapping[str, Tensor]:
    return state_of(make_trainer(ctx, argv, [], None))


def _is_frozen(name: str) -> bool:
    return ".embedding." in name or ".layers.0." in name or ".router." in name


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_frozen_weights_stay_bit_for_bit_and_have_no_state(pools: Pools, corpus: str, way: tuple[Layout, str]) -> None:
    """With a first stage that is frozen whole under pp; the losses are those of one process."""
    layout, more = way
    depth = "--num-layers 4" if "--num-layers 4" in more else ""
    argv = flags(corpus, MOE, RUN, FROZEN, depth)
    alone: Outcome = pools.run(SINGLE, run_training, argv)[0]
    assert alone.error is None, alone.error
    words = [*argv, *f"{more} {_sizes(layout)}".split()]
    initial = pools.run(layout, _initial, words)
    outcomes = pools.run(layout, run_training, words)
    moved = 0
    for start, end in zip(initial, outcomes, strict=True):
        assert end.error is None, end.error
        assert end.column("lm_loss") == pytest.approx(alone.column("lm_loss"), rel=EXACT)
        assert end.column("grad_norm") == pytest.approx(alone.column("grad_norm"), rel=EXACT)
        for name, value in start.items():
            if name.startswith("model."):
                is_same = torch.equal(value, end.state[name])
                assert is_same or not _is_frozen(name), name
                moved += not is_same
        assert not [name for name in end.state if name.startswith("optimizer.") and _is_frozen(name)]
    assert moved > 0


def test_control_without_freezing_they_move(pools: Pools, corpus: str) -> None:
    argv = flags(corpus, MOE, RUN)
    (start,), (end,) = pools.run(SINGLE, _initial, argv), pools.run(SINGLE, run_training, argv)
    frozen = [name for name in start if name.startswith("model.") and _is_frozen(name)]
    assert len(frozen) > 8 and not any(torch.equal(start[name], end.state[name]) for name in frozen)


def test_a_resume_with_frozen_weights_is_bitwise(pools: Pools, corpus: str, tmp_path: object) -> None:
    argv = flags(corpus, MOE, FROZEN, ZERO, "--train-iters 4 --micro-batch-size 1")
    folder = f"--save {tmp_path} --load {tmp_path}".split()
    straight = pools.run(Layout(2), run_training, argv)
    pools.run(Layout(2), run_training, [*argv, *folder, "--exit-interval", "2"])
    for whole, ended in zip(straight, pools.run(Layout(2), run_training, [*argv, *folder]), strict=True):
        assert ended.error is None, ended.error
        assert [name for name in whole.state if not torch.equal(whole.state[name], ended.state[name])] == []


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("--freeze decoder.layer.0.*", ("--freeze decoder.layer.0.*", "decoder.layers.0.")),
        ("--lr-factor decoder.layers.7.*=2", ("--lr-factor decoder.layers.7.*", "decoder.layers.")),
        ("--freeze *", ("--freeze *", "nothing is left to train")),
    ],
)
def test_a_pattern_that_means_nothing_is_an_error_on_all_ranks(
    pools: Pools, corpus: str, more: str, told: tuple[str, ...]
) -> None:
    argv = flags(corpus, MOE, "--micro-batch-size 1 --pipeline-model-parallel-size 2", more)
    for outcome in pools.run(Layout(2, pp=2), run_training, argv):
        assert outcome.error is not None and outcome.error[:2] == ("ConfigError", 2)
        assert all(text in outcome.error[2] for text in told)


def _step(pools: Pools, layout: Layout, argv: list[str]) -> dict[str, Tensor]:
    """What one update of plain gradient descent adds to each weight of the first rank."""
    start, end = pools.run(layout, _initial, argv)[0], pools.run(layout, run_training, argv)[0]
    assert end.error is None, end.error
    return {name: end.state[name] - value for name, value in start.items() if name.startswith("model.")}


@pytest.mark.parametrize("way", [(SINGLE, ""), (Layout(2), ZERO), (Layout(2, pp=2), "")], ids=str)
def test_each_update_is_its_factor_times_the_plain_one(pools: Pools, corpus: str, way: tuple[Layout, str]) -> None:
    """Two layers, decay 1/2: the embedding 1/8, the first layer 1/4, the last 1/2, the final norm 1."""
    layout, more = way
    plain = "--optimizer sgd --sgd-momentum 0 --weight-decay 0 --clip-grad 0 --train-iters 1 --precision fp64"
    argv = flags(corpus, MOE, plain, "--micro-batch-size 1 --lr 0.1 --min-lr 0.1", _sizes(layout), more)
    before = _step(pools, layout, argv)
    after = _step(pools, layout, [*argv, *["--layer-lr-decay", "0.5", "--lr-factor", "*.router.*=3", "*.bias=0"]])
    for name, change in before.items():
        factor = 1.0 if "final_layernorm" in name else 0.125 if "embedding" in name else 0.0
        factor = 0.25 if ".layers.0." in name else 0.5 if ".layers.1." in name else factor
        factor *= 3 if ".router." in name else 1
        expected = change * (0.0 if name.endswith(".bias") else factor)
        torch.testing.assert_close(after[name], expected, rtol=1e-9, atol=1e-14, msg=name)
