"""Rules that tie settings of logs together. Floor 1. See `checks.py`."""

from megatron_parm.config.logs import LoggingConfig
from megatron_parm.errors import ConfigError


def check_logs(logging: LoggingConfig) -> None:
    """Check that the timeline has a step."""
    if logging.trace is not None and logging.profile_step_end <= logging.profile_step_start:
        raise ConfigError(
            f"--trace with --profile-step-start {logging.profile_step_start} and --profile-step-end "
            f"{logging.profile_step_end}: the end must be more than the start; use --profile-step-end "
            f"{logging.profile_step_start + 2}"
        )
