"""A layer of given sizes with random weights, and one pass through it: what measurements run. Floor 5."""

import torch
from torch import Tensor

from megatron_parm.layers.initialise import Initialiser, initialise_weights
from megatron_parm.moe.cost import LayerShape
from megatron_parm.moe.experts import Experts
from megatron_parm.moe.gate import Gate, GateSettings
from megatron_parm.moe.layer import MoELayer
from megatron_parm.moe.losses import BackwardScale
from megatron_parm.moe.record import RoutingRecord
from megatron_parm.parallel.context import ParallelContext

SEED = 1234


def build_probe(
    shape: LayerShape, ctx: ParallelContext, dtype: torch.dtype, *, balance_coefficient: float = 0.01
) -> MoELayer:
    """An MoE layer of `shape` without biases; GELU, or SwiGLU where an expert has three products."""
    settings = GateSettings(
        num_experts=shape.num_experts,
        topk=shape.topk,
        capacity_factor=shape.capacity_factor,
        eval_capacity_factor=shape.capacity_factor,
        min_capacity=shape.min_capacity,
        drop_policy="probs",
        pads_to_capacity=shape.pads,
        pre_softmax=shape.topk == 1,
        balance_coefficient=balance_coefficient,
        z_coefficient=None,
        router_dtype=torch.float32,
    )
    initialiser = Initialiser("normal", 0.02)
    gate = Gate(
        shape.hidden_size,
        settings,
        layer=0,
        tp=ctx.tp,
        scale=BackwardScale(),
        record=RoutingRecord(),
        initialiser=initialiser,
        dtype=dtype,
        device=ctx.device,
    )
    experts = Experts(
        shape.hidden_size,
        shape.ffn_hidden_size,
        shape.num_experts,
        activation="swiglu" if shape.matrices == 3 else "gelu",
        bias=False,
        ep=ctx.ep,
        esp=ctx.esp,
        initialiser=initialiser,
        output_initialiser=initialiser,
        dtype=dtype,
        device=ctx.device,
    )
    layer = MoELayer(
        gate, experts, schedule="baseline", sequence_parallel=shape.sequence_parallel and ctx.tp.size > 1, ctx=ctx
    )
    initialise_weights(layer, SEED)
    return layer


class Pass:
    """One forward and backward pass of a layer over `num_tokens` random tokens, the same on the ranks of tp; this
    rank's slice of them under sequence parallelism."""

    def __init__(self, layer: MoELayer, num_tokens: int, ctx: ParallelContext) -> None:
        generator = torch.Generator().manual_seed(SEED + ctx.dp.rank)
        weight = layer.router.weight
        shape = (num_tokens, 1, weight.shape[1])
        self._layer = layer
        self._x, self._gradient = (self._draw(shape, generator, weight) for _ in range(2))
        if layer.sequence_parallel:
            self._x, self._gradient = (x.chunk(ctx.tp.size)[ctx.tp.rank] for x in (self._x, self._gradient))

    @staticmethod
    def _draw(shape: tuple[int, ...], generator: torch.Generator, like: Tensor) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype=like.dtype, device=like.device)

    def run(self, schedule: str, chunks: int) -> None:
        """Call on all ranks."""
        self._layer.schedule, self._layer.chunks = schedule, chunks
        x = self._x.detach().requires_grad_()
        self._layer(x).backward(self._gradient)
        self._layer.router.record.clear()
