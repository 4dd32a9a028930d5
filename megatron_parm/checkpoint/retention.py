"""Which older checkpoints are deleted after a save. Floor 6.

Only what is certainly no longer needed goes: never the newest two that are whole, never a damaged one (somebody may
want to look at it), never one that is newer than the save (it belongs to another branch of the run). A folder is
renamed to `.trash-*` before it is deleted, so a half-deleted one is never loaded, and the next save finishes the work.
"""

from dataclasses import dataclass
from pathlib import Path

from megatron_parm.checkpoint import paths
from megatron_parm.checkpoint.verify import is_whole
from megatron_parm.parallel.agreement import on_first_rank
from megatron_parm.parallel.context import ParallelContext

LEAST_KEPT = 2


@dataclass(frozen=True)
class Retention:
    """The newest `keep_last` whole checkpoints stay, and those at a multiple of `interval`; None: all stay."""

    keep_last: int | None = None
    interval: int | None = None

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is ever deleted."""
        return self.keep_last is None and self.interval is None


def superfluous(root: Path, newest: int, retention: Retention) -> list[int]:
    """The iterations of `root` to delete after `newest` was saved, oldest first."""
    if retention.keeps_all:
        return []
    whole = [n for n in paths.finished_iterations(root) if n <= newest and is_whole(root / paths.folder_name(n))]
    older = whole[max(LEAST_KEPT, retention.keep_last or 0) :]
    return sorted(n for n in older if retention.interval is None or n % retention.interval)


def remove_superfluous(root: Path, newest: int, retention: Retention, ctx: ParallelContext) -> list[str]:
    """Delete them; a line to log for each. Call on all ranks after a save. Raises CheckpointStorageError."""
    if retention.keeps_all:
        return []

    def remove() -> str:
        removed = [root / paths.folder_name(iteration) for iteration in superfluous(root, newest, retention)]
        for folder in removed:
            paths.delete(folder)
        return "\n".join(f"removed {folder}, a checkpoint that the flags do not keep" for folder in removed)

    return on_first_rank(ctx.world, f"deleting old checkpoints of {root}", remove).splitlines()
