"""How failing ranks speak: the cause once, its echoes not at all.

The ranks of a pool report through a rendezvous of their own, as the ranks of a run do just before they exit.
"""

import io
import signal
import time
from contextlib import redirect_stderr
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_parm.parallel import failures, launch, transport
from megatron_parm.parallel.context import ParallelContext
from tests.harness.pools import Pools
from tests.parallel.test_launch import PATIENCE, environment, foreign_program, free_port

SHORT_SECONDS = 0.5


@dataclass(frozen=True)
class Report:
    """What a rank says, and when; None for a rank that does not fail."""

    text: str
    echo: bool = False
    after_s: float = 0.0


def _report(ctx: ParallelContext, port: int, reports: list[Report | None]) -> tuple[str, float]:
    """What this rank printed, and the seconds that took."""
    patience, failures.PATIENCE_SECONDS = failures.PATIENCE_SECONDS, SHORT_SECONDS
    on_terminate = signal.getsignal(signal.SIGTERM)
    here = environment(ctx.rank, ctx.world.size, port)
    store = launch.open_store(here, PATIENCE)  # the run's own handle
    transport.barrier(ctx.world)
    report, printed, seconds = reports[ctx.rank], io.StringIO(), 0.0
    try:
        if report is not None:
            time.sleep(report.after_s)
            begin = time.monotonic()
            with redirect_stderr(printed):
                failures.report(report.text, here, echo=report.echo)
            seconds = time.monotonic() - begin
    finally:
        failures.PATIENCE_SECONDS = patience
        signal.signal(signal.SIGTERM, on_terminate)
        transport.barrier(ctx.world)  # rank 0 serves the store
        del store
    return printed.getvalue(), seconds


def _said(pools: Pools, *reports: Report | None) -> list[str]:
    return [printed for printed, _ in pools[len(reports)].run(_report, free_port(), list(reports))]


def test_all_alike_speak_once_through_rank_0(pools: Pools) -> None:
    same = Report("error: --seed is missing")
    answers = pools[4].run(_report, free_port(), [same] * 4)
    assert [printed for printed, _ in answers] == ["error: --seed is missing\n", "", "", ""]
    assert max(seconds for _, seconds in answers) < SHORT_SECONDS, "all have come, so nobody waits"


def test_some_alike_speak_through_their_lowest_rank(pools: Pools) -> None:
    same = Report("error: no such file")
    assert _said(pools, None, same, None, same) == ["", "[ranks 1, 3] error: no such file\n", "", ""]


def test_each_cause_is_said_by_one_of_its_ranks(pools: Pools) -> None:
    disk, file = Report("error: disk full"), Report("error: no such file")
    said = _said(pools, file, disk, file, disk)
    assert said == ["[ranks 0, 2] error: no such file\n", "[ranks 1, 3] error: disk full\n", "", ""]


def test_echoes_are_silent_beside_a_cause(pools: Pools) -> None:
    """Also the echo of a rank that hears of it late, and the one that comes before the cause."""
    echo, late = Report("lost contact", echo=True), Report("lost contact", echo=True, after_s=0.8)
    assert _said(pools, echo, Report("error: boom", after_s=0.2), echo, late) == ["", "[rank 1] error: boom\n", "", ""]


def test_echoes_alone_speak_once(pools: Pools) -> None:
    """A rank was killed and could not speak: the others are all that is heard."""
    echo = Report("lost contact", echo=True)
    said = _said(pools, echo, None, echo, echo)
    assert sorted(map(len, said))[:3] == [0, 0, 0]
    assert "".join(said) in {f"[rank {rank}] lost contact\n" for rank in (0, 2, 3)}


def test_text_that_is_no_valid_unicode_is_still_said(pools: Pools) -> None:
    """A file name can hold any bytes; argv brings them as lone surrogates."""
    said = _said(pools, Report("error: no file /data/\udcff"), Report("error: no file /data/\udcff"))
    assert said == ["error: no file /data/\\udcff\n", ""]


def test_one_process_needs_no_rendezvous(capsys: pytest.CaptureFixture[str]) -> None:
    failures.report("error: alone", environment(0, 1, 29500))
    assert capsys.readouterr().err == "error: alone\n"


def test_without_a_rendezvous_every_rank_speaks(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Better twice than never: the port belongs to another program, which is also what the text says."""
    monkeypatch.setattr(failures, "PATIENCE_SECONDS", SHORT_SECONDS)
    with foreign_program() as port:
        for rank in (0, 1):
            failures.report(f"error: said by {rank}", environment(rank, 2, port))
    assert capfd.readouterr().err.endswith("error: said by 0\nerror: said by 1\n")


def _lose_rank_1(ctx: ParallelContext, port: int) -> tuple[str, bool, bool] | None:
    """The error of a collective whose peer has left, in a group of its own."""
    here = environment(ctx.rank, ctx.world.size, port)
    store = launch.open_store(here, PATIENCE)
    assert store is not None
    group = dist.ProcessGroupGloo(store, ctx.rank, ctx.world.size, PATIENCE)
    if ctx.rank == 1:
        del group  # closes its connections
        transport.barrier(ctx.world)
        return None
    found = None
    try:
        for _ in range(1000):
            group.barrier().wait()
    except RuntimeError as error:
        found = (str(error), failures.is_echo(error), failures.is_timeout(error))
    transport.barrier(ctx.world)
    return found


def test_the_words_of_gloo_for_a_lost_peer_are_known(pools: Pools) -> None:
    """Reference: what gloo really raises."""
    message, is_echo, is_timeout = pools[2].run(_lose_rank_1, free_port())[0]
    assert is_echo and not is_timeout, message


def _miss_a_collective(ctx: ParallelContext, port: int) -> tuple[str, bool, bool] | None:
    here = environment(ctx.rank, ctx.world.size, port)
    store = launch.open_store(here, PATIENCE)
    assert store is not None
    group = dist.ProcessGroupGloo(store, ctx.rank, ctx.world.size, timedelta(seconds=1))
    found = None
    if ctx.rank == 0:
        try:
            group.barrier().wait()
        except RuntimeError as error:
            found = (str(error), failures.is_echo(error), failures.is_timeout(error))
    transport.barrier(ctx.world)
    return found


def test_the_words_of_gloo_for_a_hang_are_known(pools: Pools) -> None:
    message, is_echo, is_timeout = pools[2].run(_miss_a_collective, free_port())[0]
    assert is_echo and is_timeout, message


def test_other_errors_are_causes() -> None:
    assert not failures.is_echo(ValueError("Connection closed by peer"))
    assert not failures.is_echo(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
