"""The orders in which an MoE layer can compute and communicate, one screen each, in the paper's words. Floor 5.

Every schedule takes this rank's tokens `[n, h]`, identical on MP peers, and returns the layer's output `[n, h]`, again
identical on MP peers. Where nothing is dropped all give the same output and the same gradients.
Source: Parm (Pan et al., INFOCOM 2024), sections on S1 and S2; parm.md sections 2 and 3.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from megatron_parm.moe.buckets import Buckets, combine, dispatch
from megatron_parm.moe.routing import Routing
from megatron_parm.moe.steps import (
    ep_all_to_all,
    ep_esp_all_to_all,
    esp_all_gather,
    esp_all_reduce,
    esp_replicate,
    esp_sum,
    mp_all_gather,
    mp_split,
)
from megatron_parm.parallel.context import Axis, ParallelContext


class GateStep(Protocol):
    """Chooses experts and slots for tokens `[n, h]`; see `gate.Gate`."""

    def __call__(
        self,
        tokens: Tensor,
        *,
        shared_over: Axis | None = None,
        segments: Axis | None = None,
        slots_multiple_of: int = 1,
    ) -> Routing:
        """The routing of `tokens`."""


class ExpertStep(Protocol):
    """This rank's part of the experts' outputs; see `experts.Experts`."""

    def __call__(self, inbox: Buckets, *, copies: int = 1) -> Buckets:
        """The outputs, in the layout of `inbox`."""


class MoEBlock(Protocol):
    """What a schedule orders: the gate and this rank's experts."""

    @property
    def gate(self) -> GateStep:
        """Its gate."""

    @property
    def experts(self) -> ExpertStep:
        """Its experts."""


Schedule = Callable[[Tensor, MoEBlock, ParallelContext], Tensor]


def baseline(tokens: Tensor, block: MoEBlock, ctx: ParallelContext) -> Tensor:
    """The order of DeepSpeed-MoE as the paper models it. MP peers hold the same tokens: all is done N_MP times."""
    gathered = esp_all_gather(tokens, ctx)  # [esp*n, h]
    routing = block.gate(gathered, segments=ctx.esp)  # the tokens of each source rank own c slots
    buckets = dispatch(gathered, routing)  # [E, esp*c, h]
    inbox = ep_all_to_all(buckets, ctx)  # [ep, e, esp*c, h]
    partial = block.experts(inbox, copies=ctx.tp.size)  # [ep, e, esp*c, h]  one esp-th of each sum
    summed = esp_all_reduce(partial, ctx)  # [ep, e, esp*c, h]
    buckets = ep_all_to_all(summed, ctx)  # [E, esp*c, h]
    return combine(buckets, routing.of_segment(ctx.esp.rank))  # [n, h]  ESP-Split


def s1(tokens: Tensor, block: MoEBlock, ctx: ParallelContext) -> Tensor:
    """Pause MP before the gate, resume it at the end. Capacity is counted within each MP slice."""
    shard = mp_split(tokens, ctx)  # [n/tp, h]
    routing = block.gate(shard, shared_over=ctx.tp)  # gate weights: gradient summed over tp
    buckets = dispatch(shard, routing)  # [E, c, h]
    outbox = esp_replicate(buckets, ctx)  # [ep*esp, e, c, h]
    inbox = ep_esp_all_to_all(outbox, ctx)  # [ep*esp, e, c, h]
    partial = block.experts(inbox)  # [ep*esp, e, c, h]  one esp-th of each sum
    returned = ep_esp_all_to_all(partial, ctx)  # [ep*esp, e, c, h]
    buckets = esp_sum(returned, ctx)  # [E, c, h]
    shard = combine(buckets, routing)  # [n/tp, h]
    return mp_all_gather(shard, ctx)  # [n, h]


def s2(tokens: Tensor, block: MoEBlock, ctx: ParallelContext) -> Tensor:
    """Pause MP after the gate, resume it before the combine. Routes and drops exactly as the baseline."""
    routing = block.gate(tokens, slots_multiple_of=ctx.tp.size)
    buckets = dispatch(tokens, routing)  # [E, c, h]
    assert isinstance(buckets, Tensor), "s2 cuts slots over MP and so needs a capacity"
    shard = mp_split(buckets, ctx, dim=1)  # [E, c/tp, h]
    outbox = esp_replicate(shard, ctx)  # [ep*esp, e, c/tp, h]
    inbox = ep_esp_all_to_all(outbox, ctx)  # [ep*esp, e, c/tp, h]
    partial = block.experts(inbox)  # [ep*esp, e, c/tp, h]  one esp-th of each sum
    returned = ep_esp_all_to_all(partial, ctx)  # [ep*esp, e, c/tp, h]
    summed = esp_sum(returned, ctx)  # [E, c/tp, h]
    assert isinstance(summed, Tensor)
    buckets = mp_all_gather(summed, ctx, dim=1)  # [E, c, h]
    return combine(buckets, routing)  # [n, h]


SCHEDULES: dict[str, Schedule] = {"baseline": baseline, "s1": s1, "s2": s2}
