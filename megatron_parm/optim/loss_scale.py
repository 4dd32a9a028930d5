"""The factor that keeps small fp16 gradients from vanishing, and how it follows what happens. Floor 5.

Half precision has no numbers between 0 and 6e-8, so the loss is multiplied before backward and the gradients are
divided after it. A dynamic scale is halved when gradients overflow and doubled when they have not for a while. Source:
Megatron-Core's DynamicGradScaler, with its defaults.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from megatron_parm.errors import CheckpointError

GROWTH, BACKOFF = 2.0, 0.5  # Megatron's; powers of two, so that scaling never rounds


@dataclass(frozen=True)
class ScaleState:
    """The scale, finite steps since it changed or a step overflowed, and overflows still borne before it is lowered."""

    scale: float
    finite_steps: int = 0
    tolerance: int = 0


class LossScale:
    """A constant scale; 1 where there is none."""

    is_dynamic = False

    def __init__(self, scale: float = 1.0) -> None:
        self._state = ScaleState(scale)

    @property
    def value(self) -> float:
        """What the loss of the next step is multiplied by."""
        return self._state.scale

    def update(self, *, is_finite: bool) -> None:
        """A step has ended; `is_finite`: no gradient overflowed on any rank."""

    def is_exhausted(self) -> bool:
        """Whether an overflow now would not be followed by a smaller scale, today or later."""
        return True

    def to_state(self) -> dict[str, float | int]:
        """As JSON values, for a checkpoint."""
        return asdict(self._state)

    def load_state(self, state: Mapping[str, object]) -> None:
        """Go on from `to_state` of a checkpoint. A constant scale stays what the flags say."""


class DynamicLossScale(LossScale):
    """--initial-loss-scale, --min-loss-scale, --loss-scale-window and --hysteresis, as Megatron means them."""

    is_dynamic = True

    def __init__(self, initial: float, minimum: float, window: int, hysteresis: int) -> None:
        super().__init__(initial)
        self._minimum = minimum
        self._window = window
        self._hysteresis = hysteresis
        self._state = ScaleState(initial, 0, hysteresis)

    def update(self, *, is_finite: bool) -> None:
        """Lower the scale at the last overflow that is borne, raise it after a window without one."""
        old = self._state
        if not is_finite:
            tolerance = old.tolerance - 1
            scale = max(old.scale * BACKOFF, self._minimum) if tolerance <= 0 else old.scale
            self._state = ScaleState(scale, 0, tolerance)
        elif old.finite_steps + 1 == self._window:
            self._state = ScaleState(old.scale * GROWTH, 0, self._hysteresis)
        else:
            self._state = ScaleState(old.scale, old.finite_steps + 1, old.tolerance)

    def is_exhausted(self) -> bool:
        """At the minimum, with no overflow left to bear: what is not finite now is no matter of range."""
        return self._state.scale <= self._minimum and self._state.tolerance <= 0

    def load_state(self, state: Mapping[str, object]) -> None:
        """Raises CheckpointError where the state is none of a loss scale."""
        scale, finite_steps, tolerance = (state.get(name) for name in ("scale", "finite_steps", "tolerance"))
        is_scale = isinstance(scale, int | float) and not isinstance(scale, bool) and 0 < scale < float("inf")
        if not is_scale or type(finite_steps) is not int or type(tolerance) is not int:
            raise CheckpointError(f"the loss scale of the checkpoint is {dict(state)!r}; it must have a positive scale")
        assert isinstance(scale, int | float)
        self._state = ScaleState(float(scale), finite_steps, tolerance)
