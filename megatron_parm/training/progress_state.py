"""How far a run has come: the counters that a checkpoint carries. Floor 7."""

from dataclasses import asdict, dataclass
from typing import Any

from megatron_parm.errors import CheckpointError


@dataclass
class RunProgress:
    """iteration: steps done, skipped ones included. scheduled_samples: those of steps that made an update."""

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    scheduled_samples: int = 0
    skipped: int = 0

    def to_state(self) -> dict[str, int]:
        """As JSON values."""
        return asdict(self)

    @staticmethod
    def from_state(state: dict[str, Any]) -> "RunProgress":
        """The progress of a checkpoint. Raises CheckpointError if a counter is missing or no count."""
        progress = RunProgress()
        for name in asdict(progress):
            value = state.get(name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise CheckpointError(f"the checkpoint's counter {name} is {value!r}; it must be a count")
            setattr(progress, name, value)
        return progress
