"""A save whose files are written beside training. Floor 6.

The values are copied first; then a thread writes this rank's file while training goes on. The folder gets its name,
and the tracker file moves, only after every rank has written: `finish`, on all ranks. Until then the older checkpoint
is the newest.
"""

import threading

import torch

from megatron_parm.checkpoint.save import SaveReport, SaveUnderway
from megatron_parm.checkpoint.storage import HostCopies
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.transport import min_over


class BackgroundSave:
    """A save that has begun, with a thread that writes this rank's file from the copies in `memory`.

    The memory serves the next save when this one is finished.
    """

    def __init__(self, underway: SaveUnderway, ctx: ParallelContext, memory: HostCopies) -> None:
        self.iteration = underway.iteration
        self._underway = underway
        self._ctx = ctx
        underway.take_copies(memory)
        # a daemon: a process that ends on an error does not wait for a slow disk
        self._thread = threading.Thread(target=underway.write, name="checkpoint writer", daemon=True)
        self._thread.start()

    def is_written(self) -> bool:
        """Whether every rank has written, or failed to. The same on all ranks; call on all of them."""
        done = torch.tensor([0.0 if self._thread.is_alive() else 1.0], device=self._ctx.device)
        return bool(min_over(done, self._ctx.world).item())

    def finish(self) -> SaveReport:
        """Wait for the writers and complete the checkpoint. Call on all ranks.

        Raises CheckpointStorageError on all ranks if one could not write; the older checkpoints are untouched then.
        """
        self._thread.join()
        return self._underway.finish()
