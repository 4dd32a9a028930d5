"""Whole runs: what they count, log, evaluate, save and where they stop. Reference: one process, or closed forms."""

import functools
import math
import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron_parm.config.parser import parse_run_config
from megatron_parm.config.run import check_run
from megatron_parm.errors import ConfigError
from megatron_parm.moe.gate import Gate
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.training import saving as saving_module
from megatron_parm.training import trainer as trainer_module
from megatron_parm.training.evaluate import evaluate
from megatron_parm.training.trainer import PREEMPTED
from tests.harness.layouts import Layout
from tests.harness.pools import Pools
from tests.training.runs import MOE, Outcome, flags, run_training, same_bits, write_corpus

SINGLE = Layout(1)
EQUAL = 1e-5  # relative, float32


def _sizes(tp: int = 1, ep: int = 1, esp: int = 1) -> str:
    return f"--tensor-model-parallel-size {tp} --expert-model-parallel-size {ep} --expert-tensor-parallel-size {esp}"


def _run(pools: Pools, layout: Layout, argv: list[str], **more: Any) -> list[Outcome]:
    outcomes: list[Outcome] = pools.run(layout, run_training, argv, **more)
    assert all(outcome.error is None for outcome in outcomes), outcomes[0].error
    return outcomes


def _alone(pools: Pools, argv: list[str]) -> Outcome:
    return _run(pools, SINGLE, argv)[0]


# --- layouts ---


@pytest.mark.parametrize(
    "layout",
    [Layout(2), Layout(2, tp=2), Layout(4, tp=2, ep=2), Layout(4, tp=2, esp=2, ep=2)],
    ids=str,
)
def test_every_rank_tells_the_losses_of_one_process(pools: Pools, corpus: str, layout: Layout) -> None:
    """FC-37: language loss, balance loss, norm and validation are global, with very different data per rank."""
    argv = flags(corpus, MOE, "--micro-batch-size 1 --eval-iters 1 --eval-interval 2")
    alone = _alone(pools, argv)
    for outcome in _run(pools, layout, [*argv, *_sizes(layout.tp, layout.ep, layout.esp).split()]):
        for name in ("lm_loss", "load_balancing_loss", "grad_norm"):
            assert outcome.column(name) == pytest.approx(alone.column(name), rel=EQUAL)
        assert outcome.column("lm_loss", "valid") == pytest.approx(alone.column("lm_loss", "valid"), rel=EQUAL)


def _updates(ctx: ParallelContext, argv: list[str]) -> dict[str, Any]:
    """Whole tensors of the change of each weight that one run makes, on the ranks that hold all of it."""
    before = run_training(ctx, [*argv, "--lr", "0", "--min-lr", "0"])
    after = run_training(ctx, argv)
    assert before.error is after.error is None
    return {name: after.state[name] - before.state[name] for name in before.state if name.startswith("model.")}


@pytest.mark.parametrize("schedule", ["baseline", "s1", "s2"])
def test_expert_updates_do_not_depend_on_ep(pools: Pools, corpus: str, schedule: str) -> None:
    """FC-23: sgd with rate 1, so an update is the gradient; the ratio to one process is 1 for experts and dense."""
    argv = flags(
        corpus, MOE, "--micro-batch-size 1 --train-iters 1 --optimizer sgd --sgd-momentum 0 --lr 1 --min-lr 1",
        f"--clip-grad 0 --weight-decay 0 --moe-schedule {schedule}",
    )  # fmt: skip
    (alone,) = pools.run(SINGLE, _updates, argv)
    for ep in (1, 2, 4):
        for rank, updates in enumerate(pools.run(Layout(4, ep=ep), _updates, [*argv, *_sizes(ep=ep).split()])):
            for name, update in updates.items():
                wanted = alone[name]
                if ".experts." in name and ep > 1:
                    each = wanted.shape[0] // ep
                    wanted = wanted[rank % ep * each :][:each]
                scale = alone[name].abs().max()
                torch.testing.assert_close(update / scale, wanted / scale, rtol=0, atol=EQUAL)


@pytest.mark.cover(
    layout=[Layout(2, tp=2, esp=2), Layout(2, tp=2, ep=2), Layout(4, tp=2, ep=2, esp=2), Layout(4, tp=4, ep=2, esp=2)],
    schedule=["baseline", "s1", "s2"],
)
def test_replicated_weights_stay_bitwise_equal_over_tp(
    pools: Pools, corpus: str, layout: Layout, schedule: str
) -> None:
    """FC-24: router, norms, positions and biases after 10 iterations, though rows of the baseline round apart."""
    more = f"--train-iters 10 --hidden-dropout 0.1 --moe-schedule {schedule} --micro-batch-size 4"
    argv = flags(corpus, MOE, more, _sizes(layout.tp, layout.ep, layout.esp))
    states = [outcome.state for outcome in _run(pools, layout, argv)]
    kinds = ("router", "layernorm", "position", "linear_proj.bias")
    replicated = [name for name in states[0] if any(kind in name for kind in kinds)]
    assert len(replicated) > 40
    for name in replicated:
        assert all(
            torch.equal(state[name], states[rank // layout.tp * layout.tp][name]) for rank, state in enumerate(states)
        ), name


def _all_to_expert_0(_rank: int) -> Any:
    """A gate whose scores prefer expert 0, whatever the token."""
    original = Gate._logits

    def biased(self: Gate, *args: Any) -> torch.Tensor:
        logits = original(self, *args)
        bias = torch.zeros(logits.shape[1], dtype=logits.dtype)
        bias[0] = 1e4
        return logits + bias

    return patch.object(Gate, "_logits", biased)


@pytest.mark.parametrize("capacity", ["", "--moe-expert-capacity-factor 8"], ids=["dropless", "f=E/k"])
def test_experts_without_tokens_train_on(pools: Pools, corpus: str, capacity: str) -> None:
    """FC-25: one expert of eight takes all; nobody waits, idle experts keep their weights, losses equal one process."""
    argv = flags(
        corpus, "--num-experts 8 --moe-router-topk 1 --moe-router-pre-softmax --micro-batch-size 1 --train-iters 3",
        f"--weight-decay 0 --moe-schedule s1 {capacity}",
    )  # fmt: skip
    alone = _run(pools, SINGLE, argv, fault=_all_to_expert_0)[0]
    start = _alone(pools, [*argv, "--train-iters", "1", "--lr", "0", "--min-lr", "0"])
    weight = "model.decoder.layers.0.mlp.experts.weight1"
    moved = (alone.state[weight] - start.state[weight]).abs().amax(dim=(1, 2))
    assert moved[0] > 0 and not moved[1:].any()
    assert alone.of("train")[0]["moe"]["max_load"] == 8.0
    for ep in (2, 4):
        outcomes = _run(pools, Layout(4, ep=ep), [*argv, *_sizes(ep=ep).split()], fault=_all_to_expert_0)
        assert outcomes[0].column("lm_loss") == pytest.approx(alone.column("lm_loss"), rel=EQUAL)
        assert outcomes[0].column("grad_norm") == pytest.approx(alone.column("grad_norm"), rel=1e-4)
        each = 8 // ep
        for rank, outcome in enumerate(outcomes):
            own = outcome.state[weight]
            torch.testing.assert_close(own, alone.state[weight][rank % ep * each :][:each], rtol=1e-4, atol=1e-6)
            peer = outcomes[rank % ep].state[weight]
            assert torch.equal(own, peer)


def test_a_global_batch_of_one_short_sequence_runs_on_all_ranks(pools: Pools, corpus: str) -> None:
    """FC-25, last line: one sequence of two tokens over tp 2 x ep 2, with 8 experts."""
    argv = flags(corpus, "--num-experts 8 --moe-router-topk 2 --seq-length 2 --micro-batch-size 1")
    argv += [*["--global-batch-size", "1", "--moe-schedule", "s1"], *_sizes(tp=2, ep=2).split()]
    alone = _alone(pools, [*argv, *_sizes().split()])
    outcome = _run(pools, Layout(2, tp=2, ep=2), argv)[0]
    assert outcome.column("lm_loss") == pytest.approx(alone.column("lm_loss"), rel=EQUAL)


@pytest.mark.parametrize(("numbers", "divisor"), [(30, 1), (30, 128), (6, 1), (7, 5)])
def test_tp_and_padding_of_the_vocabulary_leave_the_loss(
    pools: Pools, corpus: str, tmp_path: Path, numbers: int, divisor: int
) -> None:
    """FC-33: vocabularies of 31, 7 and 8 ids, padded to 32 to 256 rows; dummy columns take no part."""
    path = write_corpus(tmp_path / "few", numbers=numbers)
    argv = [*flags(path, numbers=numbers), "--make-vocab-size-divisible-by", str(divisor)]
    losses = [_alone(pools, [*argv, "--make-vocab-size-divisible-by", "1"]).column("lm_loss")]
    for layout in (Layout(2, tp=2), Layout(4, tp=4)):
        losses.append(_run(pools, layout, [*argv, *_sizes(tp=layout.tp).split()])[0].column("lm_loss"))
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=EQUAL)
    assert losses[0][0] == pytest.approx(math.log(numbers + 1), rel=0.2)


# --- sizes that do not divide ---


def test_a_batch_that_does_not_divide_is_refused_in_the_users_words(corpus: str) -> None:
    """FC-31: 6, 2 and 2, and the flags."""
    config, _ = parse_run_config(flags(corpus, "--global-batch-size 6 --micro-batch-size 2"))
    with pytest.raises(ConfigError) as caught:
        check_run(config, 2)
    for part in ("--global-batch-size 6", "--micro-batch-size 2", "2 data-parallel ranks"):
        assert part in str(caught.value)


def test_the_uneven_tail_of_an_epoch_is_dropped_by_all_ranks(pools: Pools, corpus: str) -> None:
    """FC-31: 278 samples an epoch, 8 at once over dp 2; the cyclic loader goes into its second epoch."""
    argv = flags(corpus, "--train-iters 36 --dataloader-type cyclic --train-iters 36")
    outcomes = _run(pools, Layout(2), argv)
    assert [len(outcome.of("train")) for outcome in outcomes] == [36, 36]
    assert outcomes[0].figures() == outcomes[1].figures()


# --- positions of the validation set ---


@pytest.mark.parametrize("length", ["--train-iters 10", "--train-samples 40"])
def test_the_validation_set_has_a_part_for_every_evaluation(pools: Pools, corpus: str, length: str) -> None:
    """FC-36: (10 // 4 + 1) x 2 x 4 = 24 samples, 8 for the test set; the same numbers when counted in samples."""
    argv = flags(corpus, "--global-batch-size 4 --eval-interval 4 --eval-iters 2", length)
    if "samples" in length:
        at = argv.index("--train-iters")
        argv = argv[:at] + argv[at + 2 :]
    outcome = _alone(pools, argv)
    assert "; 24 asked for" in outcome.said and "; 8 asked for" in outcome.said
    assert [event["iteration"] for event in outcome.of("valid")] == [4, 8, 10, 10]
    assert outcome.column("split", "valid") == ["valid", "valid", "valid", "test"]
    assert outcome.progress["consumed_valid_samples"] == 24


def _note_samples(seen: list[Any], _rank: int) -> Any:
    def noting(model: Any, batches: Any, num_batches: int, ctx: ParallelContext) -> float:
        read = [next(batches) for _ in range(num_batches)]
        seen.append([batch["tokens"].tolist() for batch in read])
        return evaluate(model, iter(read), num_batches, ctx)

    return patch.object(trainer_module, "evaluate", noting)


def _samples_of_evaluations(ctx: ParallelContext, argv: list[str]) -> list[Any]:
    seen: list[Any] = []
    outcome = run_training(ctx, argv, functools.partial(_note_samples, seen))
    assert outcome.error is None
    return seen


def test_evaluations_read_the_same_samples_with_and_without_resume(pools: Pools, corpus: str, tmp_path: Path) -> None:
    """FC-36, resumed at 5."""
    argv = flags(corpus, "--train-iters 10 --global-batch-size 4 --eval-interval 4 --eval-iters 2")
    (straight,) = pools.run(SINGLE, _samples_of_evaluations, argv)
    argv += ["--save", str(tmp_path), "--load", str(tmp_path)]
    (first,) = pools.run(SINGLE, _samples_of_evaluations, [*argv, "--exit-interval", "5"])
    (second,) = pools.run(SINGLE, _samples_of_evaluations, argv)
    assert len(straight) == 4 and first + second == straight
    assert straight[0] != straight[1] != straight[2]


# --- throughput ---


def test_throughput_follows_from_the_iteration_time(pools: Pools, corpus: str, tmp_path: Path) -> None:
    """FC-39: samples and tokens a second; time of evaluations and saves is in no step; per rank and in all."""

    argv = flags(corpus, "--train-iters 10 --eval-iters 1 --eval-interval 4", _sizes(tp=2))
    argv += ["--save", str(tmp_path), "--save-interval", "5"]
    outcomes = _run(pools, Layout(2, tp=2), argv, fault=_slow_evaluation_and_save)
    for event in outcomes[0].of("train"):
        seconds = event["iteration_time_ms"] / 1000
        assert event["samples_per_second"] == pytest.approx(8 / seconds, rel=1e-9)
        assert event["tokens_per_second"] == pytest.approx(8 * 8 / seconds, rel=1e-9)
        assert event["tflops_per_second"] == pytest.approx(2 * event["tflops_per_second_per_device"], rel=1e-9)
    (end,) = outcomes[0].of("end")
    in_steps = sum(outcomes[0].column("iteration_time_ms")) / 1000
    slow_calls = 4 + 2  # evaluations after 4 and 8 and two at the end; saves after 5 and 10
    assert end["seconds"] - in_steps >= slow_calls * SLOW_SECONDS, "time of an evaluation or a save is in a step"


SLOW_SECONDS = 0.1


def _slow_evaluation_and_save(_rank: int) -> Any:
    def slow(original: Any, *args: Any) -> Any:
        time.sleep(SLOW_SECONDS)
        return original(*args)

    patches = ExitStack()
    for module, name in ((trainer_module, "evaluate"), (saving_module, "begin_saving")):
        patches.enter_context(patch.object(module, name, functools.partial(slow, getattr(module, name))))
    return patches


def test_flops_change_with_the_feed_forward_width(pools: Pools, corpus: str) -> None:
    """FC-39: 2 layers x 2 matrices x 16 x (64 - 48) x 2 x 3 passes x 64 tokens less with --ffn-hidden-size 48."""

    def tflops(more: str) -> float:
        event = _alone(pools, flags(corpus, "--train-iters 1", more)).of("train")[0]
        return float(event["tflops_per_second"] * event["iteration_time_ms"] / 1000)

    less = 2 * 2 * 16 * (64 - 48) * 2 * 3 * 64
    assert (tflops("") - tflops("--ffn-hidden-size 48")) * 1e12 == pytest.approx(less, rel=1e-6)


# --- where a run stops, and what it leaves ---


def test_exit_interval_saves_marks_and_stops(pools: Pools, corpus: str, tmp_path: Path) -> None:
    argv = flags(corpus, "--save", str(tmp_path), "--load", str(tmp_path), "--exit-interval 2 --eval-iters 1")
    outcome = _alone(pools, argv)
    assert outcome.column("reason", "end") == ["exiting at iteration 2 (--exit-interval 2)"]
    assert outcome.of("valid") == [] and outcome.column("iteration", "save") == [2]
    assert (tmp_path / PREEMPTED).read_text() == "2\n"
    outcome = _alone(pools, argv)  # goes on to its end, which is a multiple too
    assert outcome.column("reason", "end") == ["done"] and len(outcome.of("valid")) == 2
    assert not (tmp_path / PREEMPTED).exists()
    assert outcome.column("iteration", "save") == [4]


def test_exit_duration_stops_all_ranks_at_one_iteration(pools: Pools, corpus: str, tmp_path: Path) -> None:
    argv = flags(corpus, "--train-iters 100000 --exit-duration-in-mins 0.01", "--save", str(tmp_path))
    outcomes = _run(pools, Layout(2), argv)
    reached = {outcome.progress["iteration"] for outcome in outcomes}
    assert len(reached) == 1 and 1 <= reached.pop() < 100000
    assert outcomes[0].column("reason", "end") == ["exiting after 0.01 minutes (--exit-duration-in-mins)"]
    assert (tmp_path / PREEMPTED).exists()


def _signal_in_evaluation(where: int, rank: int) -> Any:
    def interrupted(*args: Any) -> Any:
        if rank == where:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*args)

    return patch.object(trainer_module, "evaluate", interrupted)


@pytest.mark.parametrize("where", [0, 1])
def test_a_signal_during_an_evaluation_is_not_missed(pools: Pools, corpus: str, tmp_path: Path, where: int) -> None:
    """FC-35: all ranks save the iteration that was evaluated; the resume goes on exactly."""
    argv = flags(corpus, MOE, _sizes(ep=2), "--exit-signal-handler --eval-iters 1 --eval-interval 2 --train-iters 5")
    straight = _run(pools, Layout(2, ep=2), argv)
    argv += ["--save", str(tmp_path), "--load", str(tmp_path)]
    stopped = _run(pools, Layout(2, ep=2), argv, fault=functools.partial(_signal_in_evaluation, where))
    assert [outcome.progress["iteration"] for outcome in stopped] == [2, 2]
    assert stopped[0].column("reason", "end") == ["exiting after a termination signal"]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == "2"
    assert (tmp_path / PREEMPTED).read_text() == "2\n"
    for whole, ended in zip(straight, _run(pools, Layout(2, ep=2), argv), strict=True):
        assert ended.figures() == whole.figures()[2:] and same_bits(ended.state, whole.state) == []


def test_a_signal_during_the_last_evaluation_does_not_break_a_finished_run(
    pools: Pools, corpus: str, tmp_path: Path
) -> None:
    argv = flags(corpus, "--exit-signal-handler --eval-iters 1 --eval-interval 100", "--save", str(tmp_path))
    outcomes = _run(pools, Layout(2), argv, fault=functools.partial(_signal_in_evaluation, 1))
    assert [outcome.column("reason", "end") for outcome in outcomes] == [["done"], ["done"]]
    assert not (tmp_path / PREEMPTED).exists()


def test_stopping_without_a_folder_to_save_in_is_said(pools: Pools, corpus: str) -> None:
    outcome = _alone(pools, flags(corpus, "--exit-interval 2"))
    assert "warning: stopping before the end without a checkpoint: --save was not given" in outcome.said


def test_checkpoints_come_at_their_interval_and_once_at_the_end(pools: Pools, corpus: str, tmp_path: Path) -> None:
    for iterations, saved in ((4, [2, 4]), (5, [2, 4, 5])):
        root = tmp_path / str(iterations)
        argv = flags(corpus, f"--train-iters {iterations} --save-interval 2", "--save", str(root))
        outcome = _alone(pools, argv)
        assert outcome.column("iteration", "save") == saved
        assert all(Path(event["path"]).is_dir() for event in outcome.of("save")[-2:])


@pytest.mark.parametrize("layout", [SINGLE, Layout(2)], ids=str)
def test_a_folder_that_cannot_be_made_is_found_before_training(
    pools: Pools, corpus: str, tmp_path: Path, layout: Layout
) -> None:
    (tmp_path / "file").write_text("")
    for outcome in pools.run(layout, run_training, flags(corpus, "--save", str(tmp_path / "file"))):
        assert outcome.error is not None and outcome.error[:2] == ("ConfigError", 2)
        assert f"--save {tmp_path / 'file'}: File exists" in outcome.error[2]
        assert outcome.of("train") == []


def test_skip_train_evaluates_only(pools: Pools, corpus: str, tmp_path: Path) -> None:
    argv = flags(corpus, "--save", str(tmp_path), "--load", str(tmp_path), "--eval-iters 2 --eval-interval 100")
    trained = _alone(pools, argv)
    outcome = _alone(pools, [*argv, "--skip-train"])
    assert outcome.of("train") == [] == outcome.of("save")
    assert outcome.column("reason", "end")[0].startswith("--skip-train")
    assert outcome.column("lm_loss", "valid")[1] == trained.column("lm_loss", "valid")[1]  # the test split


# --- what is logged ---


def test_the_start_tells_layout_parameters_and_schedule(pools: Pools, corpus: str) -> None:
    """Parameters counted by hand: embedding 32 x 16 (31 ids over tp 2), positions 8 x 16, two layers, a last norm."""
    argv = flags(corpus, MOE, _sizes(tp=2, ep=2), "--moe-schedule s1")
    outcomes = _run(pools, Layout(4, tp=2, ep=2), argv)
    (start,) = outcomes[0].of("start")
    assert start["layout"] == {"world": 4, "tp": 2, "pp": 1, "ep": 2, "esp": 1, "dp": 2, "edp": 2}
    attention, norms = 4 * 16 * 16 + 4 * 16, 2 * 2 * 16
    experts = 4 * (2 * 16 * 64 + 64 + 16)
    total = 32 * 16 + 8 * 16 + 2 * (attention + norms + 4 * 16 + experts) + 2 * 16
    assert start["parameters"]["total"] == total
    attention_here = 2 * 16 * 16 + 24 + 16  # column bias cut, row bias whole
    here = 16 * 16 + 8 * 16 + 2 * (attention_here + norms + 4 * 16 + experts // 2) + 2 * 16
    assert start["parameters"]["per_rank"] == here
    assert start["moe_schedule"]["name"] == "s1" and "was given" in start["moe_schedule"]["reason"]
    assert start["config"]["num_experts"] == 4


def test_optional_figures_are_global(pools: Pools, corpus: str) -> None:
    argv = flags(corpus, MOE, "--log-params-norm --log-num-zeros-in-grad --micro-batch-size 1")
    alone = _alone(pools, argv)
    spread = _run(pools, Layout(2, ep=2), [*argv, *_sizes(ep=2).split()])[0]
    assert spread.column("params_norm") == pytest.approx(alone.column("params_norm"), rel=EQUAL)
    few = 10  # a tiny gradient may round to zero on one layout and not on another
    assert spread.column("num_zeros") == pytest.approx(alone.column("num_zeros"), abs=few)
    assert alone.of("train")[0]["params_norm"] > 1 and max(alone.column("num_zeros")) > few


# --- timers ---

PARTS = ["forward-backward", "all-grads-sync", "optimizer"]
PARTS_OF_PARTS = ["batch-generator", "optimizer-clip-main-grad", "optimizer-inner-step"]


@pytest.mark.parametrize(("level", "names"), [(0, []), (1, PARTS), (2, PARTS + PARTS_OF_PARTS)])
def test_timers_tell_the_parts_of_a_step_at_every_interval_and_change_nothing(
    pools: Pools, corpus: str, level: int, names: list[str]
) -> None:
    argv = flags(corpus, MOE, "--train-iters 5 --log-interval 2")
    outcome, _ = _run(pools, Layout(2), [*argv, "--timing-log-level", str(level)])
    assert outcome.figures() == _run(pools, Layout(2), argv)[0].figures()
    told = [event.get("spans_ms", {}) for event in outcome.of("train")]
    assert [sorted(spans) for spans in told] == [[], sorted(names), [], sorted(names), []]
    for before, event, spans in zip(outcome.of("train"), outcome.of("train")[1:], told[1:], strict=False):
        if spans:  # an iteration each, of the slowest rank: the parts of two steps fit into their time
            parts = sum(spans[name] for name in names if name in PARTS)
            assert 0 < parts <= 1.1 * (before["iteration_time_ms"] + event["iteration_time_ms"]) / 2
