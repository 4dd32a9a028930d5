"""The gate (router): scores, choice, capacity, balance losses. Floor 5.

Scores are computed in float32 or more whatever the model's precision, so near-equal probabilities do not collapse into
ties. Source: parm.md sections 1 to 3; Megatron's router flags.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_parm.layers.initialise import Initialiser, attach
from megatron_parm.moe.losses import (
    BackwardScale,
    attach_loss,
    load_balancing_loss,
    sequence_balancing_loss,
    z_loss,
)
from megatron_parm.moe.record import MicroBatchFigures, RoutingRecord
from megatron_parm.moe.routing import DropPolicy, Routing, capacity_of, count_values, place
from megatron_parm.moe.selection import (
    ScoreFunction,
    SelectionRules,
    balanced_experts,
    probabilities_of,
    select,
    select_by_sinkhorn,
    sinkhorn,
    weigh,
)
from megatron_parm.parallel import transport
from megatron_parm.parallel.collectives import share
from megatron_parm.parallel.context import Axis
from megatron_parm.parallel.sharding import make_parameter, make_state

Balancing = Literal["aux_loss", "seq_aux_loss", "sinkhorn", "none"]


@dataclass(frozen=True)
class GateSettings:
    """How tokens choose experts.

    capacity_factor and eval_capacity_factor None: dropless. pre_softmax: softmax over all experts before top-k
    instead of over the chosen ones. balance_coefficient None: no balance loss at all; 0: computed for the log only.
    router_dtype: least precision. balancing: whether that loss is of the micro-batch or of each sequence; sinkhorn
    chooses evenly instead, and has no loss. jitter: in training the router sees its input times a random number within
    that distance of 1. has_expert_bias: a bias moves the choice, see `moe/balance.py`. forces_balance: experts by
    turns, whatever the scores (for measurements).
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
    balancing: Balancing = "aux_loss"
    score_function: ScoreFunction = "softmax"
    num_groups: int | None = None
    group_topk: int | None = None
    scaling: float | None = None
    jitter: float | None = None
    has_expert_bias: bool = False
    forces_balance: bool = False

    @property
    def selection(self) -> SelectionRules:
        """The rules of the choice."""
        return SelectionRules(
            self.topk, self.score_function, self.pre_softmax, self.num_groups, self.group_topk, self.scaling
        )

    @property
    def counts_choices(self) -> bool:
        """Whether the balance loss counts the choices made; else the top-k of the plain scores, without bias or groups.

        Source: DeepSeek-V3's f_i; Megatron counts the same.
        """
        return self.forces_balance or not (self.has_expert_bias or self.num_groups)


@dataclass(frozen=True)
class _Part:
    """Which tokens of the micro-batch those at hand are: `count` of them from number `first` on, of `whole` in all.

    all_text: bool `[whole]`, False for padding; None where all is text.
    """

    count: int
    first: int
    whole: int
    all_text: Tensor | None = None

    @property
    def is_text(self) -> Tensor | None:
        """`[count]`, of the tokens at hand."""
        return None if self.all_text is None else self.all_text[self.first : self.first + self.count]

    def num_counted(self) -> int | Tensor:
        """Tokens of the whole micro-batch that are text."""
        return self.whole if self.all_text is None else self.all_text.sum().clamp(min=1)

    def lengths(self, num_samples: int) -> int | Tensor:
        """Tokens of each sequence that are text, `[num_samples, 1]`, or one number for all."""
        if self.all_text is None:
            return self.whole // num_samples
        return self.all_text.view(-1, num_samples).sum(0).clamp(min=1).unsqueeze(1)


@dataclass(frozen=True)
class _Counting:
    """Choices of each expert, on their way: `[num_samples * E]`, and to which sample each token belongs."""

    flight: transport.Flight
    sample: Tensor
    num_samples: int


class Gate(nn.Module):
    """Routes `[n, h]` tokens. The weight `[E, h]` is whole on every rank.

    `tp` is the axis whose ranks either hold the same tokens or, under `shared_over`, a slice each. `generator` draws
    alike on the ranks of tp; only with jitter. `expert_bias` `[E]` is float32 whatever the model's precision.
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
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        assert settings.jitter is None or generator is not None, "jitter draws from a generator"
        self.settings = settings
        self.layer = layer
        self._tp = tp
        self._scale = scale
        self.record = record
        self._generator = generator
        shape = (settings.num_experts, hidden_size)
        self.weight = attach(make_parameter(shape, dtype=dtype, device=device), initialiser)
        self.expert_bias: Tensor | None
        bias = make_state((settings.num_experts,), torch.float32, device) if settings.has_expert_bias else None
        self.register_buffer("expert_bias", bias)

    def forward(
        self,
        tokens: Tensor,
        *,
        shared_over: Axis | None = None,
        segments: Axis | None = None,
        padded: bool = False,
        slots_multiple_of: int = 1,
        chunks: int = 1,
        num_samples: int = 1,
        is_text: Tensor | None = None,
    ) -> Routing:
        """Route tokens `[n, h]`.

        shared_over: the tokens are this rank's slice over that axis, so the weight's gradient and the counts of the
        balance loss are summed over it. segments: the tokens are those of all ranks of that axis, in axis order; each
        rank's own count alone in the losses. padded, slots_multiple_of, chunks: see `place`. num_samples: sequences
        in the micro-batch; its tokens go by position, then by sequence. is_text: bool, of each token of the whole
        micro-batch, False for padding: it goes to no expert and counts in no loss and no figure. In eval mode there are
        no losses and nothing is recorded.
        """
        num_segments = 1 if segments is None else segments.size
        count = tokens.shape[0] // num_segments
        part = _Part(count, 0, count, is_text)
        if shared_over is not None:
            part = _Part(count, shared_over.rank * count, shared_over.size * count, is_text)
        text_at_hand = self._text_of_segments(part, segments)
        if self.settings.jitter is not None and self.training:
            tokens = tokens * self._noise(tokens, part, segments)
        logits = self._logits(tokens, shared_over, num_segments)  # [n, E]
        expert, weight = self._choose(logits, part, shared_over, text_at_hand)
        own = self._own_part(tokens.shape[0], segments)
        counting = self._start_counting(logits[own], expert[own], part, num_samples, shared_over)
        routing = place(
            expert,
            weight,
            self.settings.num_experts,
            self.capacity(count),
            policy=self.settings.drop_policy,
            segments=num_segments,
            padded=padded or self.settings.pads_to_capacity,
            slots_multiple_of=slots_multiple_of,
            chunks=chunks,
            is_text=text_at_hand,
        )
        if counting is None:
            return routing
        probabilities = probabilities_of(logits[own], self.settings.score_function)
        if part.is_text is not None:
            probabilities = probabilities * part.is_text.unsqueeze(1)
        balance, z = self._losses(logits[own], probabilities, counting, part)
        counts = count_values(expert[own], self.settings.num_experts, part.is_text)
        self._note(routing.kept[own], counts, (balance, z), probabilities, shared_over)
        return replace(routing, weight=self._attach(routing.weight, balance, z))

    def capacity(self, num_tokens: int) -> int | None:
        """Slots an expert keeps of `num_tokens` tokens; the evaluation factor applies in eval mode."""
        s = self.settings
        factor = s.capacity_factor if self.training else s.eval_capacity_factor
        return capacity_of(num_tokens, s.num_experts, s.topk, factor, s.min_capacity)

    @staticmethod
    def _text_of_segments(part: _Part, segments: Axis | None) -> Tensor | None:
        """`[n]`: which of the tokens at hand, those of other ranks included, are text."""
        if part.is_text is None or segments is None:
            return part.is_text
        return transport.gather_stack(part.is_text.to(torch.uint8), segments).flatten().bool()

    def _noise(self, tokens: Tensor, part: _Part, segments: Axis | None) -> Tensor:
        """Factors of the jitter. Drawn for the whole micro-batch, so that every schedule draws the same."""
        eps = self.settings.jitter
        assert eps is not None
        whole = torch.empty((part.whole, tokens.shape[1]), dtype=torch.float64, device=tokens.device)
        whole.uniform_(1 - eps, 1 + eps, generator=self._generator)
        noise = whole[part.first : part.first + part.count].to(tokens.dtype)
        return noise if segments is None else transport.gather_stack(noise, segments).flatten(0, 1)

    def _logits(self, tokens: Tensor, shared_over: Axis | None, num_segments: int) -> Tensor:
        weight = self.weight if shared_over is None else share(self.weight, shared_over)
        precision = torch.promote_types(tokens.dtype, self.settings.router_dtype)
        weight = weight.to(precision)
        # one product per segment, so that a rank's tokens score bit for bit as they do on that rank
        scores = [F.linear(segment.to(precision), weight) for segment in tokens.chunk(num_segments)]
        return scores[0] if num_segments == 1 else torch.cat(scores)

    def _choose(
        self, logits: Tensor, part: _Part, shared_over: Axis | None, is_text: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(expert `[n, k]`, weight `[n, k]`), the best choice first."""
        s = self.settings
        if s.forces_balance:
            expert = balanced_experts(part.count, part.first, s.num_experts, s.topk, logits.device)
            expert = expert.repeat(logits.shape[0] // part.count, 1)
            return expert, weigh(logits, expert, s.selection)
        if s.balancing == "sinkhorn":
            return select_by_sinkhorn(logits, self._even_shares(logits, part, shared_over, is_text), s.topk)
        return select(logits, s.selection, self.expert_bias)

    @torch.no_grad()
    def _even_shares(
        self, logits: Tensor, part: _Part, shared_over: Axis | None, is_text: Tensor | None = None
    ) -> Tensor | None:
        """What `sinkhorn` makes of the text of each whole micro-batch, for the tokens at hand; None in evaluation."""
        if not self.training:
            return None
        if shared_over is not None:
            whole = transport.gather_stack(logits, shared_over).flatten(0, 1)  # [whole, E]
            return _shares_of_text(whole, part.all_text)[part.first : part.first + part.count]
        number = logits.shape[0] // part.count
        texts = [None] * number if is_text is None else is_text.chunk(number)
        return torch.cat([_shares_of_text(*pair) for pair in zip(logits.chunk(number), texts, strict=True)])

    @staticmethod
    def _own_part(num_tokens: int, segments: Axis | None) -> slice:
        if segments is None:
            return slice(0, num_tokens)
        part = num_tokens // segments.size
        return slice(segments.rank * part, (segments.rank + 1) * part)

    @torch.no_grad()
    def _start_counting(
        self, logits: Tensor, expert: Tensor, part: _Part, num_samples: int, shared_over: Axis | None
    ) -> _Counting | None:
        """Begin to sum what the balance loss counts over `shared_over`; None in evaluation, which has no losses."""
        s = self.settings
        if not self.training:
            return None
        if not s.counts_choices:
            expert = probabilities_of(logits, s.score_function).topk(s.topk, dim=-1).indices
        by_sample = num_samples if s.balancing == "seq_aux_loss" else 1
        sample = torch.arange(part.first, part.first + part.count, device=expert.device) % by_sample
        index = expert + (sample * s.num_experts).unsqueeze(1)
        counts = count_values(index, by_sample * s.num_experts, part.is_text)
        if shared_over is None or s.balance_coefficient is None:
            return _Counting(transport.landed(counts), sample, by_sample)
        flight = transport.start_sum_over(counts, shared_over)
        return _Counting(flight, sample, by_sample)

    def _losses(self, logits: Tensor, probabilities: Tensor, counting: _Counting, part: _Part) -> tuple[Tensor, Tensor]:
        """(balance loss, z-loss) of the own tokens; a part of each where the tokens are a slice."""
        s = self.settings
        balance = z = logits.new_zeros(())
        counts = counting.flight.land()
        if s.balance_coefficient is not None:
            if s.balancing == "seq_aux_loss":
                table = counts.view(counting.num_samples, s.num_experts)
                lengths = part.lengths(counting.num_samples)
                balance = sequence_balancing_loss(probabilities, table, counting.sample, lengths, s.topk)
            else:
                balance = load_balancing_loss(probabilities, counts, part.num_counted(), s.topk)
        if s.z_coefficient is not None:
            z = z_loss(logits, part.num_counted(), part.is_text)
        return balance, z

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
            self.layer, figures, copies=1 if is_cut else self._tp.size, parts=self._tp.size if is_cut else 1
        )


def _shares_of_text(logits: Tensor, is_text: Tensor | None) -> Tensor:
    """`sinkhorn` of the rows that are text; the others are zero."""
    if is_text is None:
        return sinkhorn(logits)
    shares = torch.zeros_like(logits)
    if is_text.any():
        shares[is_text] = sinkhorn(logits[is_text])
    return shares
