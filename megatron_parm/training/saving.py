"""When a run's checkpoints are written, completed and deleted. Floor 7.

With --async-save the run stands still only while the values are copied, and at the step after the last rank has
written, while the manifest is made. One save is under way at a time: the next one waits for it.
"""

import time
from pathlib import Path

from megatron_parm.checkpoint.background import BackgroundSave
from megatron_parm.checkpoint.retention import Retention, remove_superfluous
from megatron_parm.checkpoint.save import SaveReport
from megatron_parm.checkpoint.storage import HostCopies
from megatron_parm.config.checkpoint import CheckpointConfig
from megatron_parm.observe.log import Log
from megatron_parm.observe.records import SaveRecord
from megatron_parm.observe.sinks import Recorder
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.training.assemble import Assembly
from megatron_parm.training.progress_state import RunProgress
from megatron_parm.training.resume import begin_saving


class RunSaver:
    """Saves a run. Every method is called on all ranks.

    A save that fails raises CheckpointStorageError on all ranks: at once, or with --async-save at the next `poll`.
    `saved_at`: the iteration of the newest save, or of the checkpoint that the run goes on from.
    """

    def __init__(self, config: CheckpointConfig, ctx: ParallelContext, log: Log, recorder: Recorder) -> None:
        self.saved_at: int | None = None
        self._root = None if config.save is None else Path(config.save)
        self._is_async = config.async_save
        self._retention = Retention(config.save_keep_last, config.save_retain_interval)
        self._ctx = ctx
        self._log = log
        self._recorder = recorder
        self._underway: BackgroundSave | None = None
        self._memory = HostCopies()
        self._started = self._stall_seconds = 0.0  # of the save under way

    def save(self, run: Assembly, progress: RunProgress) -> None:
        """Save, unless this iteration is saved already or nothing is to be saved."""
        if self._root is None or self.saved_at == progress.iteration:
            return
        self.settle()
        started = time.monotonic()
        begun = begin_saving(run, progress, self._root)
        if self._is_async:
            self._underway = BackgroundSave(begun, self._ctx, self._memory)
            self._started = started
            self._stall_seconds = time.monotonic() - started
        else:
            begun.write()
            report = begun.finish()
            seconds = time.monotonic() - started
            self._tell(report, progress.iteration, seconds, seconds)
        self.saved_at = progress.iteration

    def poll(self) -> None:
        """Complete the save under way if every rank has written. Call after every step."""
        if self._underway is not None and self._underway.is_written():
            self._complete(self._underway)

    def settle(self) -> None:
        """Wait for the save under way and complete it."""
        if self._underway is not None:
            self._complete(self._underway)

    def _complete(self, underway: BackgroundSave) -> None:
        self._underway = None  # also if it fails: it is told once
        waiting = time.monotonic()
        report = underway.finish()
        now = time.monotonic()
        self._tell(report, underway.iteration, now - self._started, self._stall_seconds + now - waiting)

    def _tell(self, report: SaveReport, iteration: int, seconds: float, stall_seconds: float) -> None:
        assert self._root is not None
        removed = remove_superfluous(self._root, iteration, self._retention, self._ctx)
        for note in (*report.notes, *removed):
            self._log.say(f" > {note}")
        self._recorder.write(SaveRecord(iteration, str(report.path), seconds, stall_seconds))
