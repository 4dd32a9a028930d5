"""A step that can fail on one rank fails on all ranks, with the same error. Floor 3.

A rank that raised alone would leave the others waiting in their next collective. So what can go wrong on one rank
only (a missing file, a damaged index, a disk that refuses) runs inside `on_all_ranks`, or, where the ranks exchange
what came of it, inside `on_every_rank` or `on_first_rank`.
"""

import json
from collections.abc import Callable
from typing import TypeVar

from megatron_parm import errors
from megatron_parm.errors import CheckpointError, CheckpointStorageError, MegatronParmError
from megatron_parm.parallel.context import Axis
from megatron_parm.parallel.transport import gather_text

T = TypeVar("T")

KINDS: dict[str, type[MegatronParmError]] = {
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, MegatronParmError)
}
NAMED_RANKS = 8  # of those that failed, in a message


def on_all_ranks(axis: Axis, action: Callable[[], T]) -> T:
    """This rank's result of `action`, if it succeeded on every rank of `axis`.

    If it raised one of our errors on some rank, every rank raises the error of the first such rank, with the ranks
    named where not all failed. Call on all ranks of the axis.
    """
    result: list[T] = []
    problem: MegatronParmError | None = None
    try:
        result.append(action())
    except MegatronParmError as error:
        problem = error
    _exchange(axis, "", problem)
    return result[0]


def on_every_rank(axis: Axis, doing: str, action: Callable[[], str]) -> list[str]:
    """Run `action` on every rank of `axis`; every rank gets all the texts it returned, in axis order.

    For what touches a checkpoint: the error on all ranks is the CheckpointError that was raised, or for anything else,
    whatever it is, a CheckpointStorageError that says what `doing` was. Call on all ranks of the axis.
    """
    text = ""
    problem: Exception | None = None
    try:
        text = action()
    except Exception as error:  # whatever it is, the peers wait for our answer
        problem = error
    told = problem if problem is None or isinstance(problem, CheckpointError) else _as_storage_error(problem, doing)
    return _exchange(axis, text, told, cause=problem)


def on_first_rank(axis: Axis, doing: str, action: Callable[[], str]) -> str:
    """Run `action` on the first rank of `axis` alone; every rank gets its text, or raises its error."""
    return on_every_rank(axis, doing, action if axis.rank == 0 else str)[0]


def _exchange(axis: Axis, text: str, problem: MegatronParmError | None, cause: Exception | None = None) -> list[str]:
    """Every rank's text, if no rank has a problem; else the error of the first that has."""
    answer = {"text": text} if problem is None else {"kind": _kind_of(problem), "message": str(problem)}
    answers = [json.loads(said) for said in gather_text(json.dumps(answer), axis)]
    failed = [rank for rank, other in zip(axis.ranks, answers, strict=True) if "kind" in other]
    if not failed:
        return [str(other["text"]) for other in answers]
    first = next(other for other in answers if "kind" in other)
    message = first["message"]
    if len(failed) < axis.size:
        named = ", ".join(map(str, failed[:NAMED_RANKS])) + (", ..." if len(failed) > NAMED_RANKS else "")
        message = f"rank{'s' if len(failed) > 1 else ''} {named}: {message}"
    raise KINDS[first["kind"]](message) from cause or problem


def _kind_of(error: MegatronParmError) -> str:
    """The name of the error's class, or of the nearest base that every rank knows."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in KINDS)


def _as_storage_error(error: Exception, doing: str) -> CheckpointStorageError:
    message = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    return CheckpointStorageError(f"{doing} failed: {message}")
