"""`--moe-schedule-check`. References: times given by hand; one schedule; the uninterrupted run, bit for bit."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megatron_parm.config.parser import parse_run_config
from megatron_parm.config.run import check_run
from megatron_parm.errors import CheckpointError, ConfigError
from megatron_parm.moe.choose import candidate_name, choose, drops_alike
from megatron_parm.moe.cost import PUBLISHED, LayerShape
from megatron_parm.training import schedule_check
from megatron_parm.training.schedule_check import ScheduleCheck, plan_check, report
from tests.harness.layouts import Layout
from tests.harness.pools import Pools
from tests.training.runs import MOE, flags, run_training, same_bits

SHAPE = LayerShape(4096, 1024, 4096, 8, 2, 4.0, 1, True, False, 2, 2, tp=4, ep=8, esp=4)
DROPPING = replace(SHAPE, capacity_factor=1.2)
LAYOUT = Layout(4, tp=2, ep=2, esp=2)
SIZES = "--tensor-model-parallel-size 2 --expert-model-parallel-size 2 --expert-tensor-parallel-size 2"
CHECK = "--train-iters 12 --moe-schedule auto --moe-schedule-check 3"


def test_the_choice_and_the_next_best_are_tried() -> None:
    choice = choose(SHAPE, PUBLISHED)
    check = plan_check(choice, SHAPE, 2)
    names = [candidate_name(*candidate) for candidate in check.candidates]
    assert names == sorted(choice.predicted_ms, key=lambda name: choice.predicted_ms[name])[:3]
    assert check.predicted_ms == tuple(choice.predicted_ms[name] for name in names)
    slow = plan_check(choose(SHAPE, PUBLISHED, "baseline", 1), SHAPE, 2)
    assert slow.candidates[0] == ("baseline", 1), "a schedule that was given is tried, however slow"


def test_only_what_drops_the_same_tokens_meets() -> None:
    assert drops_alike("s1", "s2", SHAPE) and drops_alike("s1", "s2", replace(DROPPING, tp=1))
    assert drops_alike("s1", "baseline", replace(DROPPING, capacity_factor=None))
    assert not drops_alike("s1", "s2", DROPPING) and drops_alike("s1", "s1h", DROPPING)
    check = plan_check(choose(DROPPING, PUBLISHED, "s2", 1), DROPPING, 2)
    assert {schedule for schedule, _ in check.candidates} <= {"baseline", "deepspeed", "s2", "s2h"}
    assert check.left_out and all(name.startswith("s1") for name in check.left_out)
    assert any(check.left_out[0] in line and "drop" in line for line in report(replace_times(check), "x", 1))


def replace_times(check: ScheduleCheck) -> ScheduleCheck:
    check.times_ms = [1.0] * check.rounds * len(check.candidates)
    return check


def test_turns_medians_and_the_table() -> None:
    check = ScheduleCheck((("s1h", 2), ("s1", 1)), (2.0, 3.0), rounds=4)
    for time in (90.0, 99.0, 12.0, 7.0, 10.0, 8.0, 30.0, 9.0):
        assert check.current == check.candidates[len(check.times_ms) % 2] and not check.is_done
        check.times_ms.append(time)
    assert check.is_done
    assert [(tried.name, tried.predicted_ms, tried.step_ms) for tried in check.results] == [
        ("s1", 3.0, 8.0),
        ("s1h x 2", 2.0, 12.0),
    ], "the first round does not count"
    lines = report(check, "it stays", 6)
    assert lines[2].split()[1:] == ["s1", "18.00", "8.00", "6.00", "-4.00"]
    assert lines[3].split()[1:] == ["s1h", "x", "2", "12.00", "12.00", "0.00", "0.00"]


def test_a_damaged_record_is_refused() -> None:
    check = ScheduleCheck((("s1", 1),), (2.0,), 1, ("s2",), [5.0])
    assert ScheduleCheck.from_state(json.loads(json.dumps(check.to_state()))) == check
    for damaged in ({}, {**check.to_state(), "times_ms": ["x"]}, {**check.to_state(), "candidates": [["s1"]]}):
        with pytest.raises(CheckpointError, match="--moe-schedule-check is damaged"):
            ScheduleCheck.from_state(damaged)


class _Clock:
    """A clock by which every step of rank 1 under the third candidate takes 1 ms, any other step 5 or more."""

    def __init__(self, rank: int) -> None:
        self._readings, self._rank = 0, rank

    def perf_counter(self) -> float:
        step, is_end = divmod(self._readings, 2)
        self._readings += 1
        took = 0.001 if step % 3 == 2 else 0.005 + 0.001 * self._rank
        return step + took * is_end


def _slow_but_the_third(rank: int) -> Any:
    return patch.object(schedule_check, "time", _Clock(rank))


def _run(pools: Pools, corpus: str, *more: str, fault: Callable[[int], Any] | None = None) -> list[Any]:
    outcomes = pools.run(LAYOUT, run_training, flags(corpus, SIZES, MOE, CHECK, *more), fault)
    assert all(outcome.error is None for outcome in outcomes), outcomes[0].error
    return outcomes


def test_the_true_best_is_taken_by_all_ranks(pools: Pools, corpus: str, tmp_path: Path) -> None:
    """FC-30: whatever runs in between, every figure equals that of one schedule to rounding."""
    reference = pools.run(LAYOUT, run_training, flags(corpus, SIZES, MOE, "--train-iters 12 --moe-schedule baseline"))
    outcomes = _run(pools, corpus, "--moe-schedule-adapt", fault=_slow_but_the_third)
    for outcome, plain in zip(outcomes, reference, strict=True):
        events = [event.get("moe_schedule_check") for event in outcome.of("train")]
        assert [event is not None for event in events] == [True] * 9 + [False] * 3
        tried = [event["tried"] for event in events[:9]]
        assert tried == tried[:3] * 3 and len(set(tried)) == 3
        assert [event["step_ms"] for event in events[:3]] == pytest.approx([8.0, 8.0, 1.0]), "the slowest rank's"
        best = events[8]["results"][0]
        taken = events[8]["taken"]
        assert taken == {"schedule": best["schedule"], "chunks": best["chunks"]}
        assert candidate_name(best["schedule"], best["chunks"]) == tried[2]
        assert outcome.column("lm_loss") == pytest.approx(plain.column("lm_loss"), rel=1e-5)
        assert outcome.column("grad_norm") == pytest.approx(plain.column("grad_norm"), rel=1e-4)
    said = outcomes[0].said
    assert "--moe-schedule-check: 3 steps each" in said and "is taken from the next step on" in said
    assert not outcomes[1].said


def test_without_adapt_the_choice_stays(pools: Pools, corpus: str) -> None:
    outcomes = _run(pools, corpus, fault=_slow_but_the_third)
    start = outcomes[0].of("start")[0]["moe_schedule"]
    event = outcomes[3].of("train")[8]["moe_schedule_check"]
    assert event["taken"] == {"schedule": start["name"], "chunks": start["chunks"]}
    assert "--moe-schedule-adapt would take" in outcomes[0].said


@pytest.mark.parametrize("stopped_at", [4, 10], ids=["in the check", "after it"])
def test_a_resume_goes_on_bit_for_bit(pools: Pools, corpus: str, tmp_path: Path, stopped_at: int) -> None:
    """The clock of the resumed part would choose otherwise: after the check it must not be asked again."""
    save = f"--moe-schedule-adapt --save {tmp_path / 'c'} --save-interval {stopped_at}"
    whole = _run(pools, corpus, "--moe-schedule-adapt", fault=_slow_but_the_third)
    _run(pools, corpus, save, f"--exit-interval {stopped_at}", fault=_slow_but_the_third)
    state = json.loads((tmp_path / "c" / f"iter_{stopped_at:07}" / "state.json").read_text())
    assert len(state["moe_schedule"]["check"]["times_ms"]) == min(stopped_at, 9)
    resumed = _run(pools, corpus, save, f"--load {tmp_path / 'c'}", fault=_offset_clock if stopped_at == 4 else None)
    for one, other in zip(whole, resumed, strict=True):
        assert one.figures()[stopped_at:] == other.figures()
        assert not same_bits(one.state, other.state)
    if stopped_at == 10:
        start = resumed[0].of("start")[0]["moe_schedule"]
        assert "--moe-schedule-check" in start["reason"]
        assert not any("moe_schedule_check" in event for event in resumed[0].of("train"))


class _OffsetClock(_Clock):
    """The same clock when 4 steps are behind."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self._readings = 8


def _offset_clock(rank: int) -> Any:
    return patch.object(schedule_check, "time", _OffsetClock(rank))


@pytest.mark.parametrize("given", ["--moe-schedule s1 --moe-schedule-check 3", "--moe-schedule auto"])
def test_adapt_needs_a_check_of_auto(corpus: str, given: str) -> None:
    with pytest.raises(ConfigError, match="--moe-schedule auto --moe-schedule-check 5"):
        check_run(parse_run_config(flags(corpus, MOE, given, "--moe-schedule-adapt"))[0], 1)
