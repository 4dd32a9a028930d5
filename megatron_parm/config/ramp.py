"""A global batch that grows with the samples consumed: `--rampup-batch-size start increment samples`. Floor 1.

Source: Megatron-LM's RampupBatchsizeNumMicroBatchesCalculator: the growth is cut into equal stretches of samples, one
for each increment, and the size of a step is fixed by the samples consumed before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_parm.errors import ConfigError

FLAG = "--rampup-batch-size"


@dataclass(frozen=True)
class RampUp:
    """From `start` sequences in steps of `increment` to `full`, over the first `samples` samples of the run."""

    start: int
    increment: int
    samples: int
    full: int

    @staticmethod
    def of(words: Sequence[str], full: int) -> "RampUp | None":
        """From the words of the flag; None without any. Raises ConfigError."""
        if not words:
            return None
        try:
            start, increment, samples = (int(word) for word in words)
        except ValueError:
            raise ConfigError(
                f"{FLAG} {' '.join(words)}: three whole numbers are expected, the batch size at the start, its "
                f"increment and the samples over which it grows; for instance {FLAG} 16 8 300000"
            ) from None
        ramp = RampUp(start, increment, samples, full)
        ramp._check()
        return ramp

    def _check(self) -> None:
        given = f"{FLAG} {self.start} {self.increment} {self.samples} to --global-batch-size {self.full}"
        if self.start < 1 or self.increment < 1 or self.samples < 1:
            raise ConfigError(f"{given}: start, increment and samples must each be at least 1")
        if self.start >= self.full:
            raise ConfigError(f"{given}: the start must be less than the full batch; leave {FLAG} out")
        growth = self.full - self.start
        if growth % self.increment:
            below = growth // self.increment * self.increment
            working = " or ".join(str(self.start + size) for size in (below, below + self.increment) if size)
            raise ConfigError(
                f"{given}: the growth of {growth} must be a multiple of the increment; use --global-batch-size "
                f"{working}, or an increment of {max(d for d in range(1, self.increment) if growth % d == 0)}"
            )

    @property
    def sizes(self) -> list[int]:
        """Every global batch size of the run, in order."""
        return list(range(self.start, self.full + 1, self.increment))

    def size_at(self, consumed_samples: int) -> int:
        """Sequences in the step that starts after `consumed_samples`."""
        if consumed_samples > self.samples:
            return self.full
        increments = len(self.sizes) - 1
        reached = consumed_samples * increments // self.samples
        return min(self.start + reached * self.increment, self.full)

    def iterations(self, num_samples: int) -> int:
        """Steps of a run of `num_samples` samples; an incomplete last step is not made."""
        steps = consumed = 0
        while consumed <= self.samples:
            size = self.size_at(consumed)
            if consumed + size > num_samples:
                return steps
            consumed, steps = consumed + size, steps + 1
        return steps + (num_samples - consumed) // self.full

    def samples_of(self, iterations: int, consumed_samples: int) -> int:
        """Samples that the next `iterations` steps take after `consumed_samples`."""
        consumed = consumed_samples
        while iterations > 0 and consumed <= self.samples:
            consumed, iterations = consumed + self.size_at(consumed), iterations - 1
        return consumed - consumed_samples + iterations * self.full
