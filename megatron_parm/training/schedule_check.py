"""`--moe-schedule-check N`: the best predicted schedules, tried in the first steps of a run. Floor 7.

Each step runs under one candidate, in turn, so that what changes on the machine meets all of them alike. A step's time
is that of the slowest rank, the same number on all ranks, so all ranks decide alike. The first round warms up and does
not count, where there are more. Only candidates that drop the same tokens meet: what a step computes does not depend on
the check, up to the order in which sums are taken.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, TypeVar

import torch

from megatron_parm.errors import CheckpointError
from megatron_parm.models.build import BuiltModel
from megatron_parm.moe.choose import Choice, candidate_name, drops_alike, named_candidate
from megatron_parm.moe.cost import LayerShape
from megatron_parm.observe.log import Log
from megatron_parm.observe.timers import device_synchroniser
from megatron_parm.parallel import transport
from megatron_parm.parallel.context import ParallelContext

T = TypeVar("T")

NUM_CANDIDATES = 3
Candidate = tuple[str, int]


@dataclass(frozen=True)
class Tried:
    """A candidate: predicted milliseconds of a layer, measured ones of a step."""

    schedule: str
    chunks: int
    predicted_ms: float
    step_ms: float

    @property
    def name(self) -> str:
        """As it is shown."""
        return candidate_name(self.schedule, self.chunks)


@dataclass
class ScheduleCheck:
    """Tries `candidates` for `rounds` steps each. `left_out`: better predictions that would drop other tokens."""

    candidates: tuple[Candidate, ...]
    predicted_ms: tuple[float, ...]
    rounds: int
    left_out: tuple[str, ...] = ()
    times_ms: list[float] = field(default_factory=list)  # of the steps so far, in turn

    @property
    def is_done(self) -> bool:
        """True when every candidate had its steps."""
        return len(self.times_ms) >= self.rounds * len(self.candidates)

    @property
    def current(self) -> Candidate:
        """Whose turn it is."""
        return self.candidates[len(self.times_ms) % len(self.candidates)]

    @property
    def results(self) -> list[Tried]:
        """The medians, fastest first; those of equal time in the order of their predictions."""
        count = len(self.candidates)
        found = []
        for place, (candidate, predicted) in enumerate(zip(self.candidates, self.predicted_ms, strict=True)):
            times = self.times_ms[place::count]
            found.append(Tried(*candidate, predicted, median(times[1:] if self.rounds > 1 else times)))
        return sorted(found, key=lambda tried: tried.step_ms)

    def become(self, other: "ScheduleCheck") -> None:
        """Go on where `other` stands."""
        self.candidates, self.predicted_ms, self.rounds = other.candidates, other.predicted_ms, other.rounds
        self.left_out, self.times_ms = other.left_out, list(other.times_ms)

    def to_state(self) -> dict[str, Any]:
        """As JSON values, for a checkpoint."""
        return {
            "candidates": [list(candidate) for candidate in self.candidates],
            "predicted_ms": list(self.predicted_ms),
            "rounds": self.rounds,
            "left_out": list(self.left_out),
            "times_ms": list(self.times_ms),
        }

    @staticmethod
    def from_state(state: Any) -> "ScheduleCheck":
        """The check that `to_state` gave. Raises CheckpointError for anything else."""
        try:
            candidates = tuple((str(schedule), int(chunks)) for schedule, chunks in state["candidates"])
            predicted, times = (list(map(float, state[name])) for name in ("predicted_ms", "times_ms"))
            left_out = tuple(map(str, state["left_out"]))
            return ScheduleCheck(candidates, tuple(predicted), int(state["rounds"]), left_out, times)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint's record of --moe-schedule-check is damaged ({type(error).__name__}: {error}); resume "
                "from another checkpoint"
            ) from None


def plan_check(choice: Choice, shape: LayerShape, rounds: int) -> ScheduleCheck:
    """A check of the choice and the next best predictions that drop the same tokens."""
    chosen = (choice.schedule, choice.chunks)
    times = {named_candidate(name): time for name, time in choice.predicted_ms.items()}
    ranked = sorted(times, key=lambda candidate: (candidate != chosen, times[candidate]))
    alike = [candidate for candidate in ranked if drops_alike(chosen[0], candidate[0], shape)]
    taken = alike[:NUM_CANDIDATES]
    slowest = max(times[candidate] for candidate in taken)
    left_out = tuple(
        candidate_name(*candidate) for candidate in ranked if candidate not in alike and times[candidate] < slowest
    )
    return ScheduleCheck(tuple(taken), tuple(times[candidate] for candidate in taken), rounds, left_out)


def report(check: ScheduleCheck, taken: str, num_layers: int) -> list[str]:
    """The lines of the log. num_layers: visits of an MoE layer of this rank in a step."""
    results = check.results
    best = min(results, key=lambda tried: tried.predicted_ms)
    reference = next(tried for tried in results if tried == best).step_ms
    lines = [
        f" > --moe-schedule-check: {check.rounds} steps each, median of the slowest rank's step; predicted: its "
        f"{num_layers} visits of an MoE layer",
        f" >   {'candidate':16} {'predicted ms':>13} {'measured ms':>12} {'more, predicted':>16} {'measured':>9}",
    ]
    for tried in results:
        more = (tried.predicted_ms - best.predicted_ms) * num_layers
        lines.append(
            f" >   {tried.name:16} {tried.predicted_ms * num_layers:13.2f} {tried.step_ms:12.2f} {more:16.2f} "
            f"{tried.step_ms - reference:9.2f}"
        )
    if check.left_out:
        lines.append(
            f" >   not tried: {', '.join(check.left_out)}, which with this capacity factor may drop other tokens"
        )
    return [*lines, f" >   {taken}"]


class ScheduleTrial:
    """Runs the steps of a check on the real layers, and takes the fastest where it may. Call on all ranks."""

    def __init__(
        self, built: BuiltModel, check: ScheduleCheck | None, ctx: ParallelContext, log: Log, *, adapts: bool
    ) -> None:
        self._built = built
        self._check = check
        self._ctx = ctx
        self._log = log
        self._adapts = adapts
        self._synchronise = device_synchroniser(ctx.device)
        self.record: dict[str, Any] | None = None  # of the last step, for the log; None where nothing was tried

    def run(self, step: Callable[[], T], visits: int) -> T:
        """The result of `step`, a whole training step of `visits` micro-batches, under the candidate whose turn it is.

        After the last one the result is told, and under --moe-schedule-adapt holds from the next step on.
        """
        check, built = self._check, self._built
        self.record = None
        if check is None or check.is_done:
            return step()
        assert built.choice is not None, "a dense model has no schedule to try"
        tried = candidate_name(*check.current)
        built.try_schedule(*check.current)
        transport.barrier(self._ctx.world)
        self._synchronise()
        started = time.perf_counter()
        try:
            result = step()
        finally:
            built.try_schedule(built.choice.schedule, built.choice.chunks)
        self._synchronise()
        elapsed = torch.tensor([(time.perf_counter() - started) * 1000], dtype=torch.float64, device=self._ctx.device)
        check.times_ms.append(transport.max_over(elapsed, self._ctx.world).item())
        self.record = {"tried": tried, "step_ms": check.times_ms[-1]}
        if check.is_done:
            self._decide(check, built.choice, visits * len(built.moe_layers))
        return result

    def _decide(self, check: ScheduleCheck, choice: Choice, visits: int) -> None:
        chosen, best = candidate_name(choice.schedule, choice.chunks), check.results[0]
        if best.name == chosen:
            taken = f"{chosen} is the fastest measured, as predicted; it stays"
        elif self._adapts:
            taken = f"{best.name} is the fastest measured and is taken from the next step on, in place of {chosen}"
            reason = f"{best.step_ms:.2f} ms a step measured by --moe-schedule-check; predicted was {chosen}"
            self._built.use_schedule(best.schedule, best.chunks, reason)
        else:
            taken = f"{best.name} is the fastest measured; {chosen} stays, --moe-schedule-adapt would take {best.name}"
        for line in report(check, taken, visits):
            self._log.say(line)
        assert self.record is not None
        goes_on = self._built.choice
        assert goes_on is not None
        self.record |= {
            "results": [asdict(tried) for tried in check.results],
            "not_tried": list(check.left_out),
            "taken": {"schedule": goes_on.schedule, "chunks": goes_on.chunks},
        }
