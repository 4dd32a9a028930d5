"""One decision for all ranks: a step that fails on one rank fails on every rank, with the same error. Floor 6.

Saving and loading touch the disk, and a disk can fail on one rank only. A rank that raised alone would leave the others
waiting in their next collective, so each step runs inside `on_every_rank` or `on_first_rank`.
"""

import json
from collections.abc import Callable

from torch.distributed.checkpoint import CheckpointException

from megatron_parm.errors import CheckpointError, UntrustedCheckpointError
from megatron_parm.parallel.context import Axis
from megatron_parm.parallel.transport import gather_text


class CheckpointStorageError(CheckpointError):
    """The disk refused: full, read-only, an I/O error. Exit code 1: the checkpoints that exist are not to blame."""

    exit_code = 1


KINDS: dict[str, type[CheckpointError]] = {
    kind.__name__: kind for kind in (CheckpointError, UntrustedCheckpointError, CheckpointStorageError)
}


def on_every_rank(axis: Axis, doing: str, action: Callable[[], str]) -> list[str]:
    """Run `action` on every rank of `axis`; every rank gets all the texts it returned, in axis order.

    `doing` says what is being done, for the message. If the action raises on any rank, all raise the same
    CheckpointError (of the class that was raised; CheckpointStorageError for anything else), naming the first rank that
    failed. Call on all ranks of the axis.
    """
    caught: BaseException | None = None
    answer: dict[str, object]
    try:
        answer = {"text": action()}
    except (Exception, CheckpointException) as error:  # whatever it is, the peers wait for our answer
        caught = error
        answer = _describe(error, axis.rank)
    answers = [json.loads(text) for text in gather_text(json.dumps(answer), axis)]
    failures = sorted((answer for answer in answers if "kind" in answer), key=lambda failure: int(failure["rank"]))
    if not failures:
        return [str(answer["text"]) for answer in answers]
    raise _error_for_all(failures, doing, axis) from caught


def on_first_rank(axis: Axis, doing: str, action: Callable[[], str]) -> str:
    """Run `action` on the first rank of `axis` alone; every rank gets its text, or raises its error."""
    return on_every_rank(axis, doing, action if axis.rank == 0 else str)[0]


def _describe(error: BaseException, rank: int) -> dict[str, object]:
    if isinstance(error, CheckpointException) and error.failures:  # raised on all ranks alike, with the culprit inside
        culprit = min(error.failures)
        return _describe(error.failures[culprit][0], culprit)
    name = type(error).__name__
    if name in KINDS and isinstance(error, CheckpointError):
        return {"rank": rank, "kind": name, "message": str(error)}
    message = str(error) if isinstance(error, OSError) else f"{name}: {error}"
    return {"rank": rank, "kind": CheckpointStorageError.__name__, "message": message}


def _error_for_all(failures: list[dict[str, str]], doing: str, axis: Axis) -> CheckpointError:
    first = failures[0]
    message = first["message"]
    if KINDS[first["kind"]] is CheckpointStorageError:
        message = f"{doing} failed: {message}"
    ranks = sorted({int(failure["rank"]) for failure in failures})
    if axis.size > 1 and len(ranks) < axis.size:
        message = f"rank {axis.ranks[ranks[0]]}: {message}"
        if len(ranks) > 1:
            named = ", ".join(str(axis.ranks[rank]) for rank in ranks[1:9]) + (", ..." if len(ranks) > 9 else "")
            message += f" (also failed: rank {named})"
    return KINDS[first["kind"]](message)
