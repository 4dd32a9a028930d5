"""Reference: a clock that the test moves by hand, so every expected time is exact."""

import pytest
import torch

from megatron_parm.observe.timers import StepClock, Timers, device_synchroniser, table_of


class HandClock:
    def __init__(self):
        self.now = 100.0
        self.synchronised = 0

    def __call__(self):
        return self.now

    def synchronise(self):
        self.synchronised += 1
        self.now += self.pending
        self.pending = 0.0

    pending = 0.0  # device work that only a synchronisation waits for


def test_spans_add_up_by_name_and_drain():
    clock = HandClock()
    timers = Timers(1, clock.synchronise, clock=clock)
    for seconds in (0.5, 0.25):
        with timers.span("forward"):
            clock.now += seconds
    with timers.span("backward"):
        clock.now += 1.0
    assert timers.drain() == {"forward": 750.0, "backward": 1000.0}
    assert timers.drain() == {}


def test_a_span_waits_for_the_device_and_survives_an_error():
    clock = HandClock()
    timers = Timers(1, clock.synchronise, clock=clock)
    with pytest.raises(RuntimeError), timers.span("step"):
        clock.pending = 2.0
        raise RuntimeError
    assert timers.drain() == {"step": 2000.0}


@pytest.mark.parametrize(("level", "names"), [(0, []), (1, ["step"]), (2, ["part", "step"])])
def test_a_finer_level_than_asked_for_is_not_counted_and_waits_for_nothing(level, names):
    clock = HandClock()
    aligned = []
    timers = Timers(level, clock.synchronise, lambda: aligned.append(clock.now), clock)
    with timers.span("step"):
        clock.now += 1.0
        with timers.span("part", level=2):
            clock.now += 2.0
    assert sorted(timers.drain()) == names
    assert clock.synchronised == 2 * len(names)
    assert aligned == ([100.0] if level else [])  # once, before the span of level 1


def test_what_a_rank_waits_for_the_others_is_not_in_its_span():
    clock = HandClock()

    def wait():
        clock.now += 30.0

    timers = Timers(1, clock.synchronise, wait, clock)
    with timers.span("step"):
        clock.now += 1.0
    assert timers.drain() == {"step": 1000.0}


def test_a_table_has_every_name_of_every_rank_an_iteration():
    ranks = [{"step": 8.0}, {"step": 6.0, "send": 2.0}]
    assert table_of(ranks, 4) == {"step": (2.0, 1.5), "send": (0.0, 0.5)}


def test_evaluation_and_saving_are_not_in_the_step_time():
    """FC-39: the iteration after an evaluation or a save is not slower on paper."""
    clock = HandClock()
    steps = StepClock(clock.synchronise, clock)
    laps = []
    for iteration in range(4):
        clock.now += 0.125
        if iteration == 1:
            with steps.paused():
                clock.now += 60.0
                with steps.paused():  # a save asked for from within the evaluation
                    clock.now += 30.0
        laps.append(steps.lap_ms())
        if iteration == 2:
            with steps.paused():
                clock.now += 5.0
    assert laps == [125.0, 125.0, 125.0, 125.0]


def test_work_queued_before_a_pause_belongs_to_the_step():
    clock = HandClock()
    steps = StepClock(clock.synchronise, clock)
    clock.pending = 0.5
    with steps.paused():
        clock.now += 9.0
        clock.pending = 4.0
    assert steps.lap_ms() == 500.0


def test_restart_forgets_the_time_so_far():
    clock = HandClock()
    steps = StepClock(clock.synchronise, clock)
    clock.now += 7.0
    steps.restart()
    clock.now += 0.25
    assert steps.lap_ms() == 250.0


def test_the_cpu_needs_no_synchronisation():
    device_synchroniser(torch.device("cpu"))()
