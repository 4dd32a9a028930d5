"""How many micro-batches make up a step. Floor 6."""

from dataclasses import dataclass

from megatron_parm.config.ramp import RampUp
from megatron_parm.errors import ConfigError


@dataclass(frozen=True)
class BatchPlan:
    """The global batch of every step, cut into micro-batches of `micro_batch_size` sequences on each dp rank.

    With `ramp` the batch grows to `global_batch_size`; every size on the way must be cut evenly, too.

    Raises ConfigError, in the user's flags, for sizes that do not fit.
    """

    global_batch_size: int
    micro_batch_size: int
    data_parallel_size: int
    ramp: RampUp | None = None

    def __post_init__(self) -> None:
        for flag, size in (
            ("--micro-batch-size", self.micro_batch_size),
            ("--global-batch-size", self.global_batch_size),
        ):
            if size < 1:
                raise ConfigError(f"{flag} {size} must be at least 1 sequence")
        at_once = self.sequences_at_once
        if self.global_batch_size % at_once:
            below = self.global_batch_size // at_once * at_once
            working = " or ".join(str(size) for size in (below, below + at_once) if size)
            raise ConfigError(
                f"--global-batch-size {self.global_batch_size} must be a multiple of --micro-batch-size "
                f"{self.micro_batch_size} x {self.data_parallel_size} data-parallel ranks = {at_once}; "
                f"use --global-batch-size {working}{self._working_micro_batch()}"
            )

    @staticmethod
    def of(
        global_batch_size: int, micro_batch_size: int, data_parallel_size: int, ramp: RampUp | None = None
    ) -> "BatchPlan":
        """The plan for these flags; --global-batch-size 0 (not given) makes a step one micro-batch on every dp rank."""
        size = global_batch_size or micro_batch_size * data_parallel_size
        return BatchPlan(size, micro_batch_size, data_parallel_size, ramp)

    @property
    def sequences_at_once(self) -> int:
        """Sequences that all dp ranks together take in one micro-batch."""
        return self.micro_batch_size * self.data_parallel_size

    def global_batch_size_at(self, consumed_samples: int) -> int:
        """Sequences in the step that starts after `consumed_samples`."""
        return self.global_batch_size if self.ramp is None else self.ramp.size_at(consumed_samples)

    def num_micro_batches_at(self, consumed_samples: int) -> int:
        """Micro-batches on each dp rank in the step that starts after `consumed_samples`."""
        return self.global_batch_size_at(consumed_samples) // self.sequences_at_once

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches on each dp rank in a step of the full global batch."""
        return self.global_batch_size // self.sequences_at_once

    def samples_of(self, iterations: int, consumed_samples: int) -> int:
        """Samples that the next `iterations` steps take after `consumed_samples`."""
        if self.ramp is None:
            return iterations * self.global_batch_size
        return self.ramp.samples_of(iterations, consumed_samples)

    def _working_micro_batch(self) -> str:
        """A smaller micro-batch that would fit this global batch, as the end of a sentence."""
        share, rest = divmod(self.global_batch_size, self.data_parallel_size)
        if rest or share < 1:
            return ""
        fitting = max(size for size in range(1, self.micro_batch_size + 1) if share % size == 0)
        return f", or --micro-batch-size {fitting}"
