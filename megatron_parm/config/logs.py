"""What a run tells about itself. Floor 1."""

# ruff: noqa: RUF009 - flag() is dataclasses.field

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_parm.config.fields import flag
from megatron_parm.errors import ConfigError

TimingOption = Literal["max", "minmax", "all"]
ProgressBar = Literal["auto", "on", "off"]


def _read_ranks(words: Sequence[str]) -> tuple[str, ...]:
    if not all(word.isdecimal() for word in words):
        raise ConfigError(f"--profile-ranks {' '.join(words)}: expected ranks, whole numbers from 0 on")
    return tuple(str(int(word)) for word in words)


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Console, JSON lines, TensorBoard, wandb and timeline."""

    log_interval: int = flag(100, help="training between two log lines", unit="iterations", at_least=1)
    tensorboard_dir: str | None = flag(None, help="folder for TensorBoard", none_means="off")
    log_json: str | None = flag(None, help="file for one JSON object a line", none_means="off")
    log_throughput: bool = flag(False, help="add TFLOP/s per rank to the console line")
    log_params_norm: bool = flag(False, help="log the norm of all weights")
    log_num_zeros_in_grad: bool = flag(False, help="log how many gradient entries are zero")
    log_validation_ppl_to_tensorboard: bool = flag(False, help="add validation perplexity to TensorBoard")
    timing_log_level: int = flag(
        0,
        help="timers at every log line; 1: the parts of a step, 2: their parts too",
        zero_means="none",
        at_least=0,
        at_most=2,
    )
    timing_log_option: TimingOption = flag("minmax", help="of the timers: the slowest rank, the fastest too, or all")
    no_barrier_with_level_1_timing: bool = flag(False, help="let a timer count what a rank waits for the others")
    log_timers_to_tensorboard: bool = flag(False, help="add the timers to TensorBoard and wandb")
    wandb_project: str | None = flag(None, help="project for Weights & Biases (pip install wandb)", none_means="off")
    wandb_entity: str | None = flag(None, help="of --wandb-project: the team", none_means="your own")
    wandb_exp_name: str | None = flag(None, help="of --wandb-project: name of the run", none_means="one of wandb's")
    wandb_save_dir: str | None = flag(
        None, help="of --wandb-project: folder for wandb's files", none_means="a folder wandb/ in --save, or here"
    )
    progress_bar: ProgressBar = flag("auto", help="progress bar; auto: only on a terminal")
    trace: str | None = flag(
        None, help="file for a timeline of some steps, Chrome trace JSON that Perfetto opens", none_means="off"
    )
    profile_step_start: int = flag(
        10, help="the timeline begins when so many iterations are done", unit="iterations", at_least=0
    )
    profile_step_end: int = flag(
        12, help="the timeline ends when so many iterations are done", unit="iterations", at_least=1
    )
    profile_ranks: tuple[str, ...] = flag((), help="ranks in the timeline", none_means="all", read=_read_ranks)

    @property
    def traced_ranks(self) -> tuple[int, ...] | None:
        """The ranks of the timeline; None: all."""
        return tuple(map(int, self.profile_ranks)) or None
