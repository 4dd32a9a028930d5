"""The gate (router): scores, top-k, capacity, balance losses. Floor 5.

Scores are computed in float32 or more whatever the model's precision, so near-equal probabilities do not collapse into
ties. Source: parm.md sections 1 to 3; Megatron's router flags.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_parm.layers.initialise import Initialiser, attach
from megatron_parm.moe.losses import BackwardScale, attach_loss, load_balancing_loss, z_loss
from megatron_parm.moe.record import MicroBatchFigures, RoutingRecord
from megatron_parm.moe.routing import DropPolicy, Routing, capacity_of, count_values, place
from megatron_parm.parallel import transport
from megatron_parm.parallel.collectives import share
from megatron_parm.parallel.context import Axis
from megatron_parm.parallel.sharding import make_parameter


@dataclass(frozen=True)
class GateSettings:
    """How tokens choose experts.

    capacity_factor and eval_capacity_factor None: dropless. pre_softmax: softmax over all experts before top-k
    instead of over the chosen ones. balance_coefficient None: no balance loss at all; 0: computed for the log only.
    router_dtype: least precision.
    """

    num_experts: int
    topk: int
    capacity_factor: float | None
    eval_capacity_factor: float | None
    min_capacity: int
    drop_policy: DropPolicy
    pads_to_capacity: bool
    pre_softmax: bool
    balance_coefficient: float | None
    z_coefficient: float | None
    router_dtype: torch.dtype


class Gate(nn.Module):
    """Routes `[n, h]` tokens. The weight `[E, h]` is whole on every rank.

    `tp` is the axis whose ranks either hold the same tokens or, under `shared_over`, a slice each.
    """

    def __init__(
        self,
        hidden_size: int,
        settings: GateSettings,
        *,
        layer: int,
        tp: Axis,
        scale: BackwardScale,
        record: RoutingRecord,
        initialiser: Initialiser,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.settings = settings
        self._layer = layer
        self._tp = tp
        self._scale = scale
        self.record = record
        shape = (settings.num_experts, hidden_size)
        self.weight = attach(make_parameter(shape, dtype=dtype, device=device), initialiser)

    def forward(
        self,
        tokens: Tensor,
        *,
        shared_over: Axis | None = None,
        segments: Axis | None = None,
        padded: bool = False,
        slots_multiple_of: int = 1,
        chunks: int = 1,
    ) -> Routing:
        """Route tokens `[n, h]`.

        shared_over: the tokens are this rank's slice over that axis, so the weight's gradient and the counts of the
        balance loss are summed over it. segments: the tokens are those of all ranks of that axis, in axis order; each
        rank's own count alone in the losses. padded, slots_multiple_of, chunks: see
        `place`. In eval mode there are no losses and nothing is recorded.
        """
        num_segments = 1 if segments is None else segments.size
        logits = self._logits(tokens, shared_over, num_segments)  # [n, E]
        expert, weight = self._choose(logits)
        routing = place(
            expert,
            weight,
            self.settings.num_experts,
            self.capacity(tokens.shape[0] // num_segments),
            policy=self.settings.drop_policy,
            segments=num_segments,
            padded=padded or self.settings.pads_to_capacity,
            slots_multiple_of=slots_multiple_of,
            chunks=chunks,
        )
        if not self.training:
            return routing
        own = self._own_part(tokens.shape[0], segments)
        counts = count_values(expert[own], self.settings.num_experts)
        balance, z, probabilities = self._losses(logits[own], counts, shared_over)
        self._note(routing.kept[own], counts, (balance, z), probabilities, shared_over)
        return replace(routing, weight=self._attach(routing.weight, balance, z))

    def capacity(self, num_tokens: int) -> int | None:
        """Slots an expert keeps of `num_tokens` tokens; the evaluation factor applies in eval mode."""
        s = self.settings
        factor = s.capacity_factor if self.training else s.eval_capacity_factor
        return capacity_of(num_tokens, s.num_experts, s.topk, factor, s.min_capacity)

    def _logits(self, tokens: Tensor, shared_over: Axis | None, num_segments: int) -> Tensor:
        weight = self.weight if shared_over is None else share(self.weight, shared_over)
        precision = torch.promote_types(tokens.dtype, self.settings.router_dtype)
        weight = weight.to(precision)
        # one product per segment, so that a rank's tokens score bit for bit as they do on that rank
        scores = [F.linear(segment.to(precision), weight) for segment in tokens.chunk(num_segments)]
        return scores[0] if num_segments == 1 else torch.cat(scores)

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """(expert `[n, k]`, weight `[n, k]`), the best choice first."""
        if self.settings.pre_softmax:
            weight, expert = logits.softmax(dim=-1).topk(self.settings.topk, dim=-1)
            return expert, weight
        best, expert = logits.topk(self.settings.topk, dim=-1)
        return expert, best.softmax(dim=-1)

    @staticmethod
    def _own_part(num_tokens: int, segments: Axis | None) -> slice:
        if segments is None:
            return slice(0, num_tokens)
        part = num_tokens // segments.size
        return slice(segments.rank * part, (segments.rank + 1) * part)

    def _losses(self, logits: Tensor, counts: Tensor, shared_over: Axis | None) -> tuple[Tensor, Tensor, Tensor]:
        """(balance loss, z-loss, probabilities `[n, E]`), of the own tokens; a part of each under `shared_over`."""
        num_tokens = logits.shape[0]
        probabilities = logits.softmax(dim=-1)
        if shared_over is not None:
            num_tokens *= shared_over.size
        balance = z = logits.new_zeros(())
        if self.settings.balance_coefficient is not None:
            if shared_over is not None:
                counts = transport.sum_over(counts, shared_over)
            balance = load_balancing_loss(probabilities, counts, num_tokens, self.settings.topk)
        if self.settings.z_coefficient is not None:
            z = z_loss(logits, num_tokens)
        return balance, z, probabilities

    def _attach(self, weight: Tensor, balance: Tensor, z: Tensor) -> Tensor:
        for coefficient, loss in ((self.settings.balance_coefficient, balance), (self.settings.z_coefficient, z)):
            if coefficient:
                weight = attach_loss(weight, coefficient * loss, self._scale)
        return weight

    @torch.no_grad()
    def _note(
        self,
        kept: Tensor,
        counts: Tensor,
        losses: tuple[Tensor, Tensor],
        probabilities: Tensor,
        shared_over: Axis | None,
    ) -> None:
        entropy = torch.special.entr(probabilities).sum()
        figures = MicroBatchFigures(*losses, entropy=entropy, kept=kept.sum(), counts=counts)
        is_cut = shared_over is not None
        self.record.add(
            self._layer, figures, copies=1 if is_cut else self._tp.size, parts=self._tp.size if is_cut else 1
        )
