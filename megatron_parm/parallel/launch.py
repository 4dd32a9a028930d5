"""From torchrun's environment to a `ParallelContext`, and back down again. Floor 3.

The only place that reads the launcher's environment and the only one in parallel/ that names a device backend. Ranks
compare what must agree through the rendezvous store before any group exists, so ranks that disagree stop with the
differing flags instead of hanging in a collective. One process without torchrun needs no torch.distributed at all.
"""

import json
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron_parm.errors import ConfigError, LayoutError
from megatron_parm.parallel import transport
from megatron_parm.parallel.context import Axis, ParallelContext
from megatron_parm.parallel.grid import AXES, RankGrid, cut_by_nodes

T = TypeVar("T")

MODEL = "model"  # the purpose of the groups that forward and backward use


@dataclass(frozen=True)
class LaunchEnvironment:
    """What the launcher told this process; rank 0 of a world of 1 for a process started without a launcher."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    address: str
    port: int
    attempt: int
    node: str = ""


def read_environment() -> LaunchEnvironment:
    """Read torchrun's variables. Raises ConfigError for a variable that is missing, no number or out of range."""
    given = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name in os.environ]
    world = _number("WORLD_SIZE", default=1, least=1)
    if (world > 1 and len(given) < 4) or ("RANK" in given and "WORLD_SIZE" not in given):
        raise ConfigError(
            f"of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT only {', '.join(given)} are set; start the script with "
            "torchrun, or set all four, or none for one process"
        )
    return LaunchEnvironment(
        rank=_number("RANK", default=0, most=world - 1),
        world=world,
        local_rank=_number("LOCAL_RANK", default=0),
        local_world=_number("LOCAL_WORLD_SIZE", default=1, least=1),
        address=os.environ.get("MASTER_ADDR", "127.0.0.1"),
        port=_number("MASTER_PORT", default=29500, least=1, most=65535),
        attempt=_number("TORCHELASTIC_RESTART_COUNT", default=0),
        node=f"{socket.gethostname()}/{os.environ.get('GROUP_RANK', '0')}",
    )


def _number(name: str, *, default: int, least: int = 0, most: int | None = None) -> int:
    text = os.environ.get(name, str(default))
    rule = f"a number of at least {least}" if most is None else f"a number from {least} to {most}"
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least or (most is not None and value > most):
        raise ConfigError(f"environment variable {name} is {text!r}; the launcher must set it to {rule}")
    return value


def open_store(environment: LaunchEnvironment, timeout: timedelta) -> dist.Store | None:
    """The key-value store that all ranks share, or None for one process. Raises LayoutError if it cannot be reached.

    Rank 0 serves it, unless torchrun does; it may open it a second time.
    """
    if environment.world == 1:
        return None
    hosted_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    place = f"{environment.address}:{environment.port}"

    def connect() -> dist.Store:
        return dist.TCPStore(
            environment.address,
            environment.port,
            environment.world,
            is_master=environment.rank == 0 and not hosted_by_torchrun,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )

    try:
        store = _within(timeout, connect)
    except (RuntimeError, ValueError, TimeoutError) as error:
        reason = str(error).splitlines()[0].rstrip(".") if str(error) else "no answer"
        raise LayoutError(
            f"rank {environment.rank} could not reach the rendezvous at {place} (it waits "
            f"{timeout.total_seconds():.0f} s at most): {reason}. "
            "If the port is taken by another program, start torchrun with --standalone or another --master-port; "
            "if the host is wrong, set MASTER_ADDR (torchrun --master-addr)"
        ) from None
    return dist.PrefixStore(f"megatron_parm/{environment.attempt}", store)


def _within(timeout: timedelta, action: Callable[[], T]) -> T:
    """The result of `action`, or TimeoutError; it is then left to a thread that ends with the process.

    For TCPStore's own timeout does not count once something has answered: against a foreign program it waits for ever.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(action())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result(timeout.total_seconds())


def check_fingerprint(values: Mapping[str, str], environment: LaunchEnvironment, store: dist.Store | None) -> None:
    """Compare `values` (flag -> value) over all ranks, before any group exists.

    Call once on all ranks. Raises LayoutError on every rank, naming each flag that differs with the ranks and their
    values, or a rank that did not come within the store's timeout; and on a rank that came to another run's store.
    """
    if store is None:
        return
    try:
        if store.add(f"came/{environment.rank}", 1) > 1:
            raise LayoutError(
                f"another rank {environment.rank} has come to {environment.address}:{environment.port} before: another "
                "run uses this port; start torchrun with --standalone or another --master-port"
            )
        store.set(f"fingerprint/{environment.rank}", json.dumps(dict(values)))
        if environment.rank == 0:
            store.set("verdict", _compare_fingerprints(environment.world, store))
        with suppress(dist.DistStoreError):
            store.wait(["verdict"])  # one timeout more, for rank 0 may wait that long and then names who is late
        verdict = store.get("verdict").decode()
    except dist.DistError:
        verdict = "rank 0 did not come to the start of the run in time; see its own message"
    if verdict != "agreed":
        raise LayoutError(verdict)


def _compare_fingerprints(world: int, store: dist.Store) -> str:
    everyone: list[dict[str, str]] = []
    for rank in range(world):
        try:
            everyone.append(json.loads(store.get(f"fingerprint/{rank}")))
        except dist.DistError:
            return f"rank {rank} did not come to the start of the run in time; see its own message"
    differing = []
    for flag in sorted({flag for values in everyone for flag in values}):
        ranks_by_value: dict[str, list[int]] = {}
        for rank, values in enumerate(everyone):
            ranks_by_value.setdefault(values.get(flag, "(not known)"), []).append(rank)
        if len(ranks_by_value) > 1:
            shown = "; ".join(
                f"{value} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
                for value, ranks in ranks_by_value.items()
            )
            differing.append(f"  {flag}: {shown}")
    if not differing:
        return "agreed"
    return "the ranks were started with different settings; start all with the same command:\n" + "\n".join(differing)


def choose_device(backend: str, environment: LaunchEnvironment) -> tuple[torch.device, str, str | None]:
    """The device, the backend for `--distributed-backend auto|gloo|nccl`, and a note for the user where one is due."""
    if torch.cuda.is_available() and backend != "gloo":
        count = torch.cuda.device_count()
        if environment.local_rank >= count:
            raise LayoutError(
                f"local rank {environment.local_rank} has no GPU of its own: this machine has {count}; "
                f"start torchrun with --nproc-per-node {count}, or run on the CPU with --distributed-backend gloo"
            )
        torch.cuda.set_device(environment.local_rank)
        return torch.device("cuda", environment.local_rank), "nccl", None
    note = "--distributed-backend nccl needs a CUDA device and none is visible: running on the CPU with gloo"
    return torch.device("cpu"), "gloo", note if backend == "nccl" else None


@dataclass
class GroupCache:
    """Process groups by purpose and rank set: axes of one purpose over the same ranks share one, and a second context
    makes none anew.

    A new group does not inherit the timeout of the first, so each is given `timeout`.
    """

    timeout: timedelta
    _groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup | None] = field(default_factory=dict)

    def get(self, ranks: tuple[int, ...], purpose: str = MODEL) -> dist.ProcessGroup | None:
        """The group of `ranks`, made at the first call. Call on all ranks of the world in the same order.

        Collectives of two purposes may be on the wire at once, in an order that differs between ranks; so purposes
        never share a group.
        """
        key = purpose, ranks
        if key not in self._groups:
            is_default = purpose == MODEL and len(ranks) == dist.get_world_size()
            self._groups[key] = dist.group.WORLD if is_default else dist.new_group(list(ranks), timeout=self.timeout)
        return self._groups[key]


# the axes of a context: name -> (axis of the grid, purpose of its group)
CONTEXT_AXES: dict[str, tuple[str, str]] = {name: (name, MODEL) for name in AXES} | {
    "dp_gradients": ("dp", "gradients"),
    "edp_gradients": ("edp", "gradients"),
}


def make_groups(grid: RankGrid, groups: GroupCache, nodes: Sequence[str] = ()) -> None:
    """Every group that a context of `grid` needs. Call on all ranks of the world, also on those outside the grid."""
    for ranks in grid.rank_sets():
        groups.get(ranks)
    for table in cut_by_nodes(grid, nodes or [""] * grid.world).values():
        for ranks in table:
            if len(ranks) > 1:
                groups.get(ranks)
    for axis, purpose in CONTEXT_AXES.values():
        for ranks in grid.groups(axis):
            if purpose != MODEL and len(ranks) > 1:
                groups.get(ranks, purpose)


def _axis(name: str, ranks: tuple[int, ...], rank: int, groups: GroupCache, purpose: str) -> Axis:
    return Axis(name, len(ranks), ranks.index(rank), ranks, groups.get(ranks, purpose) if len(ranks) > 1 else None)


def build_context(
    grid: RankGrid, rank: int, device: torch.device, groups: GroupCache, nodes: Sequence[str] = ()
) -> ParallelContext:
    """Every axis of `grid` as seen by `rank`. Call on all ranks with the same grid, after init_process_group.

    nodes: for each rank a name that the ranks of its node share and no others; none for a single node.
    """
    nodes = nodes or [""] * grid.world
    make_groups(grid, groups, nodes)
    axes = {"ends": _axis("ends", grid.ends_of(rank), rank, groups, MODEL)}
    for name, (axis, purpose) in CONTEXT_AXES.items():
        axes[name] = _axis(axis, grid.group_of(axis, rank), rank, groups, purpose)
    for name, table in cut_by_nodes(grid, nodes).items():
        axes[name] = _axis(name, next(ranks for ranks in table if rank in ranks), rank, groups, MODEL)
    return ParallelContext(grid, rank, device, **axes, node=nodes[rank])


def _share_nodes(environment: LaunchEnvironment, store: dist.Store) -> list[str]:
    """The node of every rank, through the store."""
    store.set(f"node/{environment.rank}", environment.node)
    return [store.get(f"node/{rank}").decode() for rank in range(environment.world)]


def start(
    grid: RankGrid,
    environment: LaunchEnvironment,
    store: dist.Store | None,
    device: torch.device,
    backend: str,
    timeout: timedelta,
) -> ParallelContext:
    """Join the ranks and build every group. Call on all ranks, after `check_fingerprint`."""
    if store is None:
        return ParallelContext.single(device)
    dist.init_process_group(backend, store=store, rank=environment.rank, world_size=environment.world, timeout=timeout)
    nodes = _share_nodes(environment, store)
    return build_context(grid, environment.rank, device, GroupCache(timeout), nodes)


def shutdown(ctx: ParallelContext) -> None:
    """Leave together: a group destroyed early can abort a slower peer. Call on all ranks of a run that ended well."""
    if ctx.world.size > 1:
        transport.barrier(ctx.world)
        dist.destroy_process_group()
