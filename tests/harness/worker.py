"""One process of a pool: waits for a call, runs it with the context of the asked layout, answers with its result.

The forkserver imports this module once, so torch is loaded when a worker is forked.
"""

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_parm.parallel.launch import GroupCache, build_context
from tests.harness.layouts import Layout
from tests.harness.wire import pack, unpack

SEED = 1234


@contextmanager
def clean_state() -> Iterator[None]:
    """The torch settings every call starts from: fixed seed, deterministic kernels, new memory filled with NaN."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    dtype = torch.get_default_dtype()
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(deterministic)
            torch.set_default_dtype(dtype)
            torch.set_num_threads(threads)


def _answer(rank: int, groups: GroupCache, message: bytes) -> bytes:
    try:
        layout, function, args, kwargs = unpack(message)
        assert isinstance(layout, Layout)
        with clean_state():
            ctx = build_context(layout.grid, rank, torch.device("cpu"), groups, layout.names_of_nodes)
            return pack(("ok", function(ctx, *args, **kwargs)))
    except BaseException:
        return pack(("error", traceback.format_exc()))


def work(rank: int, world: int, store: str, log: str, timeout_s: float, connection: "Connection[Any, Any]") -> None:
    """The life of a worker: join the group of its pool, then answer calls until the pipe closes."""
    with Path(log).open("ab", buffering=0) as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timeout)
    groups = GroupCache(timeout)  # kept over all calls: a group costs 20 ms, and never-freed ones threads and files
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            os._exit(0)  # without destroying the group: slower peers may still be reading from us
        answer = _answer(rank, groups, message)
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            connection.send_bytes(answer)
        except BrokenPipeError:
            os._exit(0)
