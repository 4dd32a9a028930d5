"""Batches, length of the run, evaluation, precision. Floor 1."""

# ruff: noqa: RUF009 - flag() is dataclasses.field

from dataclasses import dataclass
from typing import Literal

from megatron_parm.config.fields import flag

Precision = Literal["fp32", "fp16", "bf16", "fp64"]


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """One training run."""

    micro_batch_size: int = flag(help="samples a rank processes at once", unit="samples", at_least=1)
    global_batch_size: int = flag(
        0,
        help="samples of one optimizer step, over all ranks",
        unit="samples",
        at_least=0,
        zero_means="micro-batch size x data-parallel size",
    )
    rampup_batch_size: tuple[str, ...] = flag(
        (), help="let the global batch grow: its size at the start, the increment, the samples over which it grows"
    )
    train_iters: int | None = flag(None, help="length of the run", unit="iterations", at_least=1)
    train_samples: int | None = flag(None, help="length of the run", unit="samples", at_least=1)
    exit_interval: int | None = flag(
        None, help="save and exit at a multiple of this", unit="iterations", at_least=1, none_means="off"
    )
    exit_duration_in_mins: float | None = flag(
        None, help="save and exit after this time", unit="minutes", above=0, none_means="off"
    )
    exit_signal_handler: bool = flag(False, help="save and exit on SIGTERM")
    eval_iters: int = flag(100, help="batches of one evaluation", unit="iterations", zero_means="none", at_least=0)
    eval_interval: int = flag(1000, help="training between two evaluations", unit="iterations", at_least=1)
    skip_train: bool = flag(False, help="evaluate only")
    seed: int = flag(1234, help="seed of weights, dropout and data order", at_least=0)
    precision: Precision = flag(
        "fp32",
        help="arithmetic of the model; fp16 and bf16 keep fp32 master weights, fp64 is for checks",
    )
    compile: bool = flag(False, help="compile norms and activations with torch.compile; the first steps take longer")
    fp32_residual_connection: bool = flag(
        False, help="with 16-bit precision: keep the residual stream, and the input of every norm, in fp32"
    )
    attention_softmax_in_fp32: bool = flag(
        False, help="with 16-bit precision: compute attention from scores to weighted values in fp32, in every kernel"
    )
    deterministic_mode: bool = flag(False, help="only deterministic kernels; slower")
    calculate_per_token_loss: bool = flag(
        False, help="weigh every counted token of a global batch alike, not every micro-batch"
    )
    no_check_for_nan_in_loss_and_grad: bool = flag(False, help="go on when the loss or a gradient is not finite")

    @property
    def checks_for_nan(self) -> bool:
        """True if a loss or gradient that is not finite stops the run."""
        return not self.no_check_for_nan_in_loss_and_grad
