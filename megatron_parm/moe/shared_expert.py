"""The shared expert: a dense feed-forward that every token passes, beside the experts that the gate chose. Floor 5.

It is cut over tp like any dense layer and never meets a schedule, so all schedules give the same. Parameter names are
Megatron-Core's (`shared_experts`). Source: Dai et al. 2024 (DeepSeekMoE); Qwen2-MoE (the sigmoid gate).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_parm.layers.feed_forward import Activation, FeedForward
from megatron_parm.layers.initialise import Initialiser, attach
from megatron_parm.layers.recompute import Recomputation
from megatron_parm.parallel.context import Axis
from megatron_parm.parallel.sharding import make_parameter


class SharedExpert(nn.Module):
    """[s, b, h] -> [s, b, h], times sigmoid(x . gate_weight) with `is_gated`. Call on all ranks of tp.

    With `sequence_parallel` the ranks of tp hold slices [s/tp, b, h] in and out instead of the same values. `recompute`
    runs the products again in backward, without the sum over tp.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        activation: Activation,
        is_gated: bool,
        tp: Axis,
        bias: bool,
        initialiser: Initialiser,
        output_initialiser: Initialiser,
        dtype: torch.dtype,
        device: torch.device,
        sequence_parallel: bool = False,
        recompute: Recomputation | None = None,
    ) -> None:
        super().__init__()
        self._recompute = recompute
        feed_forward = FeedForward(
            hidden_size,
            ffn_hidden_size,
            activation=activation,
            tp=tp,
            bias=bias,
            initialiser=initialiser,
            output_initialiser=output_initialiser,
            dtype=dtype,
            device=device,
            sequence_parallel=sequence_parallel,
        )
        self.activate = feed_forward.activate
        self.linear_fc1, self.linear_fc2 = feed_forward.linear_fc1, feed_forward.linear_fc2
        self.gate_weight: nn.Parameter | None = None
        if is_gated:
            gate = make_parameter((1, hidden_size), is_partial_on_tp=sequence_parallel, dtype=dtype, device=device)
            self.gate_weight = attach(gate, initialiser)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h]; [s/tp, b, h] each with sequence parallelism."""
        part = self._part(x) if self._recompute is None else self._recompute(self._part, x)  # [s, b, h]
        output = self.linear_fc2.join(part)  # [s, b, h], or [s/tp, b, h]
        return output if self.gate_weight is None else output * torch.sigmoid(F.linear(x, self.gate_weight))

    def _part(self, x: Tensor) -> Tensor:
        return self.linear_fc2.product(self.activate(self.linear_fc1(x)))  # [s, b, h], to be summed over tp
