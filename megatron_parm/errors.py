"""The errors that a user can meet. Floor 0.

Each message says what is wrong in the user's words, the values, the rule and what to do. An entrance turns such an
error into that message and `exit_code`, without a traceback.
"""


class MegatronParmError(ValueError):
    """Base of the errors that are reported to the user as a message."""

    exit_code = 2


class ConfigError(MegatronParmError):
    """A flag, or a combination of flags, that cannot work."""


class LayoutError(ConfigError):
    """Parallel sizes that do not fit the ranks, or ranks that disagree about the run."""


class DataError(MegatronParmError):
    """A data or tokenizer file that is missing, damaged or unsuitable."""


class CheckpointError(MegatronParmError):
    """A checkpoint that is incomplete, damaged or of another model."""

    exit_code = 21


class CheckpointStorageError(CheckpointError):
    """The disk refused: full, read-only, an I/O error. The checkpoints that exist are not to blame."""

    exit_code = 1


class UntrustedCheckpointError(CheckpointError):
    """A checkpoint that could run foreign code or reach outside its folder."""


class NonFiniteError(MegatronParmError):
    """The loss or a gradient is NaN or infinite."""

    exit_code = 24


class CorruptionError(MegatronParmError):
    """Replicas of a weight that must be equal are not: memory or a processor is suspected."""

    exit_code = 25
