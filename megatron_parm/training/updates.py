"""From a configuration to all that turns gradients into updates: buffers, reduction, optimizer, loss scale. Floor 7."""

from dataclasses import dataclass

import torch

from megatron_parm.config.run import RunConfig
from megatron_parm.grads.buffer import GradientBuffers
from megatron_parm.grads.gaps import ExchangeGaps
from megatron_parm.grads.overlap import OverlappedReduction
from megatron_parm.grads.reduce import GradientReduction, SequentialReduction
from megatron_parm.models.build import BuiltModel
from megatron_parm.optim.build import build_optimizer
from megatron_parm.optim.gather import ParameterGather
from megatron_parm.optim.loss_scale import DynamicLossScale, LossScale
from megatron_parm.optim.precision import Optimizer
from megatron_parm.parallel.context import ParallelContext


@dataclass(frozen=True)
class Updates:
    """The parts of a step after forward and backward."""

    buffers: GradientBuffers
    reduction: GradientReduction
    optimizer: Optimizer
    loss_scale: LossScale


def make_updates(config: RunConfig, built: BuiltModel, ctx: ParallelContext) -> Updates:
    """The parts for `built` as the flags say. Call on all ranks."""
    replicas, optim = config.replicas, config.optim
    parameters = dict(built.model.named_parameters())
    buffers = GradientBuffers(parameters, ctx, sharded=replicas.use_distributed_optimizer)
    gather = None
    if replicas.use_distributed_optimizer:
        gather = ParameterGather(buffers.parameters, buffers.parts, ctx, replicas.ddp_bucket_size)
        if replicas.overlap_param_gather:
            gather.overlap_with(built.model)
    optimizer = build_optimizer(
        buffers,
        optim.optimizer,
        adam_beta1=optim.adam_beta1,
        adam_beta2=optim.adam_beta2,
        adam_eps=optim.adam_eps,
        sgd_momentum=optim.sgd_momentum,
        gather=gather,
    )
    return Updates(buffers, _reduction(config, built, buffers, ctx), optimizer, _loss_scale(config))


def _reduction(
    config: RunConfig, built: BuiltModel, buffers: GradientBuffers, ctx: ParallelContext
) -> GradientReduction:
    replicas = config.replicas
    wire_dtype = torch.bfloat16 if replicas.grad_reduce_in_bf16 else None
    watches = config.training.checks_for_nan
    if not replicas.overlap_grad_reduce:
        return SequentialReduction(buffers, ctx, replicas.ddp_bucket_size, wire_dtype, watches=watches)
    gaps = ExchangeGaps(built.moe_layers if replicas.moe_grad_reduce == "gaps" else ())
    return OverlappedReduction(buffers, ctx, replicas.ddp_bucket_size, wire_dtype, gaps, watches=watches)


def _loss_scale(config: RunConfig) -> LossScale:
    flags = config.loss_scale
    if config.training.precision != "fp16":
        return LossScale()
    if flags.loss_scale is not None:
        return LossScale(flags.loss_scale)
    return DynamicLossScale(flags.initial_loss_scale, flags.min_loss_scale, flags.loss_scale_window, flags.hysteresis)
