"""The rules of the router, the shared expert and upcycling, beside those of `checks.py`. Floor 1."""

from megatron_parm.config.checkpoint import CheckpointConfig
from megatron_parm.config.model import ModelConfig
from megatron_parm.config.moe import MoEConfig
from megatron_parm.config.numbers import divisors, one_of
from megatron_parm.errors import ConfigError


def check_router(moe: MoEConfig) -> None:
    """Check how tokens choose experts."""
    topk = moe.moe_router_topk
    if topk > moe.num_experts:
        raise ConfigError(
            f"--moe-router-topk {topk} is more than --num-experts {moe.num_experts}; use --moe-router-topk "
            f"{moe.num_experts} or less"
        )
    is_plain = moe.moe_router_score_function == "softmax" and moe.moe_router_load_balancing_type != "sinkhorn"
    if topk == 1 and is_plain and not moe.moe_router_pre_softmax:
        raise ConfigError(
            "--moe-router-topk 1 needs --moe-router-pre-softmax: a softmax over one chosen expert is always 1, and the "
            "router would not learn"
        )
    if moe.moe_router_enable_expert_bias and moe.moe_router_score_function != "sigmoid":
        raise ConfigError(
            "--moe-router-enable-expert-bias is added to scores between 0 and 1, so it needs "
            "--moe-router-score-function sigmoid; add that, or balance with --moe-aux-loss-coeff"
        )
    _check_groups(moe)
    if moe.moe_router_load_balancing_type == "sinkhorn":
        _check_sinkhorn(moe)


def _check_groups(moe: MoEConfig) -> None:
    groups, chosen, topk, experts = (
        moe.moe_router_num_groups,
        moe.moe_router_group_topk,
        moe.moe_router_topk,
        moe.num_experts,
    )
    if groups is None and chosen is None:
        return
    if groups is None or chosen is None:
        given, missing = ("num-groups", "group-topk") if chosen is None else ("group-topk", "num-groups")
        raise ConfigError(
            f"--moe-router-{given} {groups or chosen} needs --moe-router-{missing}: how many groups there are, and how "
            "many of them a token chooses"
        )
    if experts % groups:
        raise ConfigError(
            f"--num-experts {experts} must be a multiple of --moe-router-num-groups {groups}, so that groups are "
            f"equal; use --moe-router-num-groups {one_of(divisors(experts))}"
        )
    size = experts // groups
    fitting = [n for n in range(1, min(groups, topk) + 1) if n * size >= topk]
    if chosen not in fitting:
        remedy = f"use --moe-router-group-topk {one_of(fitting)}" if fitting else "use fewer groups"
        raise ConfigError(
            f"--moe-router-group-topk {chosen}: the chosen groups, of {size} experts each (--num-experts {experts} / "
            f"--moe-router-num-groups {groups}), must hold the {topk} experts of --moe-router-topk, and be at most "
            f"{min(groups, topk)}; {remedy}"
        )


def _check_sinkhorn(moe: MoEConfig) -> None:
    if moe.moe_aux_loss_coeff:
        raise ConfigError(
            f"--moe-router-load-balancing-type sinkhorn has no loss, so --moe-aux-loss-coeff must be 0, not "
            f"{moe.moe_aux_loss_coeff}; leave it out, or use --moe-router-load-balancing-type aux_loss"
        )
    for flag, is_given in (
        ("--moe-expert-capacity-factor", moe.capacity_factor is not None),
        ("--moe-eval-capacity-factor", moe.eval_capacity_factor is not None),
        ("--moe-router-score-function sigmoid", moe.moe_router_score_function == "sigmoid"),
        ("--moe-router-num-groups", moe.moe_router_num_groups is not None),
        ("--moe-router-topk-scaling-factor", moe.moe_router_topk_scaling_factor is not None),
    ):
        if is_given:
            raise ConfigError(
                f"--moe-router-load-balancing-type sinkhorn chooses experts evenly by a rule of its own, so {flag} "
                "does not go with it; leave one of them out"
            )


def check_shared_expert(moe: MoEConfig, tp: int) -> None:
    """Check that the shared expert can be cut over `tp` ranks."""
    width = moe.moe_shared_expert_intermediate_size
    if width is None and moe.moe_shared_expert_gate:
        raise ConfigError(
            "--moe-shared-expert-gate weighs a shared expert; give its width by --moe-shared-expert-intermediate-size, "
            "or leave the gate out"
        )
    if width is not None and width % tp:
        raise ConfigError(
            f"--moe-shared-expert-intermediate-size {width} must be a multiple of --tensor-model-parallel-size {tp}; "
            f"use --moe-shared-expert-intermediate-size {width // tp * tp + tp}"
        )


def check_upcycling(moe: MoEConfig, model: ModelConfig, checkpoint: CheckpointConfig) -> None:
    """Check that a dense model's function survives when experts take the place of its feed-forward."""
    if not moe.moe_use_upcycling:
        return
    if checkpoint.load is None and checkpoint.pretrained_checkpoint is None:
        raise ConfigError(
            "--moe-use-upcycling needs --load DIR or --pretrained-checkpoint DIR: the checkpoint of the dense model"
        )
    if not moe.weights_sum_to_one:
        raise ConfigError(
            "--moe-use-upcycling: the model starts as the dense one only if the weights of a token's experts sum to 1; "
            "leave out --moe-router-pre-softmax, --moe-router-topk-scaling-factor and sinkhorn, with a "
            "--moe-router-topk of 2 or more"
        )
    width, dense = moe.moe_ffn_hidden_size or model.feed_forward_size, model.feed_forward_size
    if width != dense:
        raise ConfigError(
            f"--moe-use-upcycling copies the dense feed-forward into every expert, so --moe-ffn-hidden-size {width} "
            f"must equal --ffn-hidden-size {dense}; leave it out"
        )
    if moe.moe_shared_expert_intermediate_size is not None:
        raise ConfigError(
            "--moe-use-upcycling: a shared expert would be added to what the dense model computes; leave out "
            "--moe-shared-expert-intermediate-size"
        )


def router_remarks(moe: MoEConfig) -> list[str]:
    """Settings of the router that are allowed and do nothing, or less than one may think, each in one line."""
    found = []
    if moe.moe_aux_loss_coeff and moe.moe_router_load_balancing_type == "none":
        found.append("--moe-aux-loss-coeff: no effect with --moe-router-load-balancing-type none")
    if moe.moe_router_pre_softmax and moe.moe_router_score_function == "sigmoid":
        found.append("--moe-router-pre-softmax: no effect with --moe-router-score-function sigmoid")
    if moe.moe_router_force_load_balancing:
        found.append(
            "--moe-router-force-load-balancing: tokens go to experts by turns; the model learns no routing, measure "
            "speed only"
        )
    if moe.moe_use_upcycling and moe.capacity_factor is not None:
        found.append(
            "--moe-use-upcycling with a capacity factor: dropped tokens miss the feed-forward, so the model starts as "
            "the dense one only where nothing is dropped"
        )
    return found
