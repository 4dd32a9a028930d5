"""From the launcher's environment to groups: wrong environments, ranks that disagree, ports that are taken.

The rendezvous tests run `open_store` in the workers of a pool, each with an environment of its own making.
"""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch

from megatron_parm.errors import ConfigError, LayoutError
from megatron_parm.parallel import launch, transport
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.grid import AXES, RankGrid
from megatron_parm.parallel.launch import LaunchEnvironment
from tests.harness.layouts import Layout
from tests.harness.pools import Pools

VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_USE_AGENT_STORE",
    "GROUP_RANK",
)
OF_TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29511",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "GROUP_RANK": "1",
}
PATIENCE = timedelta(seconds=20)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        assert isinstance(port, int)
        return port


@contextmanager
def foreign_program() -> Iterator[int]:
    """The port of a program that listens, takes connections and says nothing."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def environment(rank: int, world: int, port: int) -> LaunchEnvironment:
    return LaunchEnvironment(rank, world, rank, world, "127.0.0.1", port, 0)


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_without_a_launcher_one_process(variables: pytest.MonkeyPatch) -> None:
    found = launch.read_environment()
    assert (found.rank, found.world, found.local_rank, found.local_world, found.attempt) == (0, 1, 0, 1, 0)
    assert launch.open_store(found, PATIENCE) is None
    launch.check_fingerprint({"--seed": "1"}, found, None)
    ctx = launch.start(RankGrid(1), found, None, torch.device("cpu"), "gloo", PATIENCE)
    assert ctx == ParallelContext.single() and not torch.distributed.is_initialized()
    launch.shutdown(ctx)


def test_reads_what_torchrun_sets(variables: pytest.MonkeyPatch) -> None:
    for name, text in OF_TORCHRUN.items():
        variables.setenv(name, text)
    assert launch.read_environment() == LaunchEnvironment(5, 8, 1, 4, "node0", 29511, 2, f"{socket.gethostname()}/1")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"RANK": None}, ["WORLD_SIZE, MASTER_ADDR, MASTER_PORT are set", "torchrun"]),
        ({"MASTER_PORT": None}, ["RANK, WORLD_SIZE, MASTER_ADDR are set", "torchrun"]),
        ({"WORLD_SIZE": None}, ["only RANK, MASTER_ADDR, MASTER_PORT are set"]),
        ({"WORLD_SIZE": "eight"}, ["WORLD_SIZE is 'eight'", "at least 1"]),
        ({"WORLD_SIZE": "0"}, ["WORLD_SIZE is '0'", "at least 1"]),
        ({"WORLD_SIZE": ""}, ["WORLD_SIZE is ''"]),
        ({"RANK": "8"}, ["RANK is '8'", "from 0 to 7"]),
        ({"RANK": "-1"}, ["RANK is '-1'", "from 0 to 7"]),
        ({"LOCAL_RANK": "1.0"}, ["LOCAL_RANK is '1.0'"]),
        ({"MASTER_PORT": "70000"}, ["MASTER_PORT is '70000'", "from 1 to 65535"]),
        ({"TORCHELASTIC_RESTART_COUNT": "x"}, ["TORCHELASTIC_RESTART_COUNT is 'x'"]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_environment_is_named(
    variables: pytest.MonkeyPatch, changes: dict[str, str | None], told: list[str]
) -> None:
    for name, text in (OF_TORCHRUN | changes).items():
        if text is not None:
            variables.setenv(name, text)
    with pytest.raises(ConfigError) as caught:
        launch.read_environment()
    for phrase in told:
        assert phrase in str(caught.value)


def test_an_address_alone_does_not_make_a_launcher(variables: pytest.MonkeyPatch) -> None:
    """Clusters set MASTER_ADDR in interactive shells too."""
    variables.setenv("MASTER_ADDR", "node0")
    assert launch.read_environment().world == 1


def _fingerprint(
    ctx: ParallelContext, port: int, values: list[dict[str, str]], late: int | None, timeout_s: float
) -> tuple[str, float]:
    here = environment(ctx.rank, ctx.world.size, port)
    begin = time.monotonic()
    message = "agreed"
    store = launch.open_store(here, timedelta(seconds=timeout_s))
    if ctx.rank != late:
        try:
            launch.check_fingerprint(values[ctx.rank], here, store)
        except LayoutError as error:
            message = str(error)
    seconds = time.monotonic() - begin
    transport.barrier(ctx.world)  # rank 0 serves the store
    return message, seconds


def test_ranks_with_the_same_settings_agree(pools: Pools) -> None:
    values = {"--seed": "1", "--data-path": "/größe/\udcff"}  # a name that is no valid text
    answers = pools[4].run(_fingerprint, free_port(), [values] * 4, None, 20)
    assert [message for message, _ in answers] == ["agreed"] * 4


def test_ranks_that_disagree_all_hear_every_differing_flag(pools: Pools) -> None:
    same = {"--seed": "1", "--hidden-size": "64"}
    values = [same, same | {"--seed": "2"}, same | {"--num-experts": "8"}, same]
    answers = pools[4].run(_fingerprint, free_port(), values, None, 20)
    messages = {message for message, _ in answers}
    assert len(messages) == 1
    lines = messages.pop().splitlines()
    assert "different settings" in lines[0] and "same command" in lines[0]
    assert lines[1:] == [
        "  --num-experts: (not known) on ranks 0, 1, 3; 8 on rank 2",
        "  --seed: 1 on ranks 0, 2, 3; 2 on rank 1",
    ]
    assert max(seconds for _, seconds in answers) < 10


def test_a_rank_that_does_not_come_is_named_on_every_other(pools: Pools) -> None:
    """Rank 0's verdict comes when its own wait ends, so the others have to wait longer than it."""
    answers = pools[4].run(_fingerprint, free_port(), [{}] * 4, 2, 2)
    for rank, (message, seconds) in enumerate(answers):
        if rank != 2:
            assert "rank 2 did not come" in message
            assert seconds < 8


def test_an_absent_rank_0_is_named(pools: Pools) -> None:
    answers = pools[2].run(_fingerprint, free_port(), [{}] * 2, 0, 1)
    assert "rank 0 did not come" in answers[1][0]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_port_of_another_program_ends_the_rank_in_time(rank: int) -> None:
    """FC-40. Rank 0 cannot listen there and knows at once; rank 1 gets no answer and must not wait for ever."""
    with foreign_program() as port:
        begin = time.monotonic()
        with pytest.raises(LayoutError) as caught:
            launch.open_store(environment(rank, 2, port), timedelta(seconds=2))
        assert time.monotonic() - begin < (1 if rank == 0 else 6)
    for phrase in (f"rank {rank}", f"127.0.0.1:{port}", "--standalone", "--master-port", "MASTER_ADDR"):
        assert phrase in str(caught.value)
    assert ("in use" in str(caught.value)) == (rank == 0)


def test_rank_0_may_open_its_store_twice() -> None:
    """The run's first handle still serves the store when a failure is reported through a second."""
    here = environment(0, 2, free_port())
    first, second = launch.open_store(here, PATIENCE), launch.open_store(here, PATIENCE)
    assert first is not None and second is not None
    first.set("key", "value")
    assert second.get("key") == b"value"


def test_attempts_of_a_restarted_run_do_not_meet() -> None:
    first = environment(0, 2, free_port())
    second = LaunchEnvironment(0, 2, 0, 2, first.address, first.port, attempt=1)
    stores = [launch.open_store(here, PATIENCE) for here in (first, second)]
    assert stores[0] is not None and stores[1] is not None
    stores[0].set("key", "old")
    assert not stores[1].check(["key"])


def test_the_device_follows_backend_and_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    here = environment(1, 2, 29500)
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert launch.choose_device("auto", here) == (torch.device("cpu"), "gloo", None)
    device, backend, note = launch.choose_device("nccl", here)
    assert (device.type, backend) == ("cpu", "gloo") and note is not None and "no" in note and "CUDA" in note
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert launch.choose_device("auto", here) == (torch.device("cuda", 1), "nccl", None)
    assert launch.choose_device("gloo", here) == (torch.device("cpu"), "gloo", None)
    assert chosen == [1]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(LayoutError, match=r"local rank 1 has no GPU.*--nproc-per-node 1.*gloo"):
        launch.choose_device("auto", here)


def _groups(ctx: ParallelContext) -> tuple[int, int]:
    """(distinct groups of the layout's axes, those that a second context of the same cache added)."""
    cache = launch.GroupCache(PATIENCE)
    made = launch.build_context(ctx.grid, ctx.rank, ctx.device, cache)
    before = len(cache._groups)
    again = launch.build_context(ctx.grid, ctx.rank, ctx.device, cache)
    for name, purpose_of_one in (("dp", "dp_gradients"), ("edp", "edp_gradients")):
        model, gradients = made.axis(name), made.axis(purpose_of_one)
        assert (model.name, model.ranks) == (gradients.name, gradients.ranks)
        assert model.group is None or model.group is not gradients.group
    for name in AXES:
        assert made.axis(name) == again.axis(name)
        assert made.axis(name).ranks == ctx.grid.group_of(name, ctx.rank)
        assert made.axis(name).ranks[made.axis(name).rank] == ctx.rank
        assert (made.axis(name).group is None) == (made.axis(name).size == 1)
    return before, len(cache._groups) - before


def test_axes_over_the_same_ranks_share_a_group(pools: Pools) -> None:
    """tp = esp = 2 and ep = 2 on 4 ranks: tp and esp share two groups, dp and ep two, world, stage and ep_esp one.

    Gradients have two more over the ranks of dp; with dp over the whole world theirs is not the default group.
    """
    assert pools.run(Layout(4, tp=2, esp=2, ep=2), _groups) == [(7, 0)] * 4
    assert pools.run(Layout(4), _groups) == [(2, 0)] * 4


def _come_again(ctx: ParallelContext, port: int) -> str:
    here = environment(ctx.rank, ctx.world.size, port)
    store = launch.open_store(here, PATIENCE)
    launch.check_fingerprint({}, here, store)
    try:
        launch.check_fingerprint({}, here, launch.open_store(here, PATIENCE))
    except LayoutError as error:
        return str(error)
    finally:
        transport.barrier(ctx.world)  # rank 0 serves the store
    return ""


def test_a_rank_that_comes_to_the_store_of_another_run_leaves_at_once(pools: Pools) -> None:
    """FC-40: rank 0 of a second run finds the port taken, the others would find the first run's store."""
    port = free_port()
    for rank, message in enumerate(pools[2].run(_come_again, port)):
        for phrase in (f"another rank {rank}", f"127.0.0.1:{port}", "--master-port"):
            assert phrase in message
