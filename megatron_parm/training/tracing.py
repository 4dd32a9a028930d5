"""`--trace FILE` in a training run: which steps and ranks are recorded, and when the file is written. Floor 7."""

from pathlib import Path

from megatron_parm.config.logs import LoggingConfig
from megatron_parm.errors import ConfigError
from megatron_parm.observe.log import Log
from megatron_parm.observe.trace import Recording
from megatron_parm.observe.trace_files import events_of, merge, part_path, write_events
from megatron_parm.parallel import transport
from megatron_parm.parallel.agreement import on_all_ranks
from megatron_parm.parallel.clocks import ClockOffset, clock_offset
from megatron_parm.parallel.context import ParallelContext


def traced_context(logging: LoggingConfig, ctx: ParallelContext) -> ParallelContext:
    """`ctx`, with a recording where the flags ask for this rank's. Raises ConfigError for ranks that there are not."""
    if logging.trace is None:
        return ctx
    ranks = logging.traced_ranks
    if ranks is not None and max(ranks) >= ctx.world.size:
        raise ConfigError(
            f"--profile-ranks {max(ranks)}: the run has ranks 0 to {ctx.world.size - 1}; name some of them, or leave "
            "it out for all"
        )
    return ctx.traced(Recording()) if ranks is None or ctx.rank in ranks else ctx


class RecordedSpan:
    """A stretch of a program that goes into one trace file. Every method is called on all ranks."""

    def __init__(self, path: Path, ctx: ParallelContext, log: Log) -> None:
        self._path = path
        self._ctx = ctx
        self._log = log
        self._offset = ClockOffset(0, 0)

    def start(self) -> None:
        """Compare the clocks, then record."""
        ctx = self._ctx
        self._offset = clock_offset(ctx.world, ctx.trace.now_ns, ctx.device)
        if isinstance(ctx.trace, Recording):
            ctx.trace.start()

    def write(self, about: str) -> None:
        """Stop, and write one file of all ranks' parts. Raises DataError on all ranks where it cannot be written."""
        ctx, path = self._ctx, self._path
        if isinstance(ctx.trace, Recording):
            ctx.trace.stop()
        on_all_ranks(ctx.world, self._write_part)
        mine = "yes" if isinstance(ctx.trace, Recording) else ""
        recorded = [rank for rank, found in enumerate(transport.gather_text(mine, ctx.world)) if found]

        def join() -> str:
            if ctx.rank:
                return ""
            parts = [part_path(path, rank) for rank in recorded]
            missing = [rank for rank, part in zip(recorded, parts, strict=True) if not part.exists()]
            merge([part for part in parts if part.exists()], path, {"about": about})
            return ", ".join(map(str, missing))

        missing = on_all_ranks(ctx.world, join)
        self._log.say(f" > wrote {path}: {about}; ranks recorded: {len(recorded)}")
        if missing:
            self._log.warn(
                f"--trace {path}: rank 0 does not see the parts of ranks {missing}, which lie beside the file on their "
                "own machines; each opens alone, and tools/analyse_trace.py --merge joins them"
            )

    def _write_part(self) -> None:
        ctx = self._ctx
        if not isinstance(ctx.trace, Recording):
            return
        title = f"rank {ctx.rank}" + (f" on {ctx.node}" if ctx.node else "")
        facts = {
            "rank": ctx.rank,
            "clock_offset_ns": self._offset.offset_ns,
            "clock_uncertainty_ns": self._offset.uncertainty_ns,
        }
        events = events_of(ctx.rank, title, ctx.trace.spans, self._offset.offset_ns)
        write_events(part_path(self._path, ctx.rank), events, facts)


class TracedSteps:
    """Records the steps of `--profile-step-start` to `--profile-step-end`. Every method is called on all ranks."""

    def __init__(self, logging: LoggingConfig, ctx: ParallelContext, log: Log) -> None:
        self._first, self._end = logging.profile_step_start, logging.profile_step_end
        self._stretch = None if logging.trace is None else RecordedSpan(Path(logging.trace), ctx, log)
        self._log = log
        self._since: int | None = None
        self._was_on = False

    def before_step(self, iteration: int) -> None:
        """`iteration` steps are done and another is to come."""
        is_due = self._first <= iteration < self._end
        if self._stretch is not None and is_due and self._since is None:
            self._stretch.start()
            self._since, self._was_on = iteration, True

    def after_step(self, iteration: int) -> None:
        """`iteration` steps are done."""
        if self._since is not None and iteration >= self._end:
            self.finish(iteration)

    def finish(self, iteration: int) -> None:
        """The run ends after `iteration` steps."""
        if self._stretch is None:
            return
        if self._since is not None:
            self._stretch.write(f"iterations {self._since + 1} to {iteration}")
            self._since = None
        elif not self._was_on:
            self._log.warn(
                f"--trace recorded nothing: no step of this run lies between --profile-step-start {self._first} and "
                f"--profile-step-end {self._end}"
            )
