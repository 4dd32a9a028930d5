"""Resuming: the same run goes on, bit for bit; anything else is said. Reference: the run that was never stopped."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.layouts import Layout
from tests.harness.pools import Pools
from tests.training.runs import DROPOUT, MOE, Outcome, flags, run_training, same_bits

SINGLE = Layout(1)
SPREAD = Layout(4, tp=2, ep=2)
SIZES = "--tensor-model-parallel-size 2 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
RESUME_TOLERANCE = 1e-5  # relative, float32: another layout adds the same numbers in another order
BAD_CHECKPOINT = 21


def _run(pools: Pools, layout: Layout, argv: list[str]) -> list[Outcome]:
    outcomes: list[Outcome] = pools.run(layout, run_training, argv)
    return outcomes


def _alone(pools: Pools, argv: list[str]) -> Outcome:
    return _run(pools, SINGLE, argv)[0]


def _folder(argv: list[str], root: Path) -> list[str]:
    return [*argv, "--save", str(root), "--load", str(root)]


@pytest.fixture(scope="module")
def half_done(pools: Pools, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint at iteration 4 of a run of 8, one process, with experts and dropout. Copy it before writing."""
    root = tmp_path_factory.mktemp("half_done") / "run"
    outcome = _alone(pools, [*_folder(flags(corpus, MOE, DROPOUT, LENGTH), root), "--exit-interval", "4"])
    assert outcome.error is None and outcome.progress["iteration"] == 4
    return root


LENGTH = "--train-iters 8"


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        (SINGLE, ""),
        (SPREAD, SIZES),
        (SPREAD, f"{SIZES} --moe-schedule s1 --precision bf16 --lr-decay-style cosine --lr-warmup-iters 3"),
        (Layout(2, tp=2, esp=2), "--tensor-model-parallel-size 2 --moe-schedule baseline"),
        (Layout(2, ep=2), "--expert-model-parallel-size 2 --optimizer sgd --dataloader-type cyclic"),
    ],
    ids=["alone", "tp2-ep2", "s1-bf16-cosine", "baseline-esp2", "sgd-cyclic"],
)
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(
    pools: Pools, corpus: str, tmp_path: Path, layout: Layout, more: str
) -> None:
    """FC-11: losses, norms, rates, weights, moments and random states, on every rank."""
    argv = flags(corpus, MOE, DROPOUT, more, "--train-iters 20 --eval-iters 1 --eval-interval 4")
    straight = _run(pools, layout, argv)
    first = _run(pools, layout, [*_folder(argv, tmp_path), "--exit-interval", "10"])
    second = _run(pools, layout, _folder(argv, tmp_path))
    assert [outcome.progress["iteration"] for outcome in first] == [10] * layout.world
    for whole, begun, ended in zip(straight, first, second, strict=True):
        assert whole.error is begun.error is ended.error is None
        assert begun.figures() + ended.figures() == whole.figures()
        assert len(whole.figures()) == 20
        assert same_bits(ended.state, whole.state) == []
        assert ended.progress == whole.progress
        # FC-36: the validation stream goes on too, so evaluations after the resume are the same
        assert begun.column("lm_loss", "valid") + ended.column("lm_loss", "valid") == whole.column("lm_loss", "valid")
        assert same_bits(begun.state, whole.state) != []


def test_dropout_replayed_from_the_seed_would_be_seen(pools: Pools, corpus: str, half_done: Path) -> None:
    """Negative control of the test above: without the saved random states the losses differ."""
    straight = _alone(pools, flags(corpus, MOE, DROPOUT, LENGTH))
    argv = [*flags(corpus, MOE, DROPOUT, LENGTH), "--load", str(half_done)]
    assert _alone(pools, argv).figures() == straight.figures()[4:]
    replayed = _alone(pools, [*argv, "--no-load-rng"])
    assert replayed.error is None
    assert replayed.figures() != straight.figures()[4:]
    assert [row[1] for row in replayed.figures()] == [row[1] for row in straight.figures()[4:]]


@pytest.mark.parametrize(
    ("layout", "more"),
    [(Layout(2), ""), (Layout(2, tp=2), "--tensor-model-parallel-size 2"), (SPREAD, SIZES)],
    ids=["dp2", "tp2", "tp2-ep2"],
)
def test_another_layout_goes_on_from_the_same_point(
    pools: Pools, corpus: str, tmp_path: Path, layout: Layout, more: str
) -> None:
    """FC-18: weights and moments travel between layouts, both ways."""
    argv = flags(corpus, MOE, LENGTH, "--micro-batch-size 1")  # 31 rows of vocabulary, 32 where tp is 2
    straight = _alone(pools, argv)
    for first, second in (((SINGLE, ""), (layout, more)), ((layout, more), (SINGLE, ""))):
        root = tmp_path / str(first[0])
        _run(pools, first[0], _folder([*argv, *first[1].split(), "--exit-interval", "4"], root))
        gone_on = _run(pools, second[0], _folder([*argv, *second[1].split()], root))[0]
        assert gone_on.error is None
        assert gone_on.column("lm_loss") == pytest.approx(straight.column("lm_loss")[4:], rel=RESUME_TOLERANCE)
        assert gone_on.column("grad_norm") == pytest.approx(straight.column("grad_norm")[4:], rel=1e-4)
        assert "random states fit no rank" in gone_on.said


def test_a_changed_schedule_is_refused_with_both_values_and_both_flags(
    pools: Pools, corpus: str, half_done: Path
) -> None:
    """FC-12 (1)."""
    for argv in (flags(corpus, MOE, DROPOUT, "--train-iters 12"), flags(corpus, MOE, DROPOUT, LENGTH, "--lr 0.02")):
        outcome = _alone(pools, [*argv, "--load", str(half_done)])
        assert outcome.error is not None and outcome.events == []
        assert outcome.error[:2] == ("ConfigError", 2)
        for part in ("--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler"):
            assert part in outcome.error[2]
    assert "0.02 by the flags but 0.01 in the checkpoint" in outcome.error[2]


def test_an_overridden_schedule_holds_from_the_first_iteration(pools: Pools, corpus: str, half_done: Path) -> None:
    """FC-12 (2): no rate above the new peak, and the rates are those of a run that always had it."""
    argv = flags(corpus, MOE, DROPOUT, LENGTH, "--lr 3e-5 --min-lr 1e-5")
    outcome = _alone(pools, [*argv, "--load", str(half_done), "--override-opt_param-scheduler"])
    assert outcome.column("learning_rate") == _alone(pools, argv).column("learning_rate")[4:]
    assert max(outcome.column("learning_rate")) < 3e-5


def test_a_changed_length_with_override_trains_to_the_new_end(pools: Pools, corpus: str, half_done: Path) -> None:
    """FC-12 (2) with --train-iters."""
    argv = flags(corpus, MOE, DROPOUT, "--train-iters 10")
    outcome = _alone(pools, [*argv, "--load", str(half_done), "--override-opt_param-scheduler"])
    assert outcome.column("iteration") == [5, 6, 7, 8, 9, 10]
    assert outcome.column("learning_rate")[-1] == pytest.approx(1e-3)


def test_rates_of_the_checkpoint_are_used_when_asked_for(pools: Pools, corpus: str, half_done: Path) -> None:
    """FC-12 (3) and (4): a plain resume and --use-checkpoint give the digits of the straight run."""
    rates = _alone(pools, flags(corpus, MOE, DROPOUT, LENGTH)).column("learning_rate")
    plain = _alone(pools, [*flags(corpus, MOE, DROPOUT, LENGTH), "--load", str(half_done)])
    assert plain.column("learning_rate") == rates[4:]
    other = flags(corpus, MOE, DROPOUT, LENGTH, "--lr 0.5 --min-lr 0.4 --use-checkpoint-opt_param-scheduler")
    assert _alone(pools, [*other, "--load", str(half_done)]).column("learning_rate") == rates[4:]


@pytest.mark.parametrize("length", [8, 6])
def test_a_finished_run_has_nothing_left_to_do(pools: Pools, corpus: str, tmp_path: Path, length: int) -> None:
    """FC-13: exit 0, no file of a checkpoint changes, the evaluation at the end is still made."""
    more = "--eval-iters 2 --eval-interval 1"
    argv = _folder(flags(corpus, MOE, "--train-iters 8", more), tmp_path)
    first = _alone(pools, argv)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    again = _alone(pools, [*argv, "--train-iters", str(length)])
    assert again.error is None
    assert again.of("train") == [] and again.of("save") == []
    assert again.column("reason", "end") == [f"nothing left to do: iteration 8 of {length} was reached before"]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert len(again.of("valid")) == 2
    if length == 8:
        assert again.column("lm_loss", "valid") == first.column("lm_loss", "valid")[-2:]


def test_evaluating_more_rarely_after_a_resume_starts_the_split_again(
    pools: Pools, corpus: str, tmp_path: Path
) -> None:
    """The counter may stand beyond the samples that the new flags ask for; the stream must not run dry."""
    argv = _folder(flags(corpus, MOE, LENGTH), tmp_path)
    often = "--eval-iters 2 --eval-interval 1 --exit-interval 4"
    assert _alone(pools, [*argv, *often.split()]).error is None
    outcome = _alone(pools, [*argv, *["--eval-iters", "2", "--eval-interval", "8"]])
    assert outcome.error is None and len(outcome.column("lm_loss", "valid")) == 3


def test_another_global_batch_on_resume_has_data_to_the_end(pools: Pools, corpus: str, half_done: Path) -> None:
    """With a smaller one, --train-iters of it are fewer samples than the run consumes: 278 against 32 + 136 * 2."""
    argv = flags(corpus, MOE, DROPOUT, LENGTH, "--override-opt_param-scheduler")
    grown = _alone(pools, [*argv, "--load", str(half_done), "--global-batch-size", "16"])
    assert grown.error is None and grown.column("consumed_samples") == [48, 64, 80, 96]
    argv = flags(corpus, MOE, DROPOUT, "--train-iters 140 --override-opt_param-scheduler --global-batch-size 2")
    shrunk = _alone(pools, [*argv, "--load", str(half_done)])
    assert shrunk.error is None and shrunk.column("iteration")[-1] == 140


# --- what --load means where there is no whole checkpoint ---


@pytest.mark.parametrize("content", ["", "abc", "7"])
@pytest.mark.parametrize("layout", [SINGLE, Layout(2)], ids=str)
def test_a_bad_tracker_file_stops_all_ranks_or_is_worked_around(
    pools: Pools, corpus: str, half_done: Path, tmp_path: Path, content: str, layout: Layout
) -> None:
    """FC-14: strict stops with path and content; auto takes the newest whole one; never afresh."""
    root = Path(shutil.copytree(half_done, tmp_path / "run"))
    tracker = root / "latest_checkpointed_iteration.txt"
    tracker.write_text(content)
    argv = [*flags(corpus, MOE, DROPOUT, LENGTH), "--load", str(root)]
    for outcome in _run(pools, layout, argv):
        assert outcome.error is not None and outcome.error[1] == BAD_CHECKPOINT
        assert str(tracker) in outcome.error[2] and repr(content) in outcome.error[2]
    outcomes = _run(pools, layout, [*argv, "--resume", "auto"])
    assert [outcome.column("iteration") for outcome in outcomes] == [[5, 6, 7, 8]] * layout.world
    assert "warning" in outcomes[0].said and str(tracker) in outcomes[0].said


def test_a_checkpoint_at_iteration_0_is_one(pools: Pools, corpus: str, half_done: Path, tmp_path: Path) -> None:
    """FC-14: "0" in the tracker file names iter_0000000 if that folder exists; else it is refused."""
    root = Path(shutil.copytree(half_done, tmp_path / "run"))
    (root / "latest_checkpointed_iteration.txt").write_text("0")
    argv = [*flags(corpus, MOE, DROPOUT, LENGTH), "--load", str(root)]
    outcome = _alone(pools, argv)
    assert outcome.error is not None and outcome.error[1] == BAD_CHECKPOINT and "iter_0000000" in outcome.error[2]


def test_a_load_folder_without_checkpoint_is_an_error(pools: Pools, corpus: str, tmp_path: Path) -> None:
    """FC-15: a typing error in the path never trains from random weights."""
    argv = flags(corpus)
    (tmp_path / "empty").mkdir()
    for more in (
        f"--load {tmp_path}/typo --save {tmp_path}/out",
        f"--load {tmp_path}/typo",
        f"--load {tmp_path}/empty --save {tmp_path}/out",
        f"--load {tmp_path}/new --save {tmp_path}/new --exit-on-missing-checkpoint",
    ):
        outcome = _alone(pools, [*argv, *more.split()])
        assert outcome.error is not None and outcome.error[:2] == ("ConfigError", 2)
        assert more.split()[1] in outcome.error[2] and outcome.events == []
    assert not (tmp_path / "out").exists()


def test_the_restart_line_starts_afresh_in_a_new_or_empty_folder(pools: Pools, corpus: str, tmp_path: Path) -> None:
    """FC-15: --load equal to --save is how a job is restarted by a scheduler, from its very first start on."""
    (tmp_path / "empty").mkdir()
    for name in ("new", "empty"):
        root = tmp_path / name
        outcome = _alone(pools, _folder(flags(corpus), root))
        assert outcome.error is None and outcome.column("iteration") == [1, 2, 3, 4]
        assert "starting afresh" in outcome.said
        assert (root / "latest_checkpointed_iteration.txt").read_text().strip() == "4"


# --- another model, another run ---


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ("--num-experts 2", ("--num-experts", "2 here", "4 in the checkpoint")),
        ("--num-experts 0", ("--num-experts", "None here", "4 in the checkpoint")),
        ("--num-layers 4", ("--num-layers", "4 here", "2 in the checkpoint")),
        ("--hidden-size 32", ("--hidden-size", "32 here", "16 in the checkpoint")),
        ("--moe-layer-freq 2", ("--moe-layer-freq", "2 here", "1 in the checkpoint")),
        ("--seed 99", ("--seed", "99 here", "1234 in the checkpoint", "--finetune")),
        ("--seq-length 4", ("--seq-length", "4 here", "8 in the checkpoint")),
        ("--vocab-size 40", ("--vocab-size", "41 tokens here", "31 tokens there")),
        ("--vocab-extra-ids 3", ("--vocab-extra-ids", "34 tokens here", "31 tokens there")),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_with_both_values(
    pools: Pools, corpus: str, half_done: Path, change: str, shown: tuple[str, ...]
) -> None:
    """FC-20, and settings that would change the order of the data."""
    outcome = _alone(pools, [*flags(corpus, MOE, DROPOUT, LENGTH), "--load", str(half_done), *change.split()])
    assert outcome.error is not None and outcome.error[1] == BAD_CHECKPOINT, outcome.error
    for part in shown:
        assert part in outcome.error[2]
    assert len(outcome.error[2].splitlines()) < 20


def test_a_dense_checkpoint_does_not_fill_an_moe_model(pools: Pools, corpus: str, tmp_path: Path) -> None:
    """FC-20."""
    assert _alone(pools, [*flags(corpus), "--save", str(tmp_path)]).error is None
    outcome = _alone(pools, [*flags(corpus, MOE), "--load", str(tmp_path)])
    assert outcome.error is not None and outcome.error[1] == BAD_CHECKPOINT
    assert "--num-experts: 4 here, None in the checkpoint" in outcome.error[2]


def test_settings_that_do_not_touch_the_state_may_change(pools: Pools, corpus: str, half_done: Path) -> None:
    """The other side of FC-20: nothing more is refused than must be."""
    more = "--micro-batch-size 4 --log-interval 3 --clip-grad 0.5 --hidden-dropout 0 --eval-iters 1"
    outcome = _alone(pools, [*flags(corpus, MOE, DROPOUT, LENGTH), "--load", str(half_done), *more.split()])
    assert outcome.error is None and outcome.column("iteration") == [5, 6, 7, 8]


# --- partial saves and loads ---


def test_finetune_takes_the_weights_and_starts_at_0(pools: Pools, corpus: str, half_done: Path) -> None:
    """The first loss is that of the loaded weights, the counters and rates are those of a new run."""
    more = "--train-iters 2 --lr 5e-4 --min-lr 1e-4 --seed 5 --finetune"
    outcome = _alone(pools, [*flags(corpus, MOE, more), "--load", str(half_done)])
    fresh = _alone(pools, flags(corpus, MOE, more.removesuffix("--finetune")))
    assert outcome.error is None
    assert outcome.column("iteration") == [1, 2] and outcome.column("consumed_samples") == [8, 16]
    assert outcome.column("learning_rate") == fresh.column("learning_rate")
    assert outcome.column("lm_loss")[0] != fresh.column("lm_loss")[0]
    moment = "optimizer.exp_avg.decoder.final_layernorm.weight"
    assert not (outcome.state[moment] == 0).all()


def test_finetune_in_bf16_rounds_its_masters_from_the_loaded_weights(pools: Pools, corpus: str, tmp_path: Path) -> None:
    """A rate of 0 leaves the weights as they were saved; stale masters would bring back the initial ones."""
    argv = flags(corpus, MOE, "--bf16")
    saved = _alone(pools, [*argv, "--save", str(tmp_path)])
    for more in ("--finetune --train-iters 1", "--no-load-optim --train-iters 5"):
        still = [*argv, "--load", str(tmp_path), *more.split(), *["--lr", "0", "--min-lr", "0", "--weight-decay", "0"]]
        outcome = _alone(pools, still)
        assert outcome.error is None and len(outcome.of("train")) == 1
        weights = [name for name in saved.state if name.startswith("model.")]
        assert [name for name in weights if not torch.equal(outcome.state[name], saved.state[name])] == []


def test_no_load_optim_keeps_the_counters_and_starts_the_moments_anew(
    pools: Pools, corpus: str, half_done: Path
) -> None:
    """The first loss equals a plain resume's (same weights, samples, dropout); the second no longer does."""
    argv = [*flags(corpus, MOE, DROPOUT, LENGTH), "--load", str(half_done)]
    plain, without = _alone(pools, argv), _alone(pools, [*argv, "--no-load-optim"])
    assert without.error is None
    assert without.figures()[0][:4] == plain.figures()[0][:4]
    assert without.figures()[1] != plain.figures()[1]


def test_a_checkpoint_without_optimizer_or_random_states_says_how_to_go_on(
    pools: Pools, corpus: str, tmp_path: Path
) -> None:
    argv = _folder(flags(corpus, MOE, DROPOUT, LENGTH), tmp_path)
    saved = _alone(pools, [*argv, *["--no-save-optim", "--no-save-rng", "--exit-interval", "4"]])
    assert saved.error is None
    outcome = _alone(pools, argv)
    assert outcome.error is not None and outcome.error[1] == BAD_CHECKPOINT
    assert "--no-save-optim" in outcome.error[2] and "--no-load-optim" in outcome.error[2]
    outcome = _alone(pools, [*argv, "--no-load-optim"])
    assert outcome.error is not None and outcome.error[1] == BAD_CHECKPOINT
    assert "--no-save-rng" in outcome.error[2] and "--no-load-rng" in outcome.error[2]
    outcome = _alone(pools, [*argv, "--no-load-optim", "--no-load-rng"])
    assert outcome.error is None and outcome.column("iteration") == [5, 6, 7, 8]


def test_other_optimizer_is_refused(pools: Pools, corpus: str, half_done: Path) -> None:
    outcome = _alone(pools, [*flags(corpus, MOE, DROPOUT, LENGTH), "--load", str(half_done), "--optimizer", "sgd"])
    assert outcome.error is not None and outcome.error[1] == BAD_CHECKPOINT
    assert "--optimizer adam" in outcome.error[2] and "--optimizer sgd" in outcome.error[2]
    assert "--no-load-optim" in outcome.error[2]


def test_the_schedule_that_auto_chose_is_kept_on_the_same_layout_and_shape(
    pools: Pools, corpus: str, half_done: Path
) -> None:
    def chosen(more: str) -> dict[str, Any]:
        outcome = _alone(pools, [*flags(corpus, MOE, DROPOUT, LENGTH, more), "--load", str(half_done)])
        found: dict[str, Any] = outcome.of("start")[0]["moe_schedule"]
        return found

    assert chosen("")["reason"].startswith("as in the checkpoint")
    assert not chosen("--micro-batch-size 1")["reason"].startswith("as in the checkpoint")
    assert "was given" in chosen("--moe-schedule s1")["reason"]
