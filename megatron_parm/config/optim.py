"""Optimizer, learning rate and weight decay. Floor 1."""

# ruff: noqa: RUF009 - flag() is dataclasses.field

from dataclasses import dataclass
from typing import Literal

from megatron_parm.config.fields import flag
from megatron_parm.errors import ConfigError

Optimizer = Literal["adam", "sgd"]
DecayStyle = Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]
WsdDecayStyle = Literal["exponential", "linear", "cosine", "minus_sqrt"]
WeightDecayStyle = Literal["constant", "linear", "cosine"]

_NO_SUCH_OPTIMIZER = "not in this release; use adam or sgd"


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """How weights move. Schedules are counted in samples, whichever unit their flags have."""

    lr: float = flag(help="peak learning rate", at_least=0)
    min_lr: float = flag(0.0, help="learning rate at the end of the decay", at_least=0)
    optimizer: Optimizer = flag(
        "adam",
        help="adam (with decoupled weight decay) or sgd",
        refused={"muon": _NO_SUCH_OPTIMIZER, "lion": _NO_SUCH_OPTIMIZER},
    )
    lr_decay_style: DecayStyle = flag("linear", help="shape of the learning rate after the warm-up")
    lr_decay_iters: int | None = flag(
        None, help="end of the decay", unit="iterations", at_least=1, none_means="--train-iters"
    )
    lr_decay_samples: int | None = flag(
        None, help="end of the decay", unit="samples", at_least=1, none_means="--train-samples"
    )
    lr_warmup_fraction: float | None = flag(
        None, help="length of the warm-up", unit="fraction of the decay length", at_least=0, below=1
    )
    lr_warmup_iters: int = flag(0, help="length of the warm-up", unit="iterations", at_least=0)
    lr_warmup_samples: int = flag(0, help="length of the warm-up", unit="samples", at_least=0)
    lr_warmup_init: float = flag(0.0, help="learning rate at the start of the warm-up", at_least=0)
    lr_wsd_decay_style: WsdDecayStyle = flag("exponential", help="shape of the final part of --lr-decay-style WSD")
    lr_wsd_decay_iters: int | None = flag(
        None, help="length of the final part of --lr-decay-style WSD", unit="iterations", at_least=1
    )
    lr_wsd_decay_samples: int | None = flag(
        None, help="length of the final part of --lr-decay-style WSD", unit="samples", at_least=1
    )
    weight_decay: float = flag(0.01, help="weight decay (none on biases and norms)", at_least=0)
    start_weight_decay: float | None = flag(None, help="weight decay at the start, if it changes", at_least=0)
    end_weight_decay: float | None = flag(None, help="weight decay at the end, if it changes", at_least=0)
    weight_decay_incr_style: WeightDecayStyle = flag("constant", help="how weight decay changes")
    clip_grad: float = flag(1.0, help="largest norm of all gradients together", zero_means="no clipping", at_least=0)
    adam_beta1: float = flag(0.9, help="decay of Adam's first moment", at_least=0, below=1)
    adam_beta2: float = flag(0.999, help="decay of Adam's second moment", at_least=0, below=1)
    adam_eps: float = flag(1e-8, help="added to the root of Adam's second moment", above=0)
    sgd_momentum: float = flag(0.9, help="momentum of sgd", at_least=0, below=1)
    freeze: tuple[str, ...] = flag(
        (), help="parameters that stay as they are: patterns over their names, * for any text (docs/finetuning.md)"
    )
    lr_factor: tuple[str, ...] = flag(
        (), help="PATTERN=F: the learning rate of those parameters is F times the others'; the last that matches counts"
    )
    layer_lr_decay: float = flag(
        1.0, help="learning rate of a layer over that of the layer above it; the head has the full one", above=0
    )
    override_opt_param_scheduler: bool = flag(
        False,
        help="on resume, take the schedules from the flags",
        spelling="--override-opt_param-scheduler",
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        False,
        help="on resume, take the schedules from the checkpoint",
        spelling="--use-checkpoint-opt_param-scheduler",
    )

    @property
    def rate_factors(self) -> tuple[tuple[str, float], ...]:
        """`lr_factor` as (pattern, factor). Raises ConfigError."""
        return tuple(_rate_factor(word) for word in self.lr_factor)


def _rate_factor(word: str) -> tuple[str, float]:
    pattern, _, text = word.rpartition("=")
    try:
        factor = float(text)
    except ValueError:
        factor = -1.0
    if not pattern or not 0 <= factor < float("inf"):
        raise ConfigError(
            f"--lr-factor {word}: expected PATTERN=F with a number F from 0 on, for instance 'embedding.*=0.1'"
        )
    return pattern, factor
