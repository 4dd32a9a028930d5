"""Rules about which activations a rank holds and keeps. Floor 1; `checks.py` says what a rule is."""

from megatron_parm.config.numbers import divisors, one_of
from megatron_parm.config.parallel import ParallelConfig
from megatron_parm.config.recompute import MODULES, RecomputeConfig
from megatron_parm.config.training import TrainingConfig
from megatron_parm.errors import ConfigError


def check_sequence_parallel(parallel: ParallelConfig, seq_length: int) -> None:
    """Check that a sequence is cut into equal slices over the tensor-parallel ranks, if it is cut at all."""
    tp = parallel.tensor_model_parallel_size
    if parallel.sequence_parallel and seq_length % tp:
        raise ConfigError(
            f"--sequence-parallel cuts --seq-length {seq_length} into --tensor-model-parallel-size {tp} equal slices, "
            f"which does not come out even; use --seq-length {seq_length // tp * tp + tp}, "
            f"--tensor-model-parallel-size {one_of(divisors(seq_length))}, or leave out --sequence-parallel"
        )


_ELSEWHERE = {
    "moe_act": "the experts' activation is part of moe",
    "mla_up_proj": "there is no multi-latent attention",
}


def check_recompute(recompute: RecomputeConfig) -> None:
    """Check that what is to run again in backward is named in one way."""
    for name in recompute.recompute_modules:
        if name not in MODULES:
            reason = f" ({_ELSEWHERE[name]})" if name in _ELSEWHERE else ""
            raise ConfigError(f"--recompute-modules {name}{reason}: use any of {', '.join(MODULES)}")
    if recompute.recompute_granularity != "selective":
        return
    for flag, value in (
        ("--recompute-method", recompute.recompute_method),
        ("--recompute-num-layers", recompute.recompute_num_layers),
    ):
        if value is not None:
            raise ConfigError(
                f"{flag} {value} counts whole layers, and --recompute-granularity selective recomputes parts of every "
                f"layer; leave out {flag}, or use --recompute-granularity full"
            )


def remarks(recompute: RecomputeConfig, training: TrainingConfig, has_experts: bool) -> list[str]:
    """Settings of activations that do nothing here, each in one line."""
    found = []
    if training.precision in ("fp32", "fp64"):
        found += [
            f"{flag}: no effect with --precision {training.precision}, where nothing is narrower than fp32"
            for flag, is_given in (
                ("--fp32-residual-connection", training.fp32_residual_connection),
                ("--attention-softmax-in-fp32", training.attention_softmax_in_fp32),
            )
            if is_given
        ]
    if recompute.is_full and recompute.recompute_modules:
        found.append("--recompute-modules: no effect with --recompute-granularity full, which recomputes whole layers")
    if recompute.recompute_granularity is None:
        found += [
            f"{flag}: no effect without --recompute-granularity full"
            for flag, value in (
                ("--recompute-method", recompute.recompute_method),
                ("--recompute-num-layers", recompute.recompute_num_layers),
            )
            if value is not None
        ]
    if not has_experts and {"moe", "shared_experts"} & set(recompute.modules):
        found.append("--recompute-modules moe: no effect without --num-experts")
    return found
