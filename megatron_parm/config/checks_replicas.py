"""Rules of data parallelism and precision. Floor 1. See `checks.py` for the form of the messages."""

from megatron_parm.config.fields import flags_of
from megatron_parm.config.loss_scale import LossScaleConfig
from megatron_parm.config.replicas import ReplicaConfig
from megatron_parm.config.training import Precision
from megatron_parm.errors import ConfigError


def check_replicas(replicas: ReplicaConfig, precision: Precision) -> None:
    """Check what reduces gradients and gathers parameters."""
    if replicas.overlap_param_gather and not replicas.use_distributed_optimizer:
        raise ConfigError(
            "--overlap-param-gather needs --use-distributed-optimizer: without it every replica updates all parameters "
            "and there is nothing to gather; add --use-distributed-optimizer, or leave it out"
        )
    if replicas.grad_reduce_in_bf16 and precision != "bf16":
        raise ConfigError(
            f"--grad-reduce-in-bf16 with {precision} would lose digits that the gradients have; use it with --bf16, or "
            "leave it out"
        )
    if replicas.grad_reduce_in_bf16 and replicas.accumulate_allreduce_grads_in_fp32:
        raise ConfigError(
            "--grad-reduce-in-bf16 and --accumulate-allreduce-grads-in-fp32 ask for two precisions of one reduction; "
            "keep one of them (both accumulate in fp32)"
        )


def check_loss_scale(scale: LossScaleConfig) -> None:
    """Check the range of the dynamic scale."""
    if scale.loss_scale is None and scale.min_loss_scale > scale.initial_loss_scale:
        raise ConfigError(
            f"--min-loss-scale {scale.min_loss_scale} is more than --initial-loss-scale {scale.initial_loss_scale}; "
            f"use --initial-loss-scale {scale.min_loss_scale} or more"
        )


def replica_remarks(replicas: ReplicaConfig, scale: LossScaleConfig, precision: Precision, is_moe: bool) -> list[str]:
    """Settings that do nothing here."""
    found = []
    if precision != "fp16":
        given = [one.spelling for one in flags_of(LossScaleConfig) if getattr(scale, one.field) != one.default]
        found += [f"{spelling}: no effect with {precision}, only fp16 needs a loss scale" for spelling in given]
    if replicas.moe_grad_reduce != "gaps" and not (replicas.overlap_grad_reduce and is_moe):
        found.append("--moe-grad-reduce: no effect without --overlap-grad-reduce and --num-experts")
    return found
