"""The orders in which an MoE layer can compute and communicate, one screen each, in the paper's words. Floor 5.

Every schedule takes this rank's tokens `[n, h]`, identical on MP peers, and returns the layer's output `[n, h]`, again
identical on MP peers. Where nothing is dropped all give the same output and the same gradients. Under sequence
parallelism tokens are MP slices `[n/tp, h]` already: S1 and S1H start at the gate and end with the combine.
Source: Parm (Pan et al., INFOCOM 2024), sections on S1 and S2; parm.md sections 2 and 3.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from megatron_parm.moe.buckets import Buckets, announce
from megatron_parm.moe.node_rows import node_collect, node_return, node_send, node_spread, weigh
from megatron_parm.moe.routing import Routing
from megatron_parm.moe.steps import (
    arrived,
    ep_esp_return,
    ep_esp_send,
    ep_return,
    ep_send,
    esp_all_gather,
    esp_collect,
    esp_reduce,
    esp_replicate,
    esp_split,
    esp_spread,
    esp_sum,
    mp_all_gather,
    mp_send,
    mp_slice,
    mp_split,
    pipelined,
)
from megatron_parm.moe.traced import carry, combine, dispatch, settle
from megatron_parm.parallel.context import Axis, ParallelContext


class GateStep(Protocol):
    """Chooses experts and slots for tokens `[n, h]`; see `gate.Gate`."""

    def __call__(
        self,
        tokens: Tensor,
        *,
        shared_over: Axis | None = None,
        segments: Axis | None = None,
        padded: bool = False,
        slots_multiple_of: int = 1,
        chunks: int = 1,
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

    @property
    def sequence_parallel(self) -> bool:
        """Whether the layer's tokens are MP slices before and after it."""


Schedule = Callable[[Tensor, MoEBlock, ParallelContext, int], Tensor]


def baseline(tokens: Tensor, block: MoEBlock, ctx: ParallelContext, chunks: int) -> Tensor:
    """The order of DeepSpeed-MoE as the paper models it. MP peers hold the same tokens: all is done N_MP times."""
    gathered = esp_all_gather(tokens, ctx)  # [esp*n, h]
    routing = block.gate(gathered, segments=ctx.esp, chunks=chunks)  # each source rank's tokens own c slots
    returned = pipelined(
        announce(dispatch(gathered, routing), ctx.ep),  # [E, esp*c, h]
        lambda part: ep_send(part, ctx),  # [ep, e, esp*c, h]
        lambda inbox: esp_reduce(block.experts(arrived(inbox), copies=ctx.tp.size), ctx),  # partial sums, added
        lambda summed: ep_return(arrived(summed), ctx),  # [E, esp*c, h]
        arrived,
    )
    return combine(returned, routing.of_segment(ctx.esp.rank))  # [n, h]  ESP-Split


def deepspeed(tokens: Tensor, block: MoEBlock, ctx: ParallelContext, chunks: int) -> Tensor:
    """What DeepSpeed's code does since 0.14.5, for N_ESP = 1 and N_ESP = N_MP: drop duplicates, gather again."""
    assert ctx.esp.size in (1, ctx.tp.size), "deepspeed knows N_ESP = 1 and N_ESP = N_MP"
    routing = block.gate(tokens, padded=True, slots_multiple_of=ctx.tp.size, chunks=chunks)
    assert routing.slots is not None, "deepspeed drops MP duplicates along the slots and so needs a capacity"
    gathered = pipelined(
        dispatch(tokens, routing),  # [E, c, h]
        lambda part: mp_slice(part, ctx),  # [E, c/tp, h]
        lambda part: ep_send(arrived(part), ctx),  # [ep, e, c/tp, h]
        lambda inbox: esp_spread(arrived(inbox), ctx),  # [esp*ep, e, c/tp, h]
        lambda spread: esp_reduce(block.experts(arrived(spread)), ctx),  # partial sums, added
        lambda summed: ep_return(esp_split(arrived(summed), ctx), ctx),  # [E, c/tp, h]
        lambda returned: mp_send(arrived(returned), ctx),  # [E, c, h]
        arrived,
    )
    return combine(gathered, routing)  # [n, h]


def s1(tokens: Tensor, block: MoEBlock, ctx: ParallelContext, chunks: int) -> Tensor:
    """Pause MP before the gate, resume it at the end. Capacity is counted within each MP slice."""
    shard = tokens if block.sequence_parallel else mp_split(tokens, ctx)  # [n/tp, h]
    routing = block.gate(shard, shared_over=ctx.tp, chunks=chunks)  # gate weights: gradient summed over tp
    returned = pipelined(
        announce(dispatch(shard, routing), ctx.ep_esp),  # [E, c, h]
        lambda part: ep_esp_send(esp_replicate(part, ctx), ctx),  # [ep*esp, e, c, h]
        lambda inbox: ep_esp_return(block.experts(arrived(inbox)), ctx),  # one esp-th of each sum
        lambda partial: esp_sum(arrived(partial), ctx),  # [E, c, h]
    )
    shard = combine(returned, routing)  # [n/tp, h]
    return shard if block.sequence_parallel else mp_all_gather(shard, ctx)  # [n, h]


def s2(tokens: Tensor, block: MoEBlock, ctx: ParallelContext, chunks: int) -> Tensor:
    """Pause MP after the gate, resume it before the combine. Routes and drops exactly as the baseline.

    Its end is SAA: while the AlltoAll of one chunk runs, the chunk before it is gathered among MP peers. Backward has
    the same at its own end, the adjoint of the beginning.
    """
    routing = block.gate(tokens, padded=True, slots_multiple_of=ctx.tp.size, chunks=chunks)
    assert routing.slots is not None, "s2 cuts slots over MP and so needs a capacity"
    gathered = pipelined(
        dispatch(tokens, routing),  # [E, c, h]
        lambda part: mp_slice(part, ctx),  # [E, c/tp, h]
        lambda part: ep_esp_send(esp_replicate(arrived(part), ctx), ctx),  # [ep*esp, e, c/tp, h]
        lambda inbox: ep_esp_return(block.experts(arrived(inbox)), ctx),  # one esp-th of each sum
        lambda partial: mp_send(esp_sum(arrived(partial), ctx), ctx),  # [E, c/tp, h] -> [E, c, h]
        arrived,
    )
    return combine(gathered, routing)  # [n, h]


def s1h(tokens: Tensor, block: MoEBlock, ctx: ParallelContext, chunks: int) -> Tensor:
    """S1 with one copy of each token across nodes: the ESP shards share it inside the node."""
    shard = tokens if block.sequence_parallel else mp_split(tokens, ctx)  # [n/tp, h]
    routing = block.gate(shard, shared_over=ctx.tp, chunks=chunks)  # gate weights: gradient summed over tp
    returned = pipelined(
        announce(dispatch(shard, routing), ctx.ep_esp),  # [E, c, h]
        lambda part: ep_send(part, ctx),  # [ep, e, c, h]
        lambda inbox: esp_spread(arrived(inbox), ctx),  # [esp*ep, e, c, h]
        lambda spread: esp_collect(block.experts(arrived(spread)), ctx),  # partial sums -> [ep, e, c, h]
        lambda summed: ep_return(arrived(summed), ctx),  # [E, c, h]
        arrived,
    )
    shard = combine(returned, routing)  # [n/tp, h]
    return shard if block.sequence_parallel else mp_all_gather(shard, ctx)  # [n, h]


def s2h(tokens: Tensor, block: MoEBlock, ctx: ParallelContext, chunks: int) -> Tensor:
    """S2 with one copy of each token across nodes: the ESP shards share it inside the node."""
    routing = block.gate(tokens, padded=True, slots_multiple_of=ctx.tp.size, chunks=chunks)
    assert routing.slots is not None, "s2 cuts slots over MP and so needs a capacity"
    gathered = pipelined(
        dispatch(tokens, routing),  # [E, c, h]
        lambda part: mp_slice(part, ctx),  # [E, c/tp, h]
        lambda part: ep_send(arrived(part), ctx),  # [ep, e, c/tp, h]
        lambda inbox: esp_spread(arrived(inbox), ctx),  # [esp*ep, e, c/tp, h]
        lambda spread: esp_collect(block.experts(arrived(spread)), ctx),  # partial sums -> [ep, e, c/tp, h]
        lambda summed: ep_return(arrived(summed), ctx),  # [E, c/tp, h]
        lambda returned: mp_send(arrived(returned), ctx),  # [E, c, h]
        arrived,
    )
    return combine(gathered, routing)  # [n, h]


def s1n(tokens: Tensor, block: MoEBlock, ctx: ParallelContext, chunks: int) -> Tensor:
    """S1 with one copy of each token to each node, whatever it has there of experts and their shards.

    A row carries its weights along; the outputs are weighted and added where they are made, so the way back too has
    one row a token and node.
    """
    shard = tokens if block.sequence_parallel else mp_split(tokens, ctx)  # [n/tp, h]
    routing = block.gate(shard, shared_over=ctx.tp)  # gate weights: gradient summed over tp
    returned = pipelined(
        carry(shard, routing, ctx, chunks),  # [r, h + m], r rows for all nodes
        lambda part: node_send(part, ctx),  # the rows for this node, from this place on each
        lambda inbox: node_spread(arrived(inbox), ctx),  # to the experts' owners on the node and all their shards
        lambda spread: node_collect(weigh(block.experts, arrived(spread), ctx), ctx),  # partial sums, added: [., h]
        lambda summed: node_return(arrived(summed), ctx),  # [r, h]
        arrived,
    )
    shard = settle(returned, routing)  # [n/tp, h]
    return shard if block.sequence_parallel else mp_all_gather(shard, ctx)  # [n, h]


SCHEDULES: dict[str, Schedule] = {
    "baseline": baseline,
    "deepspeed": deepspeed,
    "s1": s1,
    "s2": s2,
    "s1h": s1h,
    "s2h": s2h,
    "s1n": s1n,
}

# Under sequence parallelism these take and give MP slices; the others need the tokens of all MP peers.
STARTS_FROM_SLICES = frozenset({"s1", "s1h", "s1n"})
