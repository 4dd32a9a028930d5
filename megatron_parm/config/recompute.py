"""Which activations run again in backward instead of being kept. Floor 1. Names: Megatron-Core's."""

# ruff: noqa: RUF009 - flag() is dataclasses.field

from dataclasses import dataclass
from typing import Literal

from megatron_parm.config.fields import flag

Granularity = Literal["selective", "full"]
Method = Literal["uniform", "block"]

MODULES = ("core_attn", "layernorm", "mlp", "moe", "shared_experts")


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """Memory for time, with bitwise the same results."""

    recompute_granularity: Granularity | None = flag(
        None, help="run parts of a layer (selective) or whole layers (full) again in backward", none_means="keep all"
    )
    recompute_method: Method | None = flag(
        None,
        help="with full: groups of --recompute-num-layers layers (uniform), or each of a stage's first ones (block)",
        none_means="uniform",
    )
    recompute_num_layers: int | None = flag(
        None, help="with full: layers of a group (uniform) or of a stage (block)", at_least=1, none_means="1"
    )
    recompute_modules: tuple[str, ...] = flag(
        (),
        help="with selective: any of core_attn, layernorm, mlp, moe (experts, without their communication) and "
        "shared_experts",
        none_means="core_attn",
    )

    @property
    def is_full(self) -> bool:
        """True if whole layers run again."""
        return self.recompute_granularity == "full"

    @property
    def modules(self) -> tuple[str, ...]:
        """The parts of a layer that run again. Naming parts asks for selective recomputation."""
        if self.is_full:
            return ()
        default = ("core_attn",) if self.recompute_granularity == "selective" else ()
        return self.recompute_modules or default
