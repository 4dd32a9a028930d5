"""A step that fails on some ranks fails on all. Reference: what each rank was told to do."""

import errno
import os

import pytest

from megatron_parm import errors
from megatron_parm.errors import (
    CheckpointError,
    CheckpointStorageError,
    ConfigError,
    DataError,
    LayoutError,
    MegatronParmError,
    UntrustedCheckpointError,
)
from megatron_parm.parallel import transport
from megatron_parm.parallel.agreement import KINDS, on_all_ranks, on_every_rank, on_first_rank
from megatron_parm.parallel.context import ParallelContext
from tests.checkpoint import example
from tests.harness.layouts import Layout
from tests.harness.pools import Pools, WorkerError


class _OnlyHere(DataError):
    """A kind of error that other processes may not know."""

    exit_code = 7


FAILURES: dict[str, MegatronParmError] = {
    "data": DataError("no file a.bin; give --data-path"),
    "config": ConfigError("--lr -1 is negative"),
    "checkpoint": CheckpointError("iter_0000003 is damaged"),
    "own kind": _OnlyHere("line 3 is broken"),
}


def _agree(ctx: ParallelContext, plan: list[str], axis: str) -> tuple[str, str, int, bool]:
    """(class, message, exit code, whether the own error is the cause) or the result."""

    def action() -> str:
        if plan[ctx.rank] in FAILURES:
            raise FAILURES[plan[ctx.rank]]
        return plan[ctx.rank]

    try:
        result = on_all_ranks(ctx.axis(axis), action)
    except MegatronParmError as error:
        found = (type(error).__name__, str(error), error.exit_code, error.__cause__ is FAILURES.get(plan[ctx.rank]))
    else:
        found = ("", result, 0, True)
    transport.barrier(ctx.axis(axis))  # all ranks are in step after it, whatever happened
    return found


def test_each_rank_keeps_its_own_result(pools: Pools) -> None:
    plan = ["a", "b", "c", "d"]
    assert [found[:2] for found in pools[4].run(_agree, plan, "world")] == [("", text) for text in plan]


@pytest.mark.parametrize(
    ("plan", "kind", "message"),
    [
        (["ok", "data", "ok", "ok"], DataError, "rank 1: no file a.bin; give --data-path"),
        (["ok", "data", "ok", "data"], DataError, "ranks 1, 3: no file a.bin; give --data-path"),
        (["data"] * 4, DataError, "no file a.bin; give --data-path"),
        (["ok", "ok", "checkpoint", "config"], CheckpointError, "ranks 2, 3: iter_0000003 is damaged"),
        (["ok", "own kind", "ok", "ok"], DataError, "rank 1: line 3 is broken"),
    ],
)
def test_all_raise_the_error_of_the_first(
    pools: Pools, plan: list[str], kind: type[MegatronParmError], message: str
) -> None:
    for name, text, exit_code, is_own in pools[4].run(_agree, plan, "world"):
        assert (name, text, exit_code) == (kind.__name__, message, kind.exit_code)
        assert is_own


def test_other_groups_of_the_axis_are_not_concerned(pools: Pools) -> None:
    answers = pools.run(Layout(4, tp=2), _agree, ["ok", "config", "ok", "ok"], "tp")
    assert [name for name, *_ in answers] == ["ConfigError", "ConfigError", "", ""]


def test_the_message_names_global_ranks(pools: Pools) -> None:
    answers = pools.run(Layout(4, tp=2), _agree, ["ok", "ok", "ok", "data"], "tp")
    assert answers[2][1].startswith("rank 3: ")


def test_one_process(pools: Pools) -> None:
    assert pools.run(Layout(1), _agree, ["fine"], "world") == [("", "fine", 0, True)]
    assert pools.run(Layout(1), _agree, ["data"], "world")[0][1] == "no file a.bin; give --data-path"


def _unexpected(ctx: ParallelContext) -> None:
    def action() -> None:
        if ctx.rank == 1:
            raise KeyError("a fault of ours")

    on_all_ranks(ctx.world, action)


def test_a_fault_of_ours_is_not_dressed_as_the_users(pools: Pools) -> None:
    with pytest.raises(WorkerError) as caught:
        pools[2].run(_unexpected)
    assert "KeyError: 'a fault of ours'" in caught.value.failures[1]


def test_every_error_class_can_cross_ranks() -> None:
    ours = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
    assert set(KINDS) == ours and LayoutError.__name__ in KINDS


# --- where the ranks exchange what came of it, and whatever was raised is told ---

STORAGE_FAILURES: dict[str, Exception] = {
    "damaged": CheckpointError("it is damaged"),
    "untrusted": UntrustedCheckpointError("it is hostile"),
    "disk": OSError(errno.EIO, os.strerror(errno.EIO), "/some/file"),
    "bug": KeyError("name"),
}


def _fail_on(ctx: ParallelContext, ranks: tuple[int, ...], kind: str) -> list[str]:
    def action() -> str:
        if ctx.rank in ranks:
            raise STORAGE_FAILURES[kind]
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
    assert answers == [("CheckpointError", 21, "ranks 1, 3: it is damaged")] * 4
    alike = pools.run(Layout(4), example.error_of, _fail_on, (0, 1, 2, 3), "damaged")
    assert alike == [("CheckpointError", 21, "it is damaged")] * 4


def test_one_process_keeps_the_cause() -> None:
    with pytest.raises(CheckpointStorageError) as caught:
        _fail_on(ParallelContext.single(), (0,), "disk")
    assert isinstance(caught.value.__cause__, OSError)
