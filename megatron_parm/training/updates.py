"""From a configuration to all that turns gradients into updates: buffers, reduction, optimizer, loss scale. Floor 7."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from megatron_parm.config.optim import OptimConfig
from megatron_parm.config.run import RunConfig
from megatron_parm.errors import ConfigError
from megatron_parm.grads.buffer import GradientBuffers
from megatron_parm.grads.gaps import ExchangeGaps
from megatron_parm.grads.overlap import OverlappedReduction
from megatron_parm.grads.reduce import GradientReduction, SequentialReduction
from megatron_parm.models.build import BuiltModel
from megatron_parm.models.memory import activation_bytes
from megatron_parm.observe.memory import MIB
from megatron_parm.optim.build import build_optimizer
from megatron_parm.optim.gather import ParameterGather
from megatron_parm.optim.loss_scale import DynamicLossScale, LossScale
from megatron_parm.optim.precision import Optimizer
from megatron_parm.optim.selection import is_matched, rate_factor, require_matches
from megatron_parm.parallel import transport
from megatron_parm.parallel.context import ParallelContext


@dataclass(frozen=True)
class Updates:
    """The parts of a step after forward and backward."""

    buffers: GradientBuffers
    reduction: GradientReduction
    optimizer: Optimizer
    loss_scale: LossScale


def memory_text(config: RunConfig, built: BuiltModel, updates: Updates, ctx: ParallelContext) -> str:
    """What this rank is going to hold, in MiB: what lasts by its elements, activations by `models/memory.py`."""
    states = updates.optimizer.state_tensors().values()
    schedule = None if built.choice is None else built.choice.schedule
    per_step = config.global_batch_size // (config.training.micro_batch_size * ctx.dp.size)
    made = activation_bytes(config, built.model.shape, ctx, schedule=schedule, num_micro_batches=per_step)
    held = {
        "weights": sum(parameter.nbytes for parameter in built.model.parameters()),
        "gradients": sum(buffer.data.nbytes for buffer in updates.buffers.buffers),
        "optimizer": sum(tensor.nbytes for tensors in states for tensor in tensors.values()),
        "activations": made.dense,
        "MoE activations": made.moe,
        "loss or backward": max(made.head, made.work),
    }
    shares = ", ".join(f"{name} {size / MIB:.1f}" for name, size in held.items() if size)
    return f"memory of a rank in theory (MiB): {shares}; {sum(held.values()) / MIB:.1f} in all"


def make_updates(config: RunConfig, built: BuiltModel, ctx: ParallelContext) -> Updates:
    """The parts for `built` as the flags say. Call on all ranks."""
    replicas, optim = config.replicas, config.optim
    names = _names_of_all_stages(built, ctx) if optim.freeze or optim.lr_factor else []
    parameters = _trained_parameters(built, optim, names)
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
        rate_factors=_rate_factors(parameters, optim, names, config.model.num_layers),
    )
    return Updates(buffers, _reduction(config, built, buffers, ctx), optimizer, _loss_scale(config))


def _names_of_all_stages(built: BuiltModel, ctx: ParallelContext) -> list[str]:
    own = json.dumps([name for name, _ in built.model.named_parameters()])
    return sorted({name for text in transport.gather_text(own, ctx.world) for name in json.loads(text)})


def _trained_parameters(built: BuiltModel, optim: OptimConfig, names: list[str]) -> dict[str, nn.Parameter]:
    """The parameters that --freeze leaves; the others get no gradient from now on. Raises ConfigError."""
    require_matches("--freeze", optim.freeze, names)
    if optim.freeze and all(is_matched(name, optim.freeze) for name in names):
        raise ConfigError(f"--freeze {' '.join(optim.freeze)} freezes every parameter: nothing is left to train")
    trained = {}
    for name, parameter in built.model.named_parameters():
        if is_matched(name, optim.freeze):
            parameter.requires_grad_(False)
        else:
            trained[name] = parameter
    return trained


def _rate_factors(
    parameters: Mapping[str, nn.Parameter], optim: OptimConfig, names: list[str], num_layers: int
) -> dict[str, float]:
    factors = optim.rate_factors
    require_matches("--lr-factor", (pattern for pattern, _ in factors), names)
    return {name: rate_factor(name, factors, num_layers, optim.layer_lr_decay) for name in parameters}


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
