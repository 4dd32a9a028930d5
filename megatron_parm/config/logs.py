"""What a run tells about itself. Floor 1."""

# ruff: noqa: RUF009 - flag() is dataclasses.field

from dataclasses import dataclass
from typing import Literal

from megatron_parm.config.fields import flag

ProgressBar = Literal["auto", "on", "off"]


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Console, JSON lines and TensorBoard."""

    log_interval: int = flag(100, help="training between two log lines", unit="iterations", at_least=1)
    tensorboard_dir: str | None = flag(None, help="folder for TensorBoard", none_means="off")
    log_json: str | None = flag(None, help="file for one JSON object a line", none_means="off")
    log_throughput: bool = flag(False, help="add TFLOP/s per rank to the console line")
    log_params_norm: bool = flag(False, help="log the norm of all weights")
    log_num_zeros_in_grad: bool = flag(False, help="log how many gradient entries are zero")
    log_validation_ppl_to_tensorboard: bool = flag(False, help="add validation perplexity to TensorBoard")
    progress_bar: ProgressBar = flag("auto", help="progress bar; auto: only on a terminal")
