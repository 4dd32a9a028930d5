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
    async_save: bool = flag(
        False, help="write checkpoints beside training; a failed write stops the run at the next step"
    )
    save_keep_last: int | None = flag(
        None,
        help="newest whole checkpoints of --save that stay; older ones are deleted",
        unit="checkpoints",
        at_least=2,
        none_means="all stay, or 2 with --save-retain-interval",
    )
    save_retain_interval: int | None = flag(
        None,
        help="checkpoints at a multiple of it stay; of the others the newest --save-keep-last",
        unit="iterations",
        at_least=1,
        none_means="no such exception",
    )
    no_save_optim: bool = flag(False, help="leave the optimizer out of checkpoints")
    no_save_rng: bool = flag(False, help="leave random states out of checkpoints")
    no_load_optim: bool = flag(False, help="load weights without the optimizer")
    no_load_rng: bool = flag(False, help="load without random states")
    pretrained_checkpoint: str | None = flag(
        None,
        help="folder whose weights a first start takes, as --load with --finetune does: checkpoints or a folder of "
        "Hugging Face; a resume goes on from --load",
        none_means="random weights",
    )
    use_checkpoint_args: bool = flag(
        False, help="take the model's flags that are not given from the checkpoint of --load or --pretrained-checkpoint"
    )
    use_mp_args_from_checkpoint_args: bool = flag(
        False, help="of --use-checkpoint-args: take the tensor and pipeline sizes too"
    )
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
