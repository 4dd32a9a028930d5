"""What the MoE layers saw since the last look: balance losses, drops, load, entropy. Floor 5.

Each layer adds one row of sums per micro-batch; nothing is sent until `summarise`, which sums the rows over the stage
once. A figure that is identical on the ranks of tp is entered as 1/tp of itself, so one sum serves every schedule.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_parm.parallel import transport
from megatron_parm.parallel.context import ParallelContext


@dataclass(frozen=True)
class RoutingSummary:
    """Means over MoE layers, micro-batches and data-parallel ranks, the same on every rank of the stage.

    load_balancing_loss and z_loss: before their coefficients. drop_rate: dropped choices / choices. max_load: choices
    of the fullest expert / mean of the experts, mean over layers. router_entropy: nats per token. counts: `[layers,
    E]`.
    """

    load_balancing_loss: float
    z_loss: float
    drop_rate: float
    max_load: float
    router_entropy: float
    counts: Tensor


@dataclass(frozen=True)
class MicroBatchFigures:
    """Of one layer and micro-batch, or a part of it. entropy: sum over tokens; kept: choices; counts: `[E]` choices."""

    balance_loss: Tensor
    z_loss: Tensor
    entropy: Tensor
    kept: Tensor
    counts: Tensor


class RoutingRecord:
    """Sums per MoE layer, kept on the device until they are asked for."""

    def __init__(self) -> None:
        self._rows: dict[int, Tensor] = {}

    def add(self, layer: int, figures: "MicroBatchFigures", *, copies: int, parts: int) -> None:
        """Add a micro-batch of `layer`: identical on `copies` ranks of tp, or cut into `parts` that add up over tp."""
        sums = [figures.balance_loss, figures.z_loss, figures.entropy, figures.kept]
        row = torch.cat([torch.stack([s.detach().double() for s in sums]), figures.counts.double()]) / copies
        row = torch.cat([row.new_full((1,), 1 / (copies * parts)), row])
        self._rows[layer] = self._rows[layer] + row if layer in self._rows else row

    def clear(self) -> None:
        """Forget everything."""
        self._rows.clear()

    def summarise(self, ctx: ParallelContext, topk: int) -> RoutingSummary | None:
        """The figures since the last `clear`; None where no MoE layer ran. Call on all ranks of the stage."""
        if not self._rows:
            return None
        rows = torch.stack([self._rows[layer] for layer in sorted(self._rows)])
        rows = transport.sum_over(rows, ctx.stage)
        batches, balance, z, entropy, kept = rows[:, :5].unbind(1)
        counts = rows[:, 5:]
        choices = counts.sum(1)
        return RoutingSummary(
            load_balancing_loss=(balance / batches).mean().item(),
            z_loss=(z / batches).mean().item(),
            drop_rate=(1 - kept.sum() / choices.sum()).item(),
            max_load=(counts.amax(1) / counts.mean(1)).mean().item(),
            router_entropy=(entropy.sum() / (choices.sum() / topk)).item(),
            counts=counts,
        )
