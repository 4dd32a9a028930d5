"""One rank's failure is everyone's, told the same way."""

import errno
import os

import pytest

from megatron_parm.checkpoint.agreement import CheckpointStorageError, on_every_rank, on_first_rank
from megatron_parm.errors import CheckpointError, UntrustedCheckpointError
from megatron_parm.parallel.context import ParallelContext
from tests.checkpoint import example
from tests.harness.layouts import Layout
from tests.harness.pools import Pools

FAILURES: dict[str, Exception] = {
    "damaged": CheckpointError("it is damaged"),
    "untrusted": UntrustedCheckpointError("it is hostile"),
    "disk": OSError(errno.EIO, os.strerror(errno.EIO), "/some/file"),
    "bug": KeyError("name"),
}


def _fail_on(ctx: ParallelContext, ranks: tuple[int, ...], kind: str) -> list[str]:
    def action() -> str:
        if ctx.rank in ranks:
            raise FAILURES[kind]
        return f"from {ctx.rank}"

    return on_every_rank(ctx.world, "saving x", action)


def _first_only(ctx: ParallelContext) -> str:
    return on_first_rank(ctx.world, "reading x", lambda: f"decided by {ctx.rank}")


def test_every_rank_gets_every_text(pools: Pools) -> None:
    assert pools.run(Layout(4), _fail_on, (), "bug") == [["from 0", "from 1", "from 2", "from 3"]] * 4
    assert pools.run(Layout(4), _first_only) == ["decided by 0"] * 4


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("damaged", ("CheckpointError", 21, "rank 2: it is damaged")),
        ("untrusted", ("UntrustedCheckpointError", 21, "rank 2: it is hostile")),
        ("disk", ("CheckpointStorageError", 1, "rank 2: saving x failed: [Errno 5] Input/output error: '/some/file'")),
        ("bug", ("CheckpointStorageError", 1, "rank 2: saving x failed: KeyError: 'name'")),
    ],
)
def test_the_failure_of_one_rank_reaches_all(pools: Pools, kind: str, expected: tuple[str, int, str]) -> None:
    assert pools.run(Layout(4), example.error_of, _fail_on, (2,), kind) == [expected] * 4


def test_several_failures_name_the_first_and_list_the_rest(pools: Pools) -> None:
    answers = pools.run(Layout(4), example.error_of, _fail_on, (1, 3), "damaged")
    assert answers == [("CheckpointError", 21, "rank 1: it is damaged (also failed: rank 3)")] * 4
    alike = pools.run(Layout(4), example.error_of, _fail_on, (0, 1, 2, 3), "damaged")
    assert alike == [("CheckpointError", 21, "it is damaged")] * 4


def test_one_process_keeps_the_cause() -> None:
    with pytest.raises(CheckpointStorageError) as caught:
        _fail_on(ParallelContext.single(), (0,), "disk")
    assert isinstance(caught.value.__cause__, OSError)
