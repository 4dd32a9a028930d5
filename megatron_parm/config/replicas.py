"""How the replicas of a model stay one model: reduction of gradients, sharded optimizer, checks. Floor 1."""

# ruff: noqa: RUF009 - flag() is dataclasses.field

from dataclasses import dataclass
from typing import Literal

from megatron_parm.config.fields import flag

GradReduceWindow = Literal["gaps", "anywhere"]


@dataclass(frozen=True, kw_only=True)
class ReplicaConfig:
    """Data parallelism: dense parameters have replicas over dp, experts over edp."""

    overlap_grad_reduce: bool = flag(False, help="reduce gradients in buckets while backward runs")
    ddp_bucket_size: int = flag(
        40_000_000, help="gradients that are reduced together", unit="elements of a parameter", at_least=1
    )
    moe_grad_reduce: GradReduceWindow = flag(
        "gaps",
        help="with --overlap-grad-reduce, start reductions only where no MoE layer exchanges tokens, or anywhere",
    )
    use_distributed_optimizer: bool = flag(
        False, help="ZeRO-1: each replica keeps optimizer state and fp32 weights of its part of the parameters alone"
    )
    overlap_param_gather: bool = flag(
        False, help="with --use-distributed-optimizer, gather updated parameters beside the next forward"
    )
    grad_reduce_in_bf16: bool = flag(
        False, help="send gradients in bf16; they are accumulated in fp32 all the same, and only with --bf16"
    )
    accumulate_allreduce_grads_in_fp32: bool = flag(
        False, help="accumulate and reduce gradients in fp32; always so without --grad-reduce-in-bf16"
    )
    check_weight_hash_across_dp_replicas_interval: int | None = flag(
        None,
        help="training between two comparisons of the replicas' weights, bit by bit",
        unit="iterations",
        at_least=1,
        none_means="never",
    )
