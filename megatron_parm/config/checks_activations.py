"""Rules about which activations a rank holds and keeps. Floor 1; `checks.py` says what a rule is."""

from megatron_parm.config.checks import divisors, one_of
from megatron_parm.config.parallel import ParallelConfig
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
