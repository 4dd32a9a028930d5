"""Learning rate and weight decay as functions of the number of samples trained on. Floor 5.

Megatron's schedules: a linear warm-up, then one of five shapes down to the smallest rate. Counting in samples keeps the
schedule in place when the batch size changes. A value, not a counter: whoever asks says how many samples the applied
updates have seen, so nothing can be advanced twice after a resume. Known answers: formats C.6.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields

from megatron_parm.errors import CheckpointError, ConfigError

OVERRIDE_FLAG = "--override-opt_param-scheduler"
USE_CHECKPOINT_FLAG = "--use-checkpoint-opt_param-scheduler"

# field of RateSchedule -> the flags that set it, for messages
FLAGS = {
    "max_lr": "--lr",
    "min_lr": "--min-lr",
    "init_lr": "--lr-warmup-init",
    "warmup_samples": "--lr-warmup-iters, --lr-warmup-samples or --lr-warmup-fraction",
    "decay_samples": "--lr-decay-iters or --lr-decay-samples, by default --train-iters or --train-samples",
    "decay_style": "--lr-decay-style",
    "wsd_decay_samples": "--lr-wsd-decay-iters or --lr-wsd-decay-samples",
    "wsd_decay_style": "--lr-wsd-decay-style",
    "start_weight_decay": "--weight-decay or --start-weight-decay",
    "end_weight_decay": "--weight-decay or --end-weight-decay",
    "weight_decay_samples": "--train-iters or --train-samples",
    "weight_decay_style": "--weight-decay-incr-style",
}


def _linear(progress: float) -> float:
    return 1.0 - progress


def _cosine(progress: float) -> float:
    return 0.5 * (math.cos(math.pi * progress) + 1.0)


def _exponential(progress: float) -> float:
    return 2.0 * math.pow(0.5, progress) - 1.0


def _minus_sqrt(progress: float) -> float:
    return 1.0 - math.sqrt(progress)


# share of (max_lr - min_lr) that is left when `progress`, from 0 to 1, of the decay is done
Shape = Callable[[float], float]
DECAY_SHAPES: dict[str, Shape] = {"linear": _linear, "cosine": _cosine}
WSD_SHAPES: dict[str, Shape] = {**DECAY_SHAPES, "exponential": _exponential, "minus_sqrt": _minus_sqrt}
DECAY_STYLES = ("constant", *DECAY_SHAPES, "inverse-square-root", "WSD")
WEIGHT_DECAY_STYLES = ("constant", *DECAY_SHAPES)


@dataclass(frozen=True, kw_only=True)
class RateSchedule:
    """Both schedules of a run; lengths in samples. Raises ConfigError, in the user's flags, for values that cannot
    work.

    The rate rises linearly from `init_lr` to `max_lr` over `warmup_samples`, and has fallen to `min_lr` after
    `decay_samples` (counted from the start). `wsd_decay_samples` is the final part in which style WSD falls.
    """

    max_lr: float
    min_lr: float = 0.0
    init_lr: float = 0.0
    warmup_samples: float = 0
    decay_samples: int
    decay_style: str = "linear"
    wsd_decay_samples: int = 0
    wsd_decay_style: str = "exponential"
    start_weight_decay: float = 0.0
    end_weight_decay: float = 0.0
    weight_decay_samples: int = 0
    weight_decay_style: str = "constant"

    def __post_init__(self) -> None:
        for field, known in (
            ("decay_style", DECAY_STYLES),
            ("wsd_decay_style", tuple(WSD_SHAPES)),
            ("weight_decay_style", WEIGHT_DECAY_STYLES),
        ):
            if getattr(self, field) not in known:
                raise ConfigError(f"{FLAGS[field]} {getattr(self, field)} is not known; use one of {', '.join(known)}")
        for low, high in (
            ("min_lr", "max_lr"),
            ("init_lr", "max_lr"),
            ("start_weight_decay", "end_weight_decay"),
        ):
            self._check_order(low, high)
        if self.decay_style != "constant":
            self._check_lengths()

    def _check_order(self, low: str, high: str) -> None:
        below, above = getattr(self, low), getattr(self, high)
        if not 0 <= below <= above:
            raise ConfigError(
                f"{FLAGS[low]} {below:g} must lie between 0 and {FLAGS[high]} {above:g}; "
                f"lower the one or raise the other"
            )

    def _check_lengths(self) -> None:
        if self.warmup_samples >= self.decay_samples:
            raise ConfigError(
                f"the warm-up of {self.warmup_samples:g} samples ({FLAGS['warmup_samples']}) must be shorter than the "
                f"decay of {self.decay_samples} samples ({FLAGS['decay_samples']}); shorten the warm-up"
            )
        if self.decay_style == "WSD" and not 0 < self.wsd_decay_samples <= self.decay_samples:
            raise ConfigError(
                f"--lr-decay-style WSD falls in a final part of {self.wsd_decay_samples} samples "
                f"({FLAGS['wsd_decay_samples']}); it needs at least 1 and at most the {self.decay_samples} of the decay"
            )

    def learning_rate(self, samples: int) -> float:
        """The rate after updates that have seen `samples` samples."""
        if 0 < self.warmup_samples >= samples:
            return self.init_lr + (self.max_lr - self.init_lr) * samples / self.warmup_samples
        if self.decay_style == "constant":
            return self.max_lr
        if samples > self.decay_samples:
            return self.min_lr
        if self.decay_style == "inverse-square-root":
            return max(self.min_lr, self.max_lr * math.sqrt(max(self.warmup_samples, 1)) / math.sqrt(max(samples, 1)))
        return self.min_lr + self._share_left(samples) * (self.max_lr - self.min_lr)

    def _share_left(self, samples: int) -> float:
        if self.decay_style == "WSD":
            fallen = max(0, samples - (self.decay_samples - self.wsd_decay_samples))
            return WSD_SHAPES[self.wsd_decay_style](fallen / self.wsd_decay_samples)
        decaying = self.decay_samples - self.warmup_samples
        return DECAY_SHAPES[self.decay_style]((samples - self.warmup_samples) / decaying)

    def weight_decay(self, samples: int) -> float:
        """The weight decay after updates that have seen `samples` samples."""
        if self.weight_decay_style == "constant" or samples >= self.weight_decay_samples:
            return self.end_weight_decay
        share_left = DECAY_SHAPES[self.weight_decay_style](samples / self.weight_decay_samples)
        return self.end_weight_decay - share_left * (self.end_weight_decay - self.start_weight_decay)

    def to_state(self) -> dict[str, float | str]:
        """The schedule as JSON values, for a checkpoint."""
        return asdict(self)

    @staticmethod
    def from_state(state: Mapping[str, object]) -> "RateSchedule":
        """The schedule of a checkpoint. Raises CheckpointError if the state is not one."""
        found: dict[str, float | int | str] = {}
        for field in fields(RateSchedule):
            value = state.get(field.name)
            allowed = {float: (int, float), int: (int,), str: (str,)}[field.type]  # type: ignore[index]  # a class here
            if not isinstance(value, allowed) or isinstance(value, bool):
                raise CheckpointError(
                    f"the learning-rate schedule in the checkpoint has {field.name} = {value!r}; expected {field.type}"
                )
            found[field.name] = value
        try:
            return RateSchedule(**found)  # type: ignore[arg-type]  # checked just above
        except ConfigError as error:
            raise CheckpointError(f"the learning-rate schedule in the checkpoint cannot work: {error}") from error

    def _values_in_use(self) -> dict[str, float | str]:
        """The fields that change some rate: others may differ between a checkpoint and the flags."""
        idle = set()
        if self.decay_style == "constant":
            idle |= {"min_lr", "decay_samples"}
        if self.warmup_samples == 0:
            idle |= {"init_lr"}
        if self.decay_style != "WSD":
            idle |= {"wsd_decay_samples", "wsd_decay_style"}
        if self.weight_decay_style == "constant":
            idle |= {"weight_decay_samples"}
        return {field: value for field, value in self.to_state().items() if field not in idle}


def plan_schedule(
    *,
    lr: float,
    global_batch_size: int,
    train_iters: int | None = None,
    train_samples: int | None = None,
    min_lr: float = 0.0,
    lr_decay_style: str = "linear",
    lr_decay_iters: int | None = None,
    lr_decay_samples: int | None = None,
    lr_warmup_fraction: float | None = None,
    lr_warmup_iters: int = 0,
    lr_warmup_samples: int = 0,
    lr_warmup_init: float = 0.0,
    lr_wsd_decay_style: str = "exponential",
    lr_wsd_decay_iters: int | None = None,
    lr_wsd_decay_samples: int | None = None,
    weight_decay: float = 0.01,
    start_weight_decay: float | None = None,
    end_weight_decay: float | None = None,
    weight_decay_incr_style: str = "constant",
) -> RateSchedule:
    """The schedule that these flags ask for: iterations are turned into samples by the global batch size.

    The decay lasts as long as the run unless it has a length of its own. Raises ConfigError.
    """

    def in_samples(iterations: int | None, samples: int | None) -> int:
        return samples or (iterations or 0) * global_batch_size

    run = in_samples(train_iters, train_samples)
    if run == 0:
        raise ConfigError("the run has no length; give --train-iters or --train-samples")
    decay = in_samples(lr_decay_iters, lr_decay_samples) or run
    warmup = lr_warmup_fraction * decay if lr_warmup_fraction else in_samples(lr_warmup_iters, lr_warmup_samples)
    start, end = _weight_decay_ends(weight_decay, start_weight_decay, end_weight_decay, weight_decay_incr_style)
    return RateSchedule(
        max_lr=lr,
        min_lr=min_lr,
        init_lr=lr_warmup_init,
        warmup_samples=warmup,
        decay_samples=decay,
        decay_style=lr_decay_style,
        wsd_decay_samples=in_samples(lr_wsd_decay_iters, lr_wsd_decay_samples),
        wsd_decay_style=lr_wsd_decay_style,
        start_weight_decay=start,
        end_weight_decay=end,
        weight_decay_samples=run,
        weight_decay_style=weight_decay_incr_style,
    )


def _weight_decay_ends(constant: float, start: float | None, end: float | None, style: str) -> tuple[float, float]:
    if style == "constant":
        if start is not None or end is not None:
            raise ConfigError(
                "--start-weight-decay and --end-weight-decay need a --weight-decay-incr-style that is not constant; "
                "use linear or cosine, or give --weight-decay alone"
            )
        return constant, constant
    if start is None or end is None:
        raise ConfigError(
            f"--weight-decay-incr-style {style} needs both --start-weight-decay (given: {start}) and "
            f"--end-weight-decay (given: {end})"
        )
    return start, end


def reconcile(
    asked: RateSchedule, state: Mapping[str, object], *, override: bool, use_checkpoint: bool
) -> RateSchedule:
    """The schedule with which a resumed run goes on: `asked` by its flags, or that of the checkpoint's `state`.

    Without `override` (take the flags) or `use_checkpoint` (take the checkpoint) both must agree in every value that
    changes some rate. Raises ConfigError that names each differing value, CheckpointError for a damaged state.
    """
    if override and use_checkpoint:
        raise ConfigError(f"{OVERRIDE_FLAG} and {USE_CHECKPOINT_FLAG} exclude each other; give one of them")
    if override:
        return asked
    saved = RateSchedule.from_state(state)
    if use_checkpoint:
        return saved
    ours, theirs = asked._values_in_use(), saved._values_in_use()
    differing = [
        f"{field} ({FLAGS[field]}) is {ours[field]} by the flags but {theirs[field]} in the checkpoint"
        for field in ours
        if field in theirs and ours[field] != theirs[field]
    ]
    if differing:
        raise ConfigError(
            f"the checkpoint's learning-rate schedule is not the one that the flags ask for: {'; '.join(differing)}. "
            f"Go on with {OVERRIDE_FLAG} (takes the flags) or {USE_CHECKPOINT_FLAG} (takes the checkpoint)"
        )
    return asked
