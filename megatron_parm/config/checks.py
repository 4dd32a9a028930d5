"""Every rule that ties two settings, or a setting and the number of ranks, together. Floor 1.

Each function takes the narrowest settings it needs and raises ConfigError (LayoutError for ranks): the flags, the
values, the rule, a value that would work. The rules keep the meaning of Megatron's own validation; nothing is clamped.
"""

from megatron_parm.config.model import ModelConfig
from megatron_parm.config.moe import MoEConfig
from megatron_parm.config.numbers import common_divisors, divisors, one_of
from megatron_parm.config.optim import OptimConfig
from megatron_parm.config.parallel import ParallelConfig
from megatron_parm.config.ramp import RampUp
from megatron_parm.config.training import TrainingConfig
from megatron_parm.errors import ConfigError, LayoutError


def check_ranks(parallel: ParallelConfig, num_experts: int | None, world: int) -> None:
    """Check that the parallel sizes fit the ranks; `num_experts` is None for a dense model. Raises LayoutError."""
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    if world % (tp * pp):
        raise LayoutError(
            f"--tensor-model-parallel-size {tp} x --pipeline-model-parallel-size {pp} = {tp * pp} must divide the "
            f"{world} ranks of the run; start a multiple of {tp * pp} ranks, or use sizes whose product is "
            f"{one_of(divisors(world))}"
        )
    ep = parallel.expert_model_parallel_size
    if num_experts is None:
        if ep > 1:
            raise LayoutError(
                f"--expert-model-parallel-size {ep} spreads experts, but the model has none; add --num-experts (a "
                f"multiple of {ep}), or use --expert-model-parallel-size 1"
            )
        return
    _check_expert_ranks(parallel, num_experts, world)


def _check_expert_ranks(parallel: ParallelConfig, num_experts: int, world: int) -> None:
    ep, esp, pp = parallel.expert_model_parallel_size, parallel.esp, parallel.pipeline_model_parallel_size
    stage = world // pp
    fitting = [size for size in common_divisors(num_experts, stage) if stage % (size * esp) == 0]
    if ep > num_experts:
        raise LayoutError(
            f"--expert-model-parallel-size {ep} is more than --num-experts {num_experts} (world {world}): a rank would "
            f"hold no expert; use --expert-model-parallel-size {one_of(fitting or divisors(num_experts))}"
        )
    if num_experts % ep:
        raise LayoutError(
            f"--num-experts {num_experts} must be a multiple of --expert-model-parallel-size {ep} (world {world}), so "
            f"that every rank holds as many experts; use --expert-model-parallel-size "
            f"{one_of(fitting or divisors(num_experts))}, or --num-experts "
            f"{one_of([n for n in (num_experts // ep * ep, (num_experts // ep + 1) * ep) if n])}"
        )
    if stage % (ep * esp):
        default = " (its default: the tensor-parallel size)" if parallel.expert_tensor_parallel_size is None else ""
        remedy = (
            f"--expert-model-parallel-size {one_of(fitting)}"
            if fitting
            else f"--expert-tensor-parallel-size {one_of(divisors(stage))}"
        )
        raise LayoutError(
            f"--expert-model-parallel-size {ep} x --expert-tensor-parallel-size {esp}{default} = {ep * esp} must "
            f"divide the {stage} ranks of a pipeline stage (world {world} / pp {pp}; --num-experts {num_experts}); use "
            f"{remedy}"
        )


def check_model(model: ModelConfig, tp: int, seq_length: int, has_dense_layer: bool) -> None:
    """Check the model's own sizes, and that its dense layers can be shared by `tp` ranks."""
    _check_attention(model, tp)
    if seq_length > model.max_position_embeddings:
        raise ConfigError(
            f"--seq-length {seq_length} is longer than --max-position-embeddings {model.max_position_embeddings}; use "
            f"--max-position-embeddings {seq_length} or more"
        )
    chosen = [
        f"--{name}" for name in ("openai-gelu", "squared-relu", "swiglu") if getattr(model, name.replace("-", "_"))
    ]
    if len(chosen) > 1:
        raise ConfigError(f"{' and '.join(chosen)}: a feed-forward has one activation; keep one of them")
    if model.use_rope_scaling and model.position_embedding_type != "rope":
        raise ConfigError(
            f"--use-rope-scaling with --position-embedding-type {model.position_embedding_type}: it scales plain "
            "rotary positions; use --position-embedding-type rope"
        )
    if model.qk_layernorm_over == "all_heads" and model.normalization != "RMSNorm":
        raise ConfigError(
            f"--qk-layernorm-over all_heads knows --normalization RMSNorm only, not {model.normalization}; use "
            "--qk-layernorm-over head"
        )
    if model.apply_layernorm_1p and model.normalization != "LayerNorm":
        raise ConfigError(f"--apply-layernorm-1p needs --normalization LayerNorm, not {model.normalization}")
    width = model.feed_forward_size
    if width < 1:
        raise ConfigError(
            f"--swiglu with --hidden-size {model.hidden_size}: the default width, 8/3 of it floored to a multiple of "
            "64, is 0; set --ffn-hidden-size"
        )
    if has_dense_layer and width % tp:
        raise ConfigError(
            f"--ffn-hidden-size {width} must be a multiple of --tensor-model-parallel-size {tp}; use "
            f"--ffn-hidden-size {width // tp * tp + tp}, or --tensor-model-parallel-size "
            f"{one_of(common_divisors(width, model.num_attention_heads))}"
        )


def _check_attention(model: ModelConfig, tp: int) -> None:
    heads, groups, hidden = model.num_attention_heads, model.query_groups, model.hidden_size
    if model.kv_channels is None and hidden % heads:
        raise ConfigError(
            f"--hidden-size {hidden} must be a multiple of --num-attention-heads {heads}; use --hidden-size "
            f"{hidden // heads * heads + heads}, --num-attention-heads {one_of(divisors(hidden))}, or set --kv-channels"
        )
    if heads % tp:
        raise ConfigError(
            f"--num-attention-heads {heads} must be a multiple of --tensor-model-parallel-size {tp}; use "
            f"--tensor-model-parallel-size {one_of(divisors(heads))}, or --num-attention-heads {heads // tp * tp + tp}"
        )
    if heads % groups:
        raise ConfigError(
            f"--num-attention-heads {heads} must be a multiple of --num-query-groups {groups}; use --num-query-groups "
            f"{one_of(divisors(heads))}"
        )
    if groups % tp:
        raise ConfigError(
            f"--num-query-groups {groups} must be a multiple of --tensor-model-parallel-size {tp}; use "
            f"--num-query-groups {one_of([d for d in divisors(heads) if d % tp == 0])}, or "
            f"--tensor-model-parallel-size {one_of(divisors(groups))}"
        )
    if model.rotates and (model.rotary_dim < 2 or model.rotary_dim % 2):
        raise ConfigError(
            f"--rotary-percent {model.rotary_percent} of a head of {model.head_dim} features rotates "
            f"{model.rotary_dim}: an even number of at least 2 is needed; change --rotary-percent or --kv-channels"
        )


def check_experts(moe: MoEConfig, model: ModelConfig, esp: int) -> None:
    """Check experts and router."""
    if not any(moe.layer_pattern(model.num_layers)):
        raise ConfigError(f"--moe-layer-freq {moe.moe_layer_freq} makes no layer an MoE layer; leave out --num-experts")
    width = moe.moe_ffn_hidden_size or model.feed_forward_size
    if width % esp:
        raise ConfigError(
            f"--moe-ffn-hidden-size {width} must be a multiple of --expert-tensor-parallel-size {esp}; use "
            f"--moe-ffn-hidden-size {width // esp * esp + esp}, or "
            f"--expert-tensor-parallel-size {one_of(divisors(width))}"
        )
    for flag, factor in (
        ("--moe-expert-capacity-factor", moe.moe_expert_capacity_factor),
        ("--moe-eval-capacity-factor", moe.moe_eval_capacity_factor),
    ):
        if factor == 0:
            raise ConfigError(f"{flag} 0 would drop every token; use a positive number, or -1 for no limit")


NEED_SLOTS = ("deepspeed", "s2", "s2h")  # they cut the slots of every expert over tp
CUT_TOKENS = ("s1", "s1h", "s1n")  # they cut the tokens of a micro-batch over tp


def check_schedule(moe: MoEConfig, tp: int, esp: int, tokens: int) -> None:
    """Check that the communication schedule can run; `tokens` is sequence length x micro-batch size."""
    schedule = moe.moe_schedule
    for flag, factor in (
        ("--moe-expert-capacity-factor", moe.capacity_factor),
        ("--moe-eval-capacity-factor", moe.eval_capacity_factor),
    ):
        if schedule in NEED_SLOTS and factor is None:
            raise ConfigError(
                f"--moe-schedule {schedule} cuts the slots of every expert into equal parts, so it needs a limit, "
                f"and {flag} sets none; set {flag} (for instance {moe.num_experts / moe.moe_router_topk:g}, which "
                "drops nothing), or use --moe-schedule s1, s1h, baseline or auto"
            )
        if moe.moe_pad_expert_input_to_capacity and factor is None:
            raise ConfigError(
                f"--moe-pad-expert-input-to-capacity needs a capacity, and {flag} sets none; set {flag} (for instance "
                f"{moe.num_experts / moe.moe_router_topk:g}, which drops nothing), or leave out the padding"
            )
    if schedule == "s1n" and moe.moe_pad_expert_input_to_capacity:
        raise ConfigError(
            "--moe-schedule s1n sends kept choices only, and --moe-pad-expert-input-to-capacity asks for empty slots "
            "to be sent too; leave out the padding, or use --moe-schedule s1h"
        )
    if schedule in CUT_TOKENS and tokens % tp:
        raise ConfigError(
            f"--moe-schedule {schedule} cuts the {tokens} tokens of a micro-batch (--seq-length x --micro-batch-size) "
            f"into --tensor-model-parallel-size {tp} equal parts, which does not come out even; use --moe-schedule s2 "
            f"or baseline, or a --seq-length that is a multiple of {tp}"
        )
    if schedule == "deepspeed" and esp not in (1, tp):
        raise ConfigError(
            f"--moe-schedule deepspeed knows expert sharding over 1 rank or over the tensor-parallel ranks only; "
            f"--expert-tensor-parallel-size {esp} is neither 1 nor --tensor-model-parallel-size {tp}; use one of them, "
            "or another schedule"
        )
    _check_chunks(moe)


def _check_chunks(moe: MoEConfig) -> None:
    if moe.moe_schedule_adapt and (moe.moe_schedule != "auto" or moe.moe_schedule_check == 0):
        raise ConfigError(
            "--moe-schedule-adapt takes what --moe-schedule-check measured in place of what --moe-schedule auto "
            f"predicted; found --moe-schedule-check {moe.moe_schedule_check}, --moe-schedule {moe.moe_schedule}; use "
            "--moe-schedule auto --moe-schedule-check 5"
        )
    chunks = moe.pipeline_chunks
    if moe.bp_pipeline_degree is not None and moe.bp_pipeline_degree != (chunks or 1):
        raise ConfigError(
            f"--bp-pipeline-degree {moe.bp_pipeline_degree} must equal --pipeline-degree "
            f"{moe.moe_pipeline_chunks or 1}: both passes run in the same chunks; leave out --bp-pipeline-degree"
        )


def check_batches(training: TrainingConfig, parallel: ParallelConfig, world: int) -> tuple[list[int], int]:
    """Check that every global batch is cut into equal micro-batches.

    Returns every global batch size of the run, and the sequences of one micro-batch over all data-parallel ranks.
    """
    micro, whole, tp = training.micro_batch_size, training.global_batch_size, parallel.tensor_model_parallel_size
    dp = world // tp // parallel.pipeline_model_parallel_size
    step = micro * dp
    if whole % step:
        near = [size for size in (whole // step * step, whole // step * step + step) if size]
        other = f", or --micro-batch-size {one_of(divisors(whole // dp))}" if whole % dp == 0 else ""
        raise ConfigError(
            f"--global-batch-size {whole} must be a multiple of --micro-batch-size {micro} x {dp} data-parallel ranks "
            f"(world {world} / tp {tp} / pp {parallel.pipeline_model_parallel_size}) = {step}; use --global-batch-size "
            f"{one_of(near)}{other}"
        )
    size = whole or step
    sizes = _check_ramp(training, size, step)
    if training.train_samples is not None and training.train_samples < size:
        raise ConfigError(
            f"--train-samples {training.train_samples} is less than one global batch of {size} samples; use "
            f"--train-samples {size} or more, or a smaller --global-batch-size"
        )
    return sizes, step


def _check_ramp(training: TrainingConfig, full: int, step: int) -> list[int]:
    """Every global batch size of the run."""
    ramp = RampUp.of(training.rampup_batch_size, full)
    if ramp is None:
        return [full]
    words = " ".join(training.rampup_batch_size)
    if training.train_iters is not None:
        raise ConfigError(
            f"--rampup-batch-size {words} with --train-iters {training.train_iters}: a growing batch is counted in "
            "samples; give the length of the run with --train-samples"
        )
    uneven = [size for size in ramp.sizes if size % step]
    if uneven:
        start, increment = -(-ramp.start // step) * step, -(-ramp.increment // step) * step
        raise ConfigError(
            f"--rampup-batch-size {words}: the batch of {uneven[0]} samples is no multiple of {step}, one micro-batch "
            f"on every data-parallel rank; use --rampup-batch-size {start} {increment} {ramp.samples}, with a "
            f"--global-batch-size of {start} plus a multiple of {increment}"
        )
    return ramp.sizes


def check_length(training: TrainingConfig, optim: OptimConfig) -> None:
    """Check that the run's length and its schedules are counted in one unit, and follow each other."""
    if training.train_iters is not None and training.train_samples is not None:
        raise ConfigError(
            f"--train-iters {training.train_iters} and --train-samples {training.train_samples}: a run has one length; "
            "keep one of them"
        )
    if training.train_iters is None and training.train_samples is None and not training.skip_train:
        raise ConfigError("--train-iters or --train-samples is required: the length of the run")
    if optim.lr_warmup_fraction is not None and (optim.lr_warmup_iters or optim.lr_warmup_samples):
        raise ConfigError(
            f"--lr-warmup-fraction {optim.lr_warmup_fraction} and --lr-warmup-iters or --lr-warmup-samples: a warm-up "
            "has one length; keep one of them"
        )
    is_in_samples = training.train_samples is not None
    wrong, right = ("iters", "samples") if is_in_samples else ("samples", "iters")
    for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        value = getattr(optim, f"{name}_{wrong}")
        if value:
            flag = f"--{name}_".replace("_", "-")
            raise ConfigError(
                f"{flag}{wrong} {value} with --train-{right}: everything is counted in one unit; use {flag}{right}"
            )
    _check_warm_up(training, optim, right)


def _check_warm_up(training: TrainingConfig, optim: OptimConfig, unit: str) -> None:
    length = getattr(optim, f"lr_decay_{unit}") or getattr(training, f"train_{unit}")
    warm_up = getattr(optim, f"lr_warmup_{unit}")
    wsd = getattr(optim, f"lr_wsd_decay_{unit}")
    if length is not None and warm_up >= length:
        raise ConfigError(
            f"--lr-warmup-{unit} {warm_up} must be less than the decay's length {length} (--lr-decay-{unit}, else "
            f"--train-{unit}); use at most {length - 1}"
        )
    if optim.lr_decay_style != "WSD":
        return
    if wsd is None:
        raise ConfigError(f"--lr-decay-style WSD needs --lr-wsd-decay-{unit}, the length of its final part")
    if length is not None and wsd > length:
        raise ConfigError(f"--lr-wsd-decay-{unit} {wsd} is more than the whole decay of {length}; use at most {length}")


def check_optim(optim: OptimConfig) -> None:
    """Check learning rate and weight decay."""
    optim.rate_factors  # noqa: B018 - raises for a factor that is no number
    if optim.min_lr > optim.lr:
        raise ConfigError(f"--min-lr {optim.min_lr} is more than --lr {optim.lr}; use --min-lr {optim.lr} or less")
    if optim.lr_warmup_init > optim.lr:
        raise ConfigError(
            f"--lr-warmup-init {optim.lr_warmup_init} is more than --lr {optim.lr}; use {optim.lr} or less"
        )
    start, end, style = optim.start_weight_decay, optim.end_weight_decay, optim.weight_decay_incr_style
    if style == "constant" and not (start is None and end is None):
        raise ConfigError(
            "--start-weight-decay and --end-weight-decay need --weight-decay-incr-style linear or cosine; for a "
            "constant weight decay use --weight-decay"
        )
    if style != "constant" and (start is None or end is None or end < start):
        raise ConfigError(
            f"--weight-decay-incr-style {style} needs --start-weight-decay (found {start}) and --end-weight-decay "
            f"(found {end}), the end not less than the start"
        )
    if optim.override_opt_param_scheduler and optim.use_checkpoint_opt_param_scheduler:
        raise ConfigError(
            "--override-opt_param-scheduler takes the schedules from the flags, --use-checkpoint-opt_param-scheduler "
            "from the checkpoint; keep one of them"
        )


def remarks(model: ModelConfig, parallel: ParallelConfig, moe: MoEConfig | None) -> list[str]:
    """Settings that are allowed and do nothing, or less than one may think, each in one line."""
    found = []
    if model.num_query_groups != 1 and not model.group_query_attention:
        found.append("--num-query-groups: no effect without --group-query-attention")
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1:
        found.append("--sequence-parallel: no effect with --tensor-model-parallel-size 1")
    if moe is None and parallel.expert_tensor_parallel_size is not None:
        found.append("--expert-tensor-parallel-size: no effect without --num-experts")
    return found
