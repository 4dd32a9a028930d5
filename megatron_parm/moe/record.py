"""What the MoE layers saw since the last look: balance losses, drops, load, entropy. Floor 5.

Each layer adds one row of sums per micro-batch; nothing is sent until `summarise`, which sums the rows over all ranks
once. A figure that is identical on the ranks of tp is entered as 1/tp of itself, so one sum serves every schedule.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_parm.parallel import transport
from megatron_parm.parallel.context import ParallelContext

_FIGURES = 5  # batches, balance loss, z-loss, entropy, kept choices; the counts follow


@dataclass(frozen=True)
class LayerRouting:
    """The figures of one MoE layer, means over micro-batches and data-parallel ranks; see `RoutingSummary`."""

    layer: int
    load_balancing_loss: float
    z_loss: float
    drop_rate: float
    max_load: float
    router_entropy: float


@dataclass(frozen=True)
class RoutingSummary:
    """Means over MoE layers, micro-batches and data-parallel ranks, the same on every rank.

    load_balancing_loss and z_loss: before their coefficients. drop_rate: dropped choices / choices. max_load: choices
    of the fullest expert / mean of the experts, mean over layers. router_entropy: nats per token. counts: `[layers,
    E]` choices, a row for each of `layers`.
    """

    load_balancing_loss: float
    z_loss: float
    drop_rate: float
    max_load: float
    router_entropy: float
    counts: Tensor
    layers: tuple[LayerRouting, ...]

    def counts_of(self, layer: int) -> Tensor:
        """The choices of each expert of that layer, `[E]`."""
        return self.counts[[one.layer for one in self.layers].index(layer)]


@dataclass(frozen=True)
class MicroBatchFigures:
    """Of one layer and micro-batch, or a part of it. entropy: sum over tokens; kept: choices; counts: `[E]` choices."""

    balance_loss: Tensor
    z_loss: Tensor
    entropy: Tensor
    kept: Tensor
    counts: Tensor


class RoutingRecord:
    """Sums per MoE layer, kept on the device until they are asked for.

    layers, num_experts: every MoE layer of the whole model, by its number, so that pipeline stages agree on the
    table that they sum, whichever of the layers they hold. Without them the layers are those that have added a row.
    """

    def __init__(self, layers: Sequence[int] = (), num_experts: int = 0) -> None:
        self._layers = tuple(layers)
        self._num_experts = num_experts
        self._rows: dict[int, Tensor] = {}
        self._is_paused = False

    def add(self, layer: int, figures: "MicroBatchFigures", *, copies: int, parts: int) -> None:
        """Add a micro-batch of `layer`: identical on `copies` ranks of tp, or cut into `parts` that add up over tp."""
        if self._is_paused:
            return
        sums = [figures.balance_loss, figures.z_loss, figures.entropy, figures.kept]
        row = torch.cat([torch.stack([s.detach().double() for s in sums]), figures.counts.double()]) / copies
        row = torch.cat([row.new_full((1,), 1 / (copies * parts)), row])
        self._rows[layer] = self._rows[layer] + row if layer in self._rows else row

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is added meanwhile: for a forward pass that repeats one already recorded (recomputation)."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def clear(self) -> None:
        """Forget everything."""
        self._rows.clear()

    def summarise(self, ctx: ParallelContext, topk: int) -> RoutingSummary | None:
        """The figures since the last `clear`; None where no MoE layer ran. Call on all ranks of all stages."""
        layers = self._layers or tuple(sorted(self._rows))
        if not layers:
            return None
        empty = torch.zeros(_FIGURES + self._num_experts, dtype=torch.float64, device=ctx.device)
        rows = torch.stack([self._rows.get(layer, empty) for layer in layers])
        rows = transport.sum_over(rows, ctx.world)
        batches, balance, z, entropy, kept = rows[:, :_FIGURES].unbind(1)
        if not batches.any():
            return None
        counts = rows[:, _FIGURES:].round()  # thirds of a choice add up to a whole one only nearly
        choices = counts.sum(1)
        by_layer = torch.stack(
            [
                balance / batches,
                z / batches,
                1 - kept / choices,
                counts.amax(1) / counts.mean(1),
                entropy / (choices / topk),
            ],
            dim=1,
        )
        mean_balance, mean_z, _, mean_load, _ = by_layer.mean(0).tolist()
        return RoutingSummary(
            load_balancing_loss=mean_balance,
            z_loss=mean_z,
            drop_rate=(1 - kept.sum() / choices.sum()).item(),
            max_load=mean_load,
            router_entropy=(entropy.sum() / (choices.sum() / topk)).item(),
            counts=counts,
            layers=tuple(
                LayerRouting(layer, *figures) for layer, figures in zip(layers, by_layer.tolist(), strict=True)
            ),
        )
