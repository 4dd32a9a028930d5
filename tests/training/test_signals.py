"""Requests to stop, agreed by all ranks. Reference: what one rank alone was told."""

import os
import signal
import time
from typing import Any

import pytest
import torch

from megatron_parm.parallel.context import ParallelContext
from megatron_parm.training.signals import STOP_SIGNALS, StopRequests
from tests.harness.layouts import Layout
from tests.harness.pools import Pools


def _signalled(ctx: ParallelContext, where: int, number: int) -> tuple[list[str | None], bool]:
    """Reasons after two iterations; rank `where` gets the signal between them. Handlers are put back."""
    before = [signal.getsignal(one) for one in STOP_SIGNALS]
    stop = StopRequests(ctx, exit_interval=None, duration_minutes=None)
    with stop.watching(is_enabled=True):
        reasons = [stop.reason_at(1)]
        if ctx.rank == where:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)  # a second one changes nothing
        reasons.append(stop.reason_at(2))
    return reasons, before == [signal.getsignal(one) for one in STOP_SIGNALS]


@pytest.mark.parametrize("number", STOP_SIGNALS)
@pytest.mark.parametrize("where", [0, 1])
def test_a_signal_to_one_rank_stops_all_after_the_same_iteration(pools: Pools, where: int, number: int) -> None:
    for reasons, are_back in pools.run(Layout(2), _signalled, where, number):
        assert reasons == [None, "exiting after a termination signal"] and are_back


def _late(ctx: ParallelContext) -> list[str | None]:
    stop = StopRequests(ctx, exit_interval=None, duration_minutes=0.1 if ctx.rank == 1 else 60.0)
    reasons = [stop.reason_at(1)]
    stop._started -= 7  # seconds
    return [*reasons, stop.reason_at(2)]


def test_ranks_whose_clocks_differ_stop_together(pools: Pools) -> None:
    for first, second in pools.run(Layout(2), _late):
        assert first is None and second is not None and "--exit-duration-in-mins" in second


def test_an_interval_stops_at_its_multiples() -> None:
    stop = StopRequests(ParallelContext.single(torch.device("cpu")), exit_interval=3, duration_minutes=None)
    reasons = {iteration: stop.reason_at(iteration) for iteration in range(1, 8)}
    assert [iteration for iteration, reason in reasons.items() if reason] == [3, 6]
    assert reasons[6] == "exiting at iteration 6 (--exit-interval 3)"


def test_time_runs_from_the_start_of_the_run() -> None:
    stop = StopRequests(ParallelContext.single(), exit_interval=None, duration_minutes=1e-9)
    time.sleep(0.001)
    assert stop.reason_at(1) is not None


@pytest.mark.parametrize("is_enabled", [False, True])
def test_signals_keep_their_meaning_unless_asked_for(is_enabled: bool) -> None:
    """Without --exit-signal-handler a SIGTERM ends the process as ever."""
    found: list[Any] = []
    before = signal.signal(signal.SIGTERM, lambda *_: found.append(1))
    try:
        stop = StopRequests(ParallelContext.single(), exit_interval=None, duration_minutes=None)
        with stop.watching(is_enabled=is_enabled):
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.was_signalled is is_enabled and found == ([] if is_enabled else [1])
    finally:
        signal.signal(signal.SIGTERM, before)
