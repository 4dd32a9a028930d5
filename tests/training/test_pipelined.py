"""Whole runs through a pipeline. References: the same run of one process; the run without a break, bit for bit.

float64: the same sums in another order, far below 1e-9. Every rank tells the same losses.
"""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megatron_parm.grads.overlap import OverlappedReduction
from megatron_parm.training import step
from tests.harness.layouts import Layout
from tests.harness.pools import Pools
from tests.training.runs import DROPOUT, MOE, Outcome, flags, run_training, same_bits

EQUAL = 1e-9
LAYERS = "--num-layers 4 --precision fp64 --eval-iters 1 --eval-interval 2"
SINGLE = Layout(1)
TWO = "--num-virtual-stages-per-pipeline-rank 2"
ZERO_BUBBLE = "--pipeline-schedule zero-bubble"
OVERLAP = "--overlap-grad-reduce --ddp-bucket-size 300"
ZERO = "--use-distributed-optimizer --ddp-bucket-size 500"
FIGURES = ("lm_loss", "load_balancing_loss", "grad_norm")

# layout, flags
PIPELINES = [
    (Layout(2, pp=2), ""),
    (Layout(4, pp=4), ""),
    (Layout(2, pp=2), TWO),
    (Layout(4, pp=2, ep=2), f"--decoder-first-pipeline-num-layers 1 --moe-layer-freq [0,0,1,1] {ZERO_BUBBLE}"),
    (Layout(4, pp=2, tp=2, esp=2), f"{TWO} {ZERO_BUBBLE} --moe-schedule s1"),
    (Layout(8, pp=2, tp=2, ep=2, esp=2), "--moe-schedule s2"),
    (Layout(4, pp=2), "--untie-embeddings-and-output-weights --moe-layer-freq [1,1,0,0]"),
    (Layout(4, pp=2, ep=2), "--moe-layer-freq 2"),
]


def _sizes(layout: Layout) -> str:
    return (
        f"--pipeline-model-parallel-size {layout.pp} --tensor-model-parallel-size {layout.tp} "
        f"--expert-model-parallel-size {layout.ep} --expert-tensor-parallel-size {layout.esp}"
    )


def _run(pools: Pools, layout: Layout, argv: list[str], **more: Any) -> list[Outcome]:
    outcomes: list[Outcome] = pools.run(layout, run_training, argv, **more)
    assert all(outcome.error is None for outcome in outcomes), outcomes[0].error
    return outcomes


def _alone(more: str) -> str:
    """The flags that shape the model; those of the pipeline left out."""
    words = more.split()
    kept = [f"{word} {words[i + 1]}" for i, word in enumerate(words) if word == "--moe-layer-freq"]
    return " ".join([*kept, *(word for word in words if word.startswith("--untie"))])


@pytest.mark.parametrize(("layout", "more"), PIPELINES, ids=str)
def test_a_pipeline_trains_and_evaluates_as_one_process(pools: Pools, corpus: str, layout: Layout, more: str) -> None:
    """FC-28: MoE layers on some stages or all; the balance loss is that of all layers, told on every stage."""
    whole = _run(pools, SINGLE, flags(corpus, MOE, LAYERS, _alone(more)))[0]
    for outcome in _run(pools, layout, flags(corpus, MOE, LAYERS, _sizes(layout), more)):
        for name in FIGURES:
            assert outcome.column(name) == pytest.approx(whole.column(name), rel=EQUAL)
        assert outcome.column("lm_loss", "valid") == pytest.approx(whole.column("lm_loss", "valid"), rel=EQUAL)
        totals = [one.of("start")[0]["parameters"]["total"] for one in (outcome, whole)]
        assert totals[0] == totals[1] or layout.tp > 1, "tied embeddings count once; tp pads the vocabulary"


@pytest.mark.cover(
    layout=[Layout(4, pp=2), Layout(4, pp=2, ep=2), Layout(8, pp=2, tp=2, ep=2, esp=2)],
    stages=["", TWO, ZERO_BUBBLE],
    way=[OVERLAP, ZERO, f"{ZERO} --overlap-param-gather", f"{ZERO} {OVERLAP} --overlap-param-gather"],
    where=lambda layout, stages, way: not (stages == ZERO_BUBBLE and OVERLAP in way),
)
def test_every_way_to_update_equals_one_process(
    pools: Pools, corpus: str, layout: Layout, stages: str, way: str
) -> None:
    """Gradients reduced beside the backward passes of a schedule, parameters gathered beside its forward passes."""
    argv = flags(corpus, MOE, LAYERS, "--train-iters 3 --micro-batch-size 1")
    whole = _run(pools, SINGLE, argv)[0]
    for outcome in _run(pools, layout, [*argv, *f"{_sizes(layout)} {stages} {way}".split()]):
        for name in FIGURES:
            assert outcome.column(name) == pytest.approx(whole.column(name), rel=EQUAL)
        assert outcome.column("lm_loss", "valid") == pytest.approx(whole.column("lm_loss", "valid"), rel=EQUAL)


def test_a_reduction_that_counts_one_micro_batch_is_caught(pools: Pools, corpus: str) -> None:
    """Negative control: a pipeline brings the first micro-batch's gradients long before the last one's."""
    argv = flags(corpus, MOE, LAYERS, "--train-iters 1 --micro-batch-size 1", OVERLAP)
    with pytest.raises(Exception, match="came after its bucket was sent"):
        _run(pools, Layout(4, pp=2), [*argv, "--pipeline-model-parallel-size", "2"], fault=_one_micro_batch_is_all)


def _one_micro_batch_is_all(rank: int) -> Any:
    begin = OverlappedReduction.begin
    return patch.object(OverlappedReduction, "begin", lambda self, num_micro_batches: begin(self, 1))


def _without_the_sum_over_ends(rank: int) -> Any:
    return patch.object(step, "sum_over_ends", lambda buffers, ctx: None)


def test_without_the_sum_of_tied_gradients_the_norm_is_wrong(pools: Pools, corpus: str) -> None:
    """Negative control, FC-34: the loss of the first step cannot show it."""
    argv = flags(corpus, MOE, LAYERS)
    whole = _run(pools, SINGLE, argv)[0]
    layout = Layout(2, pp=2)
    broken = _run(pools, layout, [*argv, *_sizes(layout).split()], fault=_without_the_sum_over_ends)[0]
    assert broken.column("lm_loss")[0] == pytest.approx(whole.column("lm_loss")[0], rel=EQUAL)
    assert abs(broken.column("grad_norm")[0] / whole.column("grad_norm")[0] - 1) > 1e-3


@pytest.mark.parametrize("more", ["fp32", "bf16", "fp32 --use-distributed-optimizer --overlap-grad-reduce"])
def test_the_copies_of_a_tied_embedding_stay_bitwise_equal(pools: Pools, corpus: str, more: str) -> None:
    """FC-34, with dp beside the pipeline, where each stage reduces (and shares out) on its own."""
    layout = Layout(4, pp=2)
    argv = flags(corpus, MOE, "--num-layers 4 --precision", more, _sizes(layout))
    states = [outcome.state for outcome in _run(pools, layout, argv)]
    name = "embedding.word_embeddings.weight"
    keys = [key for key in states[0] if key.endswith(name)]
    assert len(keys) >= 3 and all(key in states[2] for key in keys)
    assert same_bits({key: states[0][key] for key in keys}, {key: states[2][key] for key in keys}) == []


@pytest.mark.parametrize("more", ["", TWO, ZERO_BUBBLE])
def test_a_resumed_pipeline_is_bitwise_the_uninterrupted_one(
    pools: Pools, corpus: str, tmp_path: Path, more: str
) -> None:
    """FC-11 over stages, dropout on: losses, weights, moments and random states."""
    layout = Layout(4, pp=2, ep=2)
    argv = flags(corpus, MOE, DROPOUT, "--num-layers 4 --train-iters 4", _sizes(layout), more)
    whole = _run(pools, layout, argv)
    saving = [*argv, "--save", str(tmp_path), "--exit-interval", "2"]
    _run(pools, layout, saving)
    for rank, outcome in enumerate(_run(pools, layout, [*argv, "--load", str(tmp_path)])):
        assert outcome.figures() == whole[rank].figures()[2:]
        assert same_bits(outcome.state, whole[rank].state) == []


def test_a_checkpoint_goes_from_one_pipeline_to_another(pools: Pools, corpus: str, tmp_path: Path) -> None:
    """FC-18: pp 2 in 2 virtual stages to pp 4, and to one process."""
    argv = flags(corpus, MOE, LAYERS, "--train-iters 4")
    whole = _run(pools, SINGLE, argv)[0]
    first = Layout(2, pp=2)
    saving = [*argv, *f"{_sizes(first)} {TWO} --save {tmp_path} --exit-interval 2".split()]
    _run(pools, first, saving)
    for layout in (SINGLE, Layout(4, pp=4)):
        outcome = _run(pools, layout, [*argv, *_sizes(layout).split(), "--load", str(tmp_path)])[-1]
        assert outcome.column("lm_loss") == pytest.approx(whole.column("lm_loss")[2:], rel=EQUAL)


def test_a_batch_that_grows_runs_one_schedule_for_each_number_of_micro_batches(pools: Pools, corpus: str) -> None:
    """4, 8 and 12 samples a step, the same on one process and through a pipeline."""
    argv = " ".join(flags(corpus, MOE, LAYERS)).replace("--train-iters 4 ", "").split()
    argv += ["--train-samples", "56", "--global-batch-size", "12", "--rampup-batch-size", "4", "4", "24"]
    whole = _run(pools, SINGLE, argv)[0]
    sizes = whole.column("global_batch_size")
    assert sizes == [4, 4, 4, 8, 8, 12, 12]
    layout = Layout(2, pp=2)
    for outcome in _run(pools, layout, [*argv, *_sizes(layout).split()]):
        assert outcome.column("global_batch_size") == sizes
        assert outcome.column("lm_loss") == pytest.approx(whole.column("lm_loss"), rel=EQUAL)
