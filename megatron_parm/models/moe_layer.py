"""From the configuration to the MoE layer of one block. Floor 6."""

from dataclasses import replace

import torch

from megatron_parm.config.moe import MoEConfig
from megatron_parm.config.run import RunConfig
from megatron_parm.models.execution import PLAIN, Execution
from megatron_parm.models.shape import ModelShape
from megatron_parm.moe.choose import Choice
from megatron_parm.moe.experts import Experts
from megatron_parm.moe.gate import Gate, GateSettings
from megatron_parm.moe.layer import MoELayer
from megatron_parm.moe.losses import BackwardScale
from megatron_parm.moe.record import RoutingRecord
from megatron_parm.moe.shared_expert import SharedExpert
from megatron_parm.parallel.context import ParallelContext

ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


def gate_settings(moe: MoEConfig, router_dtype: torch.dtype) -> GateSettings:
    """How tokens choose experts, as the flags say."""
    return GateSettings(
        num_experts=moe.num_experts,
        topk=moe.moe_router_topk,
        capacity_factor=moe.capacity_factor,
        eval_capacity_factor=moe.eval_capacity_factor,
        min_capacity=moe.moe_min_capacity,
        drop_policy=moe.moe_token_drop_policy,
        pads_to_capacity=moe.moe_pad_expert_input_to_capacity,
        pre_softmax=moe.moe_router_pre_softmax,
        balance_coefficient=moe.balance_coefficient,
        z_coefficient=moe.moe_z_loss_coeff,
        router_dtype=router_dtype,
        balancing=moe.moe_router_load_balancing_type,
        score_function=moe.moe_router_score_function,
        num_groups=moe.moe_router_num_groups,
        group_topk=moe.moe_router_group_topk,
        scaling=moe.moe_router_topk_scaling_factor,
        jitter=moe.moe_input_jitter_eps,
        has_expert_bias=moe.moe_router_enable_expert_bias,
        forces_balance=moe.moe_router_force_load_balancing,
    )


def make_moe_layer(
    config: RunConfig,
    shape: ModelShape,
    layer: int,
    choice: Choice,
    scale: BackwardScale,
    record: RoutingRecord,
    ctx: ParallelContext,
    generator: torch.Generator,
    dtype: torch.dtype,
    execution: Execution = PLAIN,
) -> MoELayer:
    """The MoE layer number `layer` of the whole model. `generator` draws alike on the ranks of tp."""
    moe = config.moe
    assert moe is not None, "a dense model has no MoE layer"
    gate = Gate(
        shape.hidden_size,
        gate_settings(moe, ROUTER_DTYPES[config.router_dtype]),
        layer=layer,
        tp=ctx.tp,
        scale=scale,
        record=record,
        initialiser=shape.initialiser,
        dtype=dtype,
        device=ctx.device,
        generator=generator,
    )
    experts = Experts(
        shape.hidden_size,
        config.expert_size,
        moe.num_experts,
        activation=shape.activation,
        bias=shape.has_bias,
        ep=ctx.ep,
        esp=ctx.esp,
        initialiser=replace(shape.initialiser, per_leading=True),
        output_initialiser=replace(shape.output_initialiser, per_leading=True),
        dtype=dtype,
        device=ctx.device,
    )
    return MoELayer(
        gate,
        experts,
        schedule=choice.schedule,
        chunks=choice.chunks,
        sequence_parallel=execution.sequence_parallel,
        ctx=ctx,
        shared_expert=_shared_expert(config, shape, ctx, dtype, execution),
        recompute=execution.recompute("moe"),
    )


def _shared_expert(
    config: RunConfig, shape: ModelShape, ctx: ParallelContext, dtype: torch.dtype, execution: Execution
) -> SharedExpert | None:
    moe = config.moe
    if moe is None or moe.moe_shared_expert_intermediate_size is None:
        return None
    return SharedExpert(
        shape.hidden_size,
        moe.moe_shared_expert_intermediate_size,
        activation=shape.activation,
        is_gated=moe.moe_shared_expert_gate,
        tp=ctx.tp,
        bias=shape.has_bias,
        initialiser=shape.initialiser,
        output_initialiser=shape.output_initialiser,
        dtype=dtype,
        device=ctx.device,
        sequence_parallel=execution.sequence_parallel,
        recompute=execution.recompute("shared_experts"),
    )
