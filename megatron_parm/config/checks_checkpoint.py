"""Rules for saving and loading. Floor 1."""

from megatron_parm.config.checkpoint import CheckpointConfig
from megatron_parm.errors import ConfigError


def check_checkpoint(checkpoint: CheckpointConfig) -> None:
    """Check that what is asked of checkpoints has a folder. Raises ConfigError."""
    for flag, is_given in (
        ("--ckpt-step", checkpoint.ckpt_step is not None),
        ("--finetune", checkpoint.finetune),
        ("--exit-on-missing-checkpoint", checkpoint.exit_on_missing_checkpoint),
    ):
        if is_given and checkpoint.load is None:
            raise ConfigError(f"{flag} needs --load DIR: there is no checkpoint to take")
    if checkpoint.use_checkpoint_args and checkpoint.load is None and checkpoint.pretrained_checkpoint is None:
        raise ConfigError("--use-checkpoint-args needs --load DIR: there is no checkpoint to take the flags from")
    if checkpoint.use_mp_args_from_checkpoint_args and not checkpoint.use_checkpoint_args:
        raise ConfigError("--use-mp-args-from-checkpoint-args needs --use-checkpoint-args")


def checkpoint_remarks(checkpoint: CheckpointConfig) -> list[str]:
    """Settings that are allowed and do nothing, or less than one may think, each in one line."""
    found = []
    if checkpoint.save is not None and checkpoint.save_interval is None:
        found.append("--save without --save-interval: a checkpoint is written only when the run ends")
    for flag, is_given in (
        ("--save-interval", checkpoint.save_interval is not None),
        ("--async-save", checkpoint.async_save),
        ("--save-keep-last", checkpoint.save_keep_last is not None),
        ("--save-retain-interval", checkpoint.save_retain_interval is not None),
    ):
        if is_given and checkpoint.save is None:
            found.append(f"{flag}: no effect without --save")
    return found
