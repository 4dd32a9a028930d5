"""Upcycling a dense checkpoint. Reference: the dense model's own validation loss, in float64."""

from pathlib import Path

import pytest

from tests.harness.layouts import Layout
from tests.harness.pools import Pools
from tests.training.runs import flags, run_training

EVALUATE = "--eval-iters 1 --eval-interval 100 --precision fp64"
EXPERTS = "--num-experts 4 --moe-expert-capacity-factor 2 --moe-use-upcycling --skip-train"
SAME = 1e-12  # relative: the same numbers in another order
CORRUPT = 21


@pytest.fixture(scope="module")
def dense(pools: Pools, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, float]:
    """The folder of a trained dense model with gated layers, and its validation loss at the end."""
    root = str(tmp_path_factory.mktemp("dense"))
    argv = flags(corpus, EVALUATE, "--swiglu --ffn-hidden-size 24 --train-iters 3 --save", root)
    outcome = pools.run(Layout(1), run_training, argv)[0]
    assert outcome.error is None
    return root, outcome.column("lm_loss", "valid")[0]


def _upcycled(pools: Pools, corpus: str, layout: Layout, root: str, more: str) -> float:
    sizes = (
        f"--tensor-model-parallel-size {layout.tp} --expert-model-parallel-size {layout.ep} "
        f"--expert-tensor-parallel-size {layout.esp}"
    )
    argv = flags(corpus, EVALUATE, "--swiglu --ffn-hidden-size 24", EXPERTS, sizes, more, "--load", root)
    outcomes = pools.run(layout, run_training, argv)
    assert outcomes[0].error is None, outcomes[0].error
    assert outcomes[0].progress["iteration"] == 0
    loss: float = outcomes[0].column("lm_loss", "valid")[0]
    return loss


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        (Layout(1), "--moe-schedule s1"),
        (Layout(4, tp=2, ep=2), "--moe-schedule baseline"),
        (Layout(4, tp=2, esp=2, ep=2), "--moe-schedule s1"),
        (Layout(4, tp=2, esp=2, ep=2), "--moe-schedule s2"),
        (Layout(4, tp=2, esp=2, ep=2), "--moe-schedule s1h"),
        (Layout(4, tp=2, esp=2, ep=2), "--moe-schedule s2h"),
        (Layout(4, tp=2, esp=2, ep=2), "--moe-schedule deepspeed"),
        (Layout(1), "--moe-layer-freq 2"),
        (Layout(1), "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"),
    ],
    ids=str,
)
def test_the_model_starts_as_the_dense_one(
    pools: Pools, corpus: str, dense: tuple[str, float], layout: Layout, more: str
) -> None:
    root, loss = dense
    assert _upcycled(pools, corpus, layout, root, more) == pytest.approx(loss, rel=SAME)


def test_weights_that_do_not_sum_to_1_would_show(pools: Pools, corpus: str, dense: tuple[str, float]) -> None:
    """Negative control: a capacity that drops tokens is allowed with a note, and is another function."""
    root, loss = dense
    assert abs(_upcycled(pools, corpus, Layout(1), root, "--moe-expert-capacity-factor 0.3") - loss) > 1e-4


def test_a_checkpoint_with_experts_is_refused(
    pools: Pools, corpus: str, dense: tuple[str, float], tmp_path: Path
) -> None:
    common = flags(corpus, EVALUATE, "--swiglu --ffn-hidden-size 24 --num-experts 4 --moe-expert-capacity-factor 2")
    start = [
        *common,
        "--moe-use-upcycling",
        "--load",
        dense[0],
        "--save",
        str(tmp_path),
        "--train-iters",
        "2",
        "--exit-interval",
        "1",
    ]
    first = pools.run(Layout(1), run_training, start)[0]
    assert first.error is None and first.progress["iteration"] == 1
    again = [*common, "--moe-use-upcycling", "--load", str(tmp_path), "--train-iters", "2"]
    refused = pools.run(Layout(1), run_training, again)[0].error
    assert refused is not None and refused[1] == CORRUPT
    assert "has experts already" in refused[2] and "leave the flag out" in refused[2]
    on = [word for word in again if word != "--moe-use-upcycling"]
    resumed = pools.run(Layout(1), run_training, on)[0]
    assert resumed.error is None and resumed.progress["iteration"] == 2
