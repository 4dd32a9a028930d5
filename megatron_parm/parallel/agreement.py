"""A step that can fail on one rank fails on all ranks, with the same error. Floor 3.

A rank that raised alone would leave the others waiting in their next collective. So what can go wrong on one rank
only (a missing file, a damaged index) runs inside `on_all_ranks`.
"""

import json
from collections.abc import Callable
from typing import TypeVar

from megatron_parm import errors
from megatron_parm.errors import MegatronParmError
from megatron_parm.parallel.context import Axis
from megatron_parm.parallel.transport import gather_text

T = TypeVar("T")

KINDS: dict[str, type[MegatronParmError]] = {
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, MegatronParmError)
}


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
    answer = None if problem is None else {"kind": _kind_of(problem), "message": str(problem)}
    answers = [json.loads(text) for text in gather_text(json.dumps(answer), axis)]
    failed = [rank for rank, other in zip(axis.ranks, answers, strict=True) if other is not None]
    if not failed:
        return result[0]
    first = next(other for other in answers if other is not None)
    message = first["message"]
    if len(failed) < axis.size:
        message = f"rank{'s' if len(failed) > 1 else ''} {', '.join(map(str, failed))}: {message}"
    raise KINDS[first["kind"]](message) from problem


def _kind_of(error: MegatronParmError) -> str:
    """The name of the error's class, or of the nearest base that every rank knows."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in KINDS)
