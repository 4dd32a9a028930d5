"""From torchrun's environment to a `ParallelContext`, and back down again. Floor 3.

The only place that reads the launcher's environment and the only one in parallel/ that names a device backend. Ranks
compare what must agree through the rendezvous store before any group exists, so ranks that disagree stop with the
differing flags instead of hanging in a collective. One process without torchrun needs no torch.distributed at all.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_parm.errors import ConfigError, LayoutError
from megatron_parm.parallel import transport
from megatron_parm.parallel.context import Axis, ParallelContext
from megatron_parm.parallel.grid import AXES, RankGrid


@dataclass(frozen=True)
class LaunchEnvironment:
    """What the launcher told this process. `world` 1 and no address for a process started without a launcher."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    address: str
    port: int
    attempt: int


def read_environment() -> LaunchEnvironment:
    """Read torchrun's variables. Raises ConfigError for a variable that is missing or not a number."""

    def number(name: str, default: str) -> int:
        text = os.environ.get(name, default)
        try:
            return int(text)
        except ValueError:
            raise ConfigError(
                f"environment variable {name} is {text!r}; the launcher must set it to a number"
            ) from None

    given = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name in os.environ]
    if "WORLD_SIZE" in given and number("WORLD_SIZE", "1") > 1 and len(given) < 4:
        raise ConfigError(
            f"of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT only {', '.join(given)} are set; start the script with "
            "torchrun, or set all four, or none for one process"
        )
    return LaunchEnvironment(
        rank=number("RANK", "0"),
        world=number("WORLD_SIZE", "1"),
        local_rank=number("LOCAL_RANK", "0"),
        local_world=number("LOCAL_WORLD_SIZE", "1"),
        address=os.environ.get("MASTER_ADDR", "127.0.0.1"),
        port=number("MASTER_PORT", "29500"),
        attempt=number("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def open_store(environment: LaunchEnvironment, timeout: timedelta) -> dist.Store | None:
    """The key-value store that all ranks share, or None for one process. Raises LayoutError if it cannot be reached."""
    if environment.world == 1:
        return None
    hosted_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    place = f"{environment.address}:{environment.port}"
    try:
        store = dist.TCPStore(
            environment.address,
            environment.port,
            environment.world,
            is_master=environment.rank == 0 and not hosted_by_torchrun,
            timeout=timeout,
            wait_for_workers=False,
        )
    except (RuntimeError, ValueError) as error:
        raise LayoutError(
            f"rank {environment.rank} could not reach the rendezvous at {place} within "
            f"{timeout.total_seconds():.0f} s: {str(error).splitlines()[0]}. "
            "If the port is taken by another program, start torchrun with --standalone or another --master-port; "
            "if the host is wrong, set MASTER_ADDR (torchrun --master-addr)"
        ) from None
    return dist.PrefixStore(f"megatron_parm/{environment.attempt}", store)


def check_fingerprint(values: Mapping[str, str], environment: LaunchEnvironment, store: dist.Store | None) -> None:
    """Compare `values` (flag -> value) over all ranks, before any group exists.

    Call on all ranks. Raises LayoutError on every rank, naming each flag that differs with the ranks and their
    values, or a rank that did not come within the store's timeout.
    """
    if store is None:
        return
    store.set(f"fingerprint/{environment.rank}", json.dumps(dict(values)))
    if environment.rank == 0:
        store.set("verdict", _compare_fingerprints(environment.world, store))
    try:
        verdict = store.get("verdict").decode()
    except dist.DistStoreError:
        verdict = "rank 0 did not come to the start of the run in time; see its own message"
    if verdict != "agreed":
        raise LayoutError(verdict)


def _compare_fingerprints(world: int, store: dist.Store) -> str:
    everyone: list[dict[str, str]] = []
    for rank in range(world):
        try:
            everyone.append(json.loads(store.get(f"fingerprint/{rank}")))
        except dist.DistStoreError:
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
    """Process groups by rank set: two axes over the same ranks share one, and a second context makes none anew.

    A new group does not inherit the timeout of the first, so each is given `timeout`.
    """

    timeout: timedelta
    _groups: dict[tuple[int, ...], dist.ProcessGroup | None] = field(default_factory=dict)

    def get(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The group of `ranks`, made at the first call. Call on all ranks of the world in the same order."""
        if ranks not in self._groups:
            everyone = len(ranks) == dist.get_world_size()
            self._groups[ranks] = dist.group.WORLD if everyone else dist.new_group(list(ranks), timeout=self.timeout)
        return self._groups[ranks]


def build_context(grid: RankGrid, rank: int, device: torch.device, groups: GroupCache) -> ParallelContext:
    """Every axis of `grid` as seen by `rank`. Call on all ranks with the same grid, after init_process_group."""
    axes = {}
    for name in AXES:
        for ranks in grid.groups(name):
            group = groups.get(ranks) if len(ranks) > 1 else None
            if rank in ranks:
                axes[name] = Axis(name, len(ranks), ranks.index(rank), ranks, group)
    return ParallelContext(grid, rank, device, **axes)


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
    return build_context(grid, environment.rank, device, GroupCache(timeout))


def shutdown(ctx: ParallelContext) -> None:
    """Leave together: a group destroyed early can abort a slower peer. Call on all ranks of a run that ended well."""
    if ctx.world.size > 1:
        transport.barrier(ctx.world)
        dist.destroy_process_group()
