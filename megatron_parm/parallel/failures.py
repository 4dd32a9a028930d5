"""How a failing run speaks: once, naming the ranks, with the cause and not its echoes. Floor 3.

Ranks that fail meet at the rendezvous store for a moment. Those with the same message let the lowest of them print it;
a rank that only lost contact with a peer stays silent when some rank has posted the cause.
"""

import signal
import sys
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from megatron_parm.errors import LayoutError
from megatron_parm.parallel.launch import LaunchEnvironment, open_store

PATIENCE_SECONDS = 2.0
ECHOES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "Socket closed")


def is_echo(error: BaseException) -> bool:
    """Whether the error only says that a peer went away or did not come."""
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in ECHOES)


def is_timeout(error: BaseException) -> bool:
    """Whether a collective waited longer than the timeout."""
    return isinstance(error, RuntimeError) and "Timed out waiting" in str(error)


def report(text: str, environment: LaunchEnvironment, *, echo: bool = False) -> None:
    """Print `text` on stderr, once for all ranks that fail alike. `echo`: only if no rank posts a cause meanwhile.

    Call on each failing rank just before it exits; waits `PATIENCE_SECONDS` at most for the others.
    """
    text = text.encode(errors="backslashreplace").decode()  # a file name may hold bytes that are no text
    store = _failure_store(environment)
    if store is None:
        print(text, file=sys.stderr, flush=True)
        return
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends the others as soon as the first has left
    try:
        speaks, prefix = _settle(text, environment, store, echo)
    except (dist.DistError, RuntimeError):  # the store went away with its host: better twice than never
        speaks, prefix = True, f"[rank {environment.rank}] "
    if speaks:
        print(prefix + text, file=sys.stderr, flush=True)


def _failure_store(environment: LaunchEnvironment) -> dist.Store | None:
    try:
        return open_store(environment, timedelta(seconds=PATIENCE_SECONDS))
    except LayoutError:
        return None


def _settle(text: str, environment: LaunchEnvironment, store: dist.Store, echo: bool) -> tuple[bool, str]:
    """Whether this rank speaks, and the prefix that names the ranks it speaks for."""
    world, rank = environment.world, environment.rank
    store.set(f"failure/{'echo' if echo else 'cause'}/{rank}", text)
    deadline = time.monotonic() + PATIENCE_SECONDS
    arrived = store.add("failure/arrived", 1)
    while arrived < world and time.monotonic() < deadline:
        time.sleep(0.05)
        arrived = store.add("failure/arrived", 0)
    causes = {r: store.get(f"failure/cause/{r}").decode() for r in range(world) if store.check([f"failure/cause/{r}"])}
    if echo:
        answer = not causes and store.add("failure/spoken", 1) == 1, f"[rank {rank}] "
    else:
        alike = [r for r, other in causes.items() if other == text]
        named = f"[rank{'s' if len(alike) > 1 else ''} {', '.join(map(str, alike))}] "
        answer = rank == alike[0], "" if len(alike) == world else named
    read = store.add("failure/read", 1)
    while rank == 0 and read < arrived and time.monotonic() < deadline:  # rank 0 may serve the store: it leaves last
        time.sleep(0.02)
        read = store.add("failure/read", 0)
    return answer
