"""The scale of the loss under fp16. Floor 1."""

from dataclasses import dataclass

from megatron_parm.config.fields import flag


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig:
    """Only --fp16 needs one: bf16 has the range of fp32."""

    loss_scale: float | None = flag(None, help="constant loss scale of --fp16", above=0, none_means="a dynamic one")
    initial_loss_scale: float = flag(2.0**32, help="first value of the dynamic loss scale", above=0)
    min_loss_scale: float = flag(1.0, help="least value of the dynamic loss scale", above=0)
    loss_scale_window: int = flag(
        1000, help="steps without overflow after which the loss scale doubles", unit="iterations", at_least=1
    )
    hysteresis: int = flag(2, help="overflows after which the loss scale is halved", unit="iterations", at_least=1)
