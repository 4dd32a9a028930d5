"""The MoE layer: a gate, this rank's experts, and a schedule that orders them. Floor 5."""

from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor, nn

from megatron_parm.layers.recompute import Recomputation
from megatron_parm.moe.buckets import Buckets, Packed
from megatron_parm.moe.experts import Experts
from megatron_parm.moe.gate import Gate
from megatron_parm.moe.schedules import SCHEDULES, STARTS_FROM_SLICES, ExpertStep, GateStep, MoEBlock
from megatron_parm.moe.shared_expert import SharedExpert
from megatron_parm.moe.steps import mp_all_gather, mp_split
from megatron_parm.moe.traced import TracedBlock, TracedExperts, TracedGate
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.shapes import expect_shape


@dataclass(frozen=True)
class _Block:
    """What a schedule orders in one call."""

    gate: GateStep
    experts: ExpertStep
    sequence_parallel: bool


@dataclass(frozen=True)
class _RecomputedExperts:
    """Experts that run again in backward, from what arrived: what travels is kept, and no collective is repeated."""

    experts: Experts
    recompute: Recomputation

    def __call__(self, inbox: Buckets, *, copies: int = 1) -> Buckets:
        """The outputs, in the layout of `inbox`."""
        if isinstance(inbox, Packed):
            return replace(inbox, rows=self.recompute(partial(self._rows, inbox, copies), inbox.rows))
        return self.recompute(partial(self._slots, copies), inbox)

    def _rows(self, inbox: Packed, copies: int, rows: Tensor) -> Tensor:
        outputs = self.experts(replace(inbox, rows=rows), copies=copies)
        assert isinstance(outputs, Packed)
        return outputs.rows

    def _slots(self, copies: int, inbox: Tensor) -> Tensor:
        outputs = self.experts(inbox, copies=copies)
        assert isinstance(outputs, Tensor)
        return outputs


class MoELayer(nn.Module):
    """[s, b, h] -> [s, b, h]; takes the place of the dense feed-forward layer. Call on all ranks of the stage.

    `schedule` is a name of `SCHEDULES`. All schedules hold the same parameters, so it may be changed between steps.
    Under `sequence_parallel` input and output are this rank's slices over tp, `[s/tp, b, h]`: S1 and its kin start from
    them, the other schedules join them first. What `shared_expert` makes of every token is added to what the chosen
    experts make. `recompute` runs the chosen experts again in backward.
    """

    def __init__(
        self,
        gate: Gate,
        experts: Experts,
        *,
        schedule: str,
        chunks: int = 1,
        sequence_parallel: bool = False,
        ctx: ParallelContext,
        shared_expert: SharedExpert | None = None,
        recompute: Recomputation | None = None,
    ) -> None:
        super().__init__()
        self.sequence_parallel = sequence_parallel
        self.router = gate
        self.experts = experts
        self._recompute = recompute
        self.schedule = schedule
        self.chunks = chunks
        self._ctx = ctx
        self.shared_experts: SharedExpert | None = shared_expert

    @property
    def gate(self) -> Gate:
        """The router, in the paper's word."""
        return self.router

    def forward(self, x: Tensor, is_text: Tensor | None = None) -> Tensor:
        """[s, b, h] -> [s, b, h]; `[s/tp, b, h]` both under sequence parallelism.

        is_text: bool [s, b] of whole sequences, False for padding, which goes to no chosen expert; None: all is text.
        """
        expect_shape(x, "s b h", h=self.router.weight.shape[1])
        tokens = x.reshape(-1, x.shape[-1])  # [n, h]
        text = None if is_text is None else is_text.flatten()
        with self._ctx.trace.span("MoE layer", schedule=self.schedule, chunks=self.chunks):
            output = self._ordered(tokens, self._block(x.shape[1], text)).view_as(x)  # [s, b, h]
        return output if self.shared_experts is None else output + self.shared_experts(x)

    def _ordered(self, tokens: Tensor, block: MoEBlock) -> Tensor:
        must_join = self.sequence_parallel and self.schedule not in STARTS_FROM_SLICES
        if must_join:
            tokens = mp_all_gather(tokens, self._ctx)  # [n/tp, h] -> [n, h]
        output = SCHEDULES[self.schedule](tokens, block, self._ctx, self.chunks)  # [n, h]
        return mp_split(output, self._ctx) if must_join else output  # [n, h] -> [n/tp, h]

    def _block(self, num_samples: int, is_text: Tensor | None) -> MoEBlock:
        """What the schedule orders, which tells the trace what it does where there is one."""
        gate, trace = partial(self.router, num_samples=num_samples, is_text=is_text), self._ctx.trace
        again = self._recompute
        experts = self.experts if again is None else _RecomputedExperts(self.experts, again)
        if not trace.is_recording:
            return _Block(gate, experts, self.sequence_parallel)
        return TracedBlock(TracedGate(gate, trace), TracedExperts(experts, trace), self.sequence_parallel)
