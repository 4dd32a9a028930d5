"""Saving and loading. Floor 1. The format itself is checkpoint/."""

# ruff: noqa: RUF009 - flag() is dataclasses.field

from dataclasses import dataclass
from typing import Literal

from megatron_parm.config.fields import flag

Resume = Literal["strict", "auto"]
Verification = Literal["size", "full"]


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Where checkpoints go and what of them is used."""

    save: str | None = flag(None, help="folder for checkpoints", none_means="nothing is saved")
    load: str | None = flag(None, help="folder to resume from; may equal --save", none_means="a fresh start")
    save_interval: int | None = flag(
        None,
        help="training between two checkpoints",
        unit="iterations",
        at_least=1,
        none_means="only when the run ends",
    )
    no_save_optim: bool = flag(False, help="leave the optimizer out of checkpoints")
    no_save_rng: bool = flag(False, help="leave random states out of checkpoints")
    no_load_optim: bool = flag(False, help="load weights without the optimizer")
    no_load_rng: bool = flag(False, help="load without random states")
    finetune: bool = flag(False, help="load weights only and start at iteration 0")
    ckpt_step: int | None = flag(
        None, help="iteration of --load to take", unit="iteration", at_least=0, none_means="the latest"
    )
    resume: Resume = flag(
        "strict", help="a bad checkpoint stops the run (strict), or the newest verified one is taken (auto)"
    )
    verify_checkpoint: Verification = flag(
        "full", help="check file sizes only, or every file's SHA-256 too, before loading"
    )
    exit_on_missing_checkpoint: bool = flag(False, help="stop if --load has no checkpoint, even where it equals --save")

    @property
    def loads_optimizer(self) -> bool:
        """True if a resume takes optimizer state and schedules."""
        return not (self.no_load_optim or self.finetune)

    @property
    def loads_random_states(self) -> bool:
        """True if a resume takes random states."""
        return not (self.no_load_rng or self.finetune)
