"""Megatron's schedules. References: its known answers (warm-up 100, decay 1000, 1.5e-4 to 1e-5), formulas by hand."""

import json
import math
from dataclasses import fields, replace
from itertools import pairwise

import pytest

from megatron_parm.errors import CheckpointError, ConfigError
from megatron_parm.optim.schedule import (
    FLAGS,
    OVERRIDE_FLAG,
    USE_CHECKPOINT_FLAG,
    WSD_SHAPES,
    RateSchedule,
    plan_schedule,
    reconcile,
)

KNOWN = RateSchedule(max_lr=1.5e-4, min_lr=1e-5, warmup_samples=100, decay_samples=1000)
EXACT = 1e-14  # relative; a few roundings


def _styled(style: str, **changes: float | str) -> RateSchedule:
    return replace(KNOWN, decay_style=style, **changes)  # type: ignore[arg-type]  # fields of several types


@pytest.mark.parametrize(
    ("samples", "linear", "cosine"),
    [
        (1, 1.5e-6, 1.5e-6),
        (100, 1.5e-4, 1.5e-4),
        (101, 1.49844444e-4, 1.49999574e-4),
        (550, 8e-5, 8e-5),
        (1000, 1e-5, 1e-5),
        (1001, 1e-5, 1e-5),
    ],
)
def test_known_answers(samples: int, linear: float, cosine: float) -> None:
    assert _styled("linear").learning_rate(samples) == pytest.approx(linear, rel=1e-8)  # digits given
    assert _styled("cosine").learning_rate(samples) == pytest.approx(cosine, rel=1e-8)


def test_constant_and_inverse_square_root() -> None:
    constant = _styled("constant")
    assert [constant.learning_rate(samples) for samples in (50, 100, 1000, 10**9)] == [7.5e-5, 1.5e-4, 1.5e-4, 1.5e-4]
    root = _styled("inverse-square-root")
    assert root.learning_rate(400) == pytest.approx(1.5e-4 / 2, rel=EXACT)
    assert root.learning_rate(1000) == pytest.approx(1.5e-4 / math.sqrt(10), rel=EXACT)
    assert root.learning_rate(1001) == 1e-5
    assert _styled("inverse-square-root", min_lr=1e-4).learning_rate(900) == 1e-4
    assert _styled("inverse-square-root", warmup_samples=0).learning_rate(0) == 1.5e-4
    assert _styled("inverse-square-root", warmup_samples=0).learning_rate(4) == pytest.approx(0.75e-4, rel=EXACT)


@pytest.mark.parametrize(
    ("style", "share_half_way"),
    [("linear", 0.5), ("cosine", 0.5), ("exponential", 2 / math.sqrt(2) - 1), ("minus_sqrt", 1 - math.sqrt(0.5))],
)
def test_wsd(style: str, share_half_way: float) -> None:
    schedule = _styled("WSD", wsd_decay_samples=200, wsd_decay_style=style)
    assert [schedule.learning_rate(samples) for samples in (50, 100, 500, 800)] == [7.5e-5, 1.5e-4, 1.5e-4, 1.5e-4]
    assert schedule.learning_rate(900) == pytest.approx(1e-5 + 1.4e-4 * share_half_way, rel=EXACT)
    assert schedule.learning_rate(1000) == pytest.approx(1e-5, rel=EXACT)
    assert schedule.learning_rate(1001) == 1e-5


def test_warm_up_from_a_rate_above_zero() -> None:
    schedule = replace(KNOWN, init_lr=5e-5)
    assert schedule.learning_rate(0) == 5e-5
    assert schedule.learning_rate(50) == pytest.approx(1e-4, rel=EXACT)
    assert replace(schedule, warmup_samples=0).learning_rate(0) == 1.5e-4, "no warm-up: the peak from the start"


@pytest.mark.parametrize(("style", "quarter"), [("linear", 0.25), ("cosine", 0.5 * (1 - math.cos(math.pi / 4)))])
def test_weight_decay_rises(style: str, quarter: float) -> None:
    schedule = replace(
        KNOWN, start_weight_decay=0.1, end_weight_decay=0.5, weight_decay_samples=400, weight_decay_style=style
    )
    assert schedule.weight_decay(0) == pytest.approx(0.1, rel=EXACT)
    assert schedule.weight_decay(100) == pytest.approx(0.1 + 0.4 * quarter, rel=EXACT)
    assert [schedule.weight_decay(samples) for samples in (400, 401, 10**9)] == [0.5] * 3


def test_constant_weight_decay() -> None:
    schedule = plan_schedule(lr=1.0, global_batch_size=2, train_iters=10, weight_decay=0.03)
    assert {schedule.weight_decay(samples) for samples in (0, 10, 20, 21)} == {0.03}


def test_rates_stay_between_their_ends() -> None:
    for style in ("constant", "linear", "cosine", "inverse-square-root", "WSD"):
        for wsd_style in WSD_SHAPES:
            schedule = _styled(style, wsd_decay_samples=300, wsd_decay_style=wsd_style)
            rates = [schedule.learning_rate(samples) for samples in range(1100)]
            assert all(a >= b - 1e-18 for a, b in pairwise(rates[100:])), style
            assert min(rates[100:]) >= 1e-5 - 1e-18
            assert max(rates) == 1.5e-4


def test_lengths_from_iterations() -> None:
    """Reference: Megatron's get_optimizer_param_scheduler, lengths in iterations x global batch size."""
    schedule = plan_schedule(
        lr=1e-3,
        global_batch_size=8,
        train_iters=100,
        lr_warmup_iters=5,
        lr_decay_style="WSD",
        lr_wsd_decay_iters=20,
    )
    assert (schedule.warmup_samples, schedule.decay_samples, schedule.wsd_decay_samples) == (40, 800, 160)
    assert schedule.weight_decay_samples == 800
    assert plan_schedule(lr=1e-3, global_batch_size=8, train_iters=100, lr_decay_iters=50).decay_samples == 400
    fraction = plan_schedule(lr=1e-3, global_batch_size=8, train_iters=100, lr_decay_iters=50, lr_warmup_fraction=0.01)
    assert fraction.warmup_samples == 4.0


def test_lengths_from_samples() -> None:
    schedule = plan_schedule(lr=1e-3, global_batch_size=8, train_samples=1000, lr_warmup_samples=30)
    assert (schedule.warmup_samples, schedule.decay_samples, schedule.weight_decay_samples) == (30, 1000, 1000)
    schedule = plan_schedule(lr=1e-3, global_batch_size=8, train_samples=1000, lr_decay_samples=900)
    assert (schedule.decay_samples, schedule.weight_decay_samples) == (900, 1000)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"min_lr": 2e-3}, ["--min-lr 0.002", "--lr 0.001"]),
        ({"lr_warmup_init": 2e-3}, ["--lr-warmup-init 0.002", "--lr 0.001"]),
        (
            {"lr_warmup_iters": 10},
            ["warm-up of 80 samples", "decay of 80 samples", "--lr-warmup-iters", "--train-iters"],
        ),
        ({"lr_decay_style": "square"}, ["--lr-decay-style square", "cosine"]),
        ({"lr_decay_style": "WSD"}, ["--lr-decay-style WSD", "--lr-wsd-decay-iters"]),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_iters": 11}, ["88 samples", "80"]),
        ({"lr_wsd_decay_style": "cubic"}, ["--lr-wsd-decay-style cubic", "minus_sqrt"]),
        ({"train_iters": None}, ["--train-iters or --train-samples"]),
        ({"start_weight_decay": 0.1}, ["--start-weight-decay", "--weight-decay-incr-style"]),
        ({"weight_decay_incr_style": "linear", "start_weight_decay": 0.1}, ["--end-weight-decay (given: None)"]),
        (
            {"weight_decay_incr_style": "linear", "start_weight_decay": 0.2, "end_weight_decay": 0.1},
            ["--start-weight-decay 0.2", "--end-weight-decay 0.1"],
        ),
    ],
)
def test_flags_that_cannot_work(flags: dict[str, object], words: list[str]) -> None:
    arguments: dict[str, object] = {"lr": 1e-3, "global_batch_size": 8, "train_iters": 10, **flags}
    with pytest.raises(ConfigError) as caught:
        plan_schedule(**arguments)  # type: ignore[arg-type]  # values of several types
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_constant_rate_has_no_decay_to_fit() -> None:
    schedule = plan_schedule(
        lr=1e-3, global_batch_size=8, train_iters=10, lr_warmup_iters=50, lr_decay_style="constant"
    )
    assert schedule.learning_rate(200) == pytest.approx(0.5e-3, rel=EXACT)


def _resume(
    asked: RateSchedule, saved: RateSchedule, override: bool = False, use_checkpoint: bool = False
) -> RateSchedule:
    state = json.loads(json.dumps(saved.to_state()))
    return reconcile(asked, state, override=override, use_checkpoint=use_checkpoint)


def test_state_returns_every_digit() -> None:
    schedule = _styled("WSD", wsd_decay_samples=3, warmup_samples=0.1 + 0.2, max_lr=1 / 3)
    assert _resume(schedule, schedule) == schedule
    assert RateSchedule.from_state(json.loads(json.dumps(schedule.to_state()))) == schedule


def test_another_run_length_is_refused_with_both_values_and_both_flags() -> None:
    saved = plan_schedule(lr=1e-3, global_batch_size=8, train_iters=4)
    asked = plan_schedule(lr=1e-3, global_batch_size=8, train_iters=6)
    with pytest.raises(ConfigError) as caught:
        _resume(asked, saved)
    for word in ("decay_samples", "--train-iters", "48 by the flags", "32 in the checkpoint"):
        assert word in str(caught.value)
    assert OVERRIDE_FLAG in str(caught.value) and USE_CHECKPOINT_FLAG in str(caught.value)
    assert _resume(asked, saved, override=True) == asked
    assert _resume(asked, saved, use_checkpoint=True) == saved


def test_override_takes_the_new_peak_at_once() -> None:
    saved = plan_schedule(lr=3e-4, global_batch_size=8, train_iters=20)
    asked = plan_schedule(lr=3e-5, global_batch_size=8, train_iters=20)
    schedule = _resume(asked, saved, override=True)
    assert all(schedule.learning_rate(samples) <= 3e-5 for samples in range(160))


def test_both_resume_flags_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match=f"{OVERRIDE_FLAG} and {USE_CHECKPOINT_FLAG}"):
        _resume(KNOWN, KNOWN, override=True, use_checkpoint=True)


DIFFERENT: dict[str, float | str] = {
    "max_lr": 1e-3,
    "min_lr": 1e-6,
    "init_lr": 1e-6,
    "warmup_samples": 101,
    "decay_samples": 1001,
    "decay_style": "cosine",
    "wsd_decay_samples": 7,
    "wsd_decay_style": "linear",
    "end_weight_decay": 0.3,
    "start_weight_decay": 0.0,
    "weight_decay_samples": 70,
    "weight_decay_style": "cosine",
}


@pytest.mark.parametrize("field", list(DIFFERENT))
def test_every_field_in_use_is_compared(field: str) -> None:
    base = _styled(
        "WSD" if "wsd" in field else "linear",
        wsd_decay_samples=5,
        start_weight_decay=0.1,
        end_weight_decay=0.2,
        weight_decay_samples=50,
        weight_decay_style="linear",
    )
    asked = replace(base, **{field: DIFFERENT[field]})
    with pytest.raises(ConfigError) as caught:
        _resume(asked, base)
    told = str(caught.value)
    assert field in told and FLAGS[field] in told
    assert f"{DIFFERENT[field]} by the flags" in told and f"{getattr(base, field)} in the checkpoint" in told


@pytest.mark.parametrize("field", ["wsd_decay_samples", "wsd_decay_style", "weight_decay_samples"])
def test_a_field_that_changes_no_rate_may_differ(field: str) -> None:
    asked = replace(KNOWN, **{field: DIFFERENT[field]})
    assert _resume(asked, KNOWN) == asked


def test_every_field_has_its_flags() -> None:
    names = {field.name for field in fields(RateSchedule)}
    assert names == set(FLAGS) == set(DIFFERENT)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_lr", "fast"),
        ("max_lr", None),
        ("decay_samples", 1.5),
        ("decay_style", 3),
        ("warmup_samples", True),
        ("min_lr", 9.0),
    ],
)
def test_a_damaged_state_is_refused(field: str, value: object) -> None:
    with pytest.raises(CheckpointError, match="learning-rate schedule in the checkpoint"):
        RateSchedule.from_state({**KNOWN.to_state(), field: value})
