"""The Mixture-of-Experts layers. Floor 1. Names: Megatron-Core's MoE arguments, and our schedules."""

# ruff: noqa: RUF009 - flag() is dataclasses.field

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_parm.config.fields import flag
from megatron_parm.config.layer_pattern import moe_layer_pattern
from megatron_parm.errors import ConfigError

Schedule = Literal["auto", "baseline", "deepspeed", "s1", "s2", "s1h", "s2h", "s1n"]
BalancingType = Literal["aux_loss", "seq_aux_loss", "sinkhorn", "none"]
RouterDtype = Literal["fp32", "fp64"]
ScoreFunction = Literal["softmax", "sigmoid"]
DropPolicy = Literal["probs", "position"]

_BALANCING = "not in this release; use aux_loss, seq_aux_loss, sinkhorn or none"


def _read_num_experts(words: Sequence[str]) -> int:
    """Megatron's one number, or DeepSpeed's list as long as it names one number. 0 means a dense model."""
    if len(set(words)) != 1 or not words[0].isdecimal():
        raise ConfigError(
            f"--num-experts {' '.join(words)}: expected one whole number, the experts of every MoE layer alike; "
            "DeepSpeed's list of different numbers is not in this release"
        )
    return int(words[0])


def _read_balancing(words: Sequence[str]) -> str:
    if len(words) > 1:
        raise ConfigError(
            f"--moe-router-load-balancing-type {' '.join(words)}: a run has one balance loss in this release; keep one "
            "of them, with one --moe-aux-loss-coeff"
        )
    return words[0]


def _read_pipeline_chunks(words: Sequence[str]) -> str:
    if words != ["auto"] and not (len(words) == 1 and words[0].isdecimal() and int(words[0]) >= 1):
        raise ConfigError(f"--moe-pipeline-chunks {' '.join(words)}: expected a whole number of at least 1, or auto")
    return words[0] if words[0] == "auto" else str(int(words[0]))


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Experts, router, capacity and communication schedule. A dense model has no MoEConfig at all."""

    num_experts: int = flag(
        help="experts of each MoE layer",
        unit="experts",
        none_means="a dense model",
        at_least=0,
        read=_read_num_experts,
        takes_several=True,
    )
    moe_layer_freq: str = flag(
        "1", help='which layers are MoE layers: every N-th from the first, or a list like "([0]+[1]*3)*2"'
    )
    moe_ffn_hidden_size: int | None = flag(
        None, help="width of one expert", unit="features", at_least=1, none_means="the dense feed-forward's width"
    )
    moe_router_topk: int = flag(2, help="experts a token is sent to", unit="experts", at_least=1)
    moe_router_pre_softmax: bool = flag(False, help="take probabilities over all experts before the top-k choice")
    moe_router_load_balancing_type: BalancingType = flag(
        "aux_loss",
        help="how the router is kept balanced: a loss of each micro-batch, or of each sequence, or an even choice",
        refused=dict.fromkeys(("global_aux_loss", "quantile_balancing"), _BALANCING),
        read=_read_balancing,
        takes_several=True,
    )
    moe_aux_loss_coeff: float = flag(0.0, help="weight of the load-balancing loss", at_least=0, zero_means="off")
    moe_z_loss_coeff: float | None = flag(None, help="weight of the router's z-loss", at_least=0, none_means="off")
    moe_router_dtype: RouterDtype = flag("fp32", help="arithmetic of the router")
    moe_router_score_function: ScoreFunction = flag(
        "softmax",
        help="score of an expert; sigmoid: weights are scores divided by their sum",
        refused={"sqrtsoftplus": "not in this release; use softmax or sigmoid"},
    )
    moe_router_num_groups: int | None = flag(
        None, help="groups of experts, of which a token chooses some", unit="groups", at_least=1, none_means="no groups"
    )
    moe_router_group_topk: int | None = flag(
        None, help="groups a token chooses, used with --moe-router-num-groups", unit="groups", at_least=1
    )
    moe_router_topk_scaling_factor: float | None = flag(
        None, help="multiplies the weights of the chosen experts", above=0, none_means="1"
    )
    moe_router_enable_expert_bias: bool = flag(
        False, help="balance without a loss: a bias on each expert's score, moved once a step by the loads"
    )
    moe_router_bias_update_rate: float = flag(
        1e-3, help="how far that bias moves in a step; 0 keeps it where it is", at_least=0
    )
    moe_input_jitter_eps: float | None = flag(
        None,
        help="in training the router sees its input times a random number within this distance of 1",
        above=0,
        below=1,
        none_means="off",
    )
    moe_router_force_load_balancing: bool = flag(
        False, help="send tokens to the experts by turns, whatever the scores: for measurements only"
    )
    moe_shared_expert_intermediate_size: int | None = flag(
        None,
        help="width of an expert that every token passes, beside the chosen ones",
        unit="features",
        at_least=1,
        none_means="no shared expert",
    )
    moe_shared_expert_gate: bool = flag(False, help="weigh the shared expert by a sigmoid gate of its own")
    moe_per_layer_logging: bool = flag(
        False, help="write the router's figures of every MoE layer to TensorBoard and --log-json"
    )
    moe_use_upcycling: bool = flag(
        False, help="fill the model from the dense checkpoint in --load: every expert a copy of the feed-forward"
    )
    moe_expert_capacity_factor: float | None = flag(
        None,
        help="slots of an expert, as a multiple of its even share of the tokens; negative = no limit",
        none_means="no limit, no token is dropped",
    )
    moe_eval_capacity_factor: float | None = flag(
        None, help="the same factor in evaluation; negative = no limit", none_means="as in training"
    )
    moe_min_capacity: int = flag(1, help="least slots of an expert under a capacity factor", unit="tokens", at_least=1)
    moe_pad_expert_input_to_capacity: bool = flag(
        False, help="send empty slots too, so that shapes never change; s2, s2h and deepspeed always do"
    )
    moe_token_drop_policy: DropPolicy = flag(
        "probs", help="which tokens an expert keeps: the most probable, or the first"
    )
    moe_schedule: Schedule = flag(
        "auto", help="order of communication and work in an MoE layer; auto: the fastest predicted"
    )
    moe_pipeline_chunks: str | None = flag(
        None,
        help="chunks in which exchange and experts overlap: a number, or auto",
        none_means="1 for a fixed schedule, auto for auto",
        read=_read_pipeline_chunks,
    )
    moe_schedule_check: int = flag(
        0,
        help="steps in which each of the three best predicted schedules is tried at the start and timed",
        unit="steps",
        at_least=0,
        zero_means="off",
    )
    moe_schedule_adapt: bool = flag(
        False, help="go on with the schedule that --moe-schedule-check measured as the fastest"
    )
    moe_cost_model: str | None = flag(
        None,
        help="JSON file of measured link and expert speeds for auto; what it lacks is measured at the start and added",
        none_means="published constants of a GPU cluster",
    )
    bp_pipeline_degree: int | None = flag(
        None,
        help="FSMoE's chunks of the backward pass; must equal --pipeline-degree",
        none_means="the same",
        at_least=1,
    )

    @property
    def capacity_factor(self) -> float | None:
        """Capacity factor in training; None: no limit."""
        return _limit(self.moe_expert_capacity_factor)

    @property
    def eval_capacity_factor(self) -> float | None:
        """Capacity factor in evaluation; None: no limit."""
        if self.moe_eval_capacity_factor is None:
            return self.capacity_factor
        return _limit(self.moe_eval_capacity_factor)

    @property
    def balance_coefficient(self) -> float | None:
        """Weight of the balance loss; None where there is none, 0 where it is computed for the log alone."""
        return self.moe_aux_loss_coeff if self.moe_router_load_balancing_type in ("aux_loss", "seq_aux_loss") else None

    @property
    def weights_sum_to_one(self) -> bool:
        """True if the weights of a token's chosen experts always do."""
        if self.moe_router_load_balancing_type == "sinkhorn" and not self.moe_router_force_load_balancing:
            return False
        if self.moe_router_topk_scaling_factor not in (None, 1.0):
            return False
        return (
            self.moe_router_topk > 1 if self.moe_router_score_function == "sigmoid" else not self.moe_router_pre_softmax
        )

    @property
    def pipeline_chunks(self) -> int | None:
        """Chunks of the pipelined exchange; None: the choice of `--moe-schedule auto`."""
        if self.moe_pipeline_chunks is None:
            return None if self.moe_schedule == "auto" else 1
        return None if self.moe_pipeline_chunks == "auto" else int(self.moe_pipeline_chunks)

    def layer_pattern(self, num_layers: int) -> tuple[bool, ...]:
        """For each layer, whether it is an MoE layer. Raises ConfigError."""
        return moe_layer_pattern(self.moe_layer_freq, num_layers)


def _limit(factor: float | None) -> float | None:
    return None if factor is None or factor < 0 else factor
