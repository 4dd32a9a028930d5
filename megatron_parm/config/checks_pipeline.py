"""Every rule that ties pipeline stages to layers, micro-batches and other settings. Floor 1.

As in checks.py: the flags, the values, the rule, a value that would work.
"""

from collections.abc import Iterable

from megatron_parm.config.numbers import divisors, one_of
from megatron_parm.config.parallel import ParallelConfig
from megatron_parm.config.recompute import RecomputeConfig
from megatron_parm.config.replicas import ReplicaConfig
from megatron_parm.config.stage_layers import layers_by_rank
from megatron_parm.errors import ConfigError, LayoutError

_LAYERS_PER = "--num-layers-per-virtual-pipeline-stage"
_STAGES_PER = "--num-virtual-stages-per-pipeline-rank"
_FIRST = "--decoder-first-pipeline-num-layers"
_LAST = "--decoder-last-pipeline-num-layers"


def check_stages(parallel: ParallelConfig, num_layers: int) -> None:
    """Check that the layers can be laid on the stages. Raises ConfigError or LayoutError."""
    pp = parallel.pipeline_model_parallel_size
    if pp == 1:
        _check_no_pipeline(parallel)
        return
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    fixed = [count for count in (first, last) if count is not None]
    others, rest = pp - len(fixed), num_layers - sum(fixed)
    if not fixed and num_layers % pp:
        near = [layers for layers in (num_layers // pp * pp, num_layers // pp * pp + pp) if layers]
        fitting = [size for size in divisors(num_layers) if size <= pp]
        placed = f" {_LAST} {num_layers - (pp - 1) * (num_layers // pp)}," if num_layers // pp else ""
        raise LayoutError(
            f"--num-layers {num_layers} over --pipeline-model-parallel-size {pp} does not come out even; use{placed} "
            f"--pipeline-model-parallel-size {one_of(fitting)}, or --num-layers {one_of(near)}"
        )
    if others and (rest < others or rest % others):
        named = " and ".join(f"{flag} {count}" for flag, count in ((_FIRST, first), (_LAST, last)) if count is not None)
        working = [count for count in range(1, num_layers) if (num_layers - count) % (pp - 1) == 0]
        raise LayoutError(
            f"{named} leave {rest} of --num-layers {num_layers} for the other {others} of "
            f"--pipeline-model-parallel-size {pp} ranks, which must be at least 1 each and come out even; use only "
            f"{_LAST} with {one_of(working[-8:])}"
        )
    if not others and rest:
        raise LayoutError(
            f"{_FIRST} {first} and {_LAST} {last} must add up to --num-layers {num_layers} on "
            f"--pipeline-model-parallel-size {pp}; use {_FIRST} {first} alone, if {num_layers} is more than that"
        )
    _check_virtual_stages(parallel, num_layers)


def check_zero_bubble(
    parallel: ParallelConfig, num_layers: int, replicas: ReplicaConfig, recompute: RecomputeConfig
) -> None:
    """Check that nothing asks for what a backward pass in two halves cannot give. Raises ConfigError."""
    if parallel.pipeline_schedule != "zero-bubble":
        return
    other = "interleaved" if parallel.virtual_stages(num_layers) > 1 else "1f1b"
    remedy = f"leave it out, or use --pipeline-schedule {other}"
    if replicas.overlap_grad_reduce:
        raise ConfigError(
            "--overlap-grad-reduce with --pipeline-schedule zero-bubble: gradients of weights come in a pass of their "
            f"own, without the events by which a reduction starts; {remedy}"
        )
    if recompute.recompute_granularity is not None:
        raise ConfigError(
            f"--recompute-granularity {recompute.recompute_granularity} with --pipeline-schedule zero-bubble would run "
            f"a layer again for every half of its backward pass; {remedy}"
        )


def _check_no_pipeline(parallel: ParallelConfig) -> None:
    given = [
        f"{flag} {value}"
        for flag, value in (
            (_LAYERS_PER, parallel.num_layers_per_virtual_pipeline_stage),
            (_STAGES_PER, parallel.num_virtual_stages_per_pipeline_rank),
            (_FIRST, parallel.decoder_first_pipeline_num_layers),
            (_LAST, parallel.decoder_last_pipeline_num_layers),
        )
        if value is not None and (flag, value) != (_STAGES_PER, 1)
    ]
    if parallel.pipeline_schedule != "auto":
        given.append(f"--pipeline-schedule {parallel.pipeline_schedule}")
    if given:
        raise LayoutError(
            f"{' and '.join(given)} without a pipeline: they need --pipeline-model-parallel-size 2 or more; add it, or "
            "leave them out"
        )


def _check_virtual_stages(parallel: ParallelConfig, num_layers: int) -> None:
    pp = parallel.pipeline_model_parallel_size
    per_stage, count = parallel.num_layers_per_virtual_pipeline_stage, parallel.num_virtual_stages_per_pipeline_rank
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    by_rank = layers_by_rank(num_layers, pp, first, last)
    common = [size for size in divisors(min(by_rank)) if all(layers % size == 0 for layers in by_rank)]
    if per_stage is not None and count is not None:
        raise ConfigError(f"{_LAYERS_PER} {per_stage} and {_STAGES_PER} {count} say the same thing; keep one of them")
    if per_stage is not None and (first is not None or last is not None):
        raise ConfigError(
            f"{_LAYERS_PER} {per_stage} with {_FIRST} or {_LAST}: ranks of unlike numbers of layers are cut into as "
            f"many stages each; use {_STAGES_PER} {one_of(common)} instead"
        )
    if per_stage is not None and by_rank[0] % per_stage:
        raise LayoutError(
            f"{_LAYERS_PER} {per_stage} must divide the {by_rank[0]} layers of a pipeline rank (--num-layers "
            f"{num_layers} / --pipeline-model-parallel-size {pp}); use {one_of(divisors(by_rank[0]))}"
        )
    if count is not None and count not in common:
        raise LayoutError(
            f"{_STAGES_PER} {count} must divide the layers of every pipeline rank, which are "
            f"{', '.join(map(str, by_rank))} (--num-layers {num_layers}, --pipeline-model-parallel-size {pp}); use "
            f"{one_of(common)}"
        )
    stages, schedule = parallel.virtual_stages(num_layers), parallel.pipeline_schedule
    if schedule == "1f1b" and stages > 1:
        raise ConfigError(
            f"--pipeline-schedule 1f1b runs one stage a rank, and there are {stages} virtual ones; use "
            f"--pipeline-schedule interleaved or zero-bubble, or leave out {_LAYERS_PER} and {_STAGES_PER}"
        )
    if schedule == "interleaved" and stages == 1:
        remedy = f"{_STAGES_PER} {one_of(common[1:])}" if len(common) > 1 else "--pipeline-schedule 1f1b"
        raise ConfigError(
            f"--pipeline-schedule interleaved needs virtual stages, and every rank has one stage; use {remedy}"
        )


def check_micro_batches(parallel: ParallelConfig, num_layers: int, batch_sizes: Iterable[int], at_once: int) -> None:
    """Check that the pipeline can run the micro-batches of every global batch size of the run.

    `at_once`: sequences of one micro-batch over all data-parallel ranks, which divides every size.
    """
    pp, name = parallel.pipeline_model_parallel_size, parallel.schedule_of_pipeline(num_layers)
    if pp == 1:
        return
    for size in batch_sizes:
        count = size // at_once
        if not runs_micro_batches(name, pp, count):
            rule = f"at least {pp}" if name == "1f1b" else f"fewer than {2 * pp}, or a multiple of {pp}"
            working = sorted({max(count // pp, 1) * pp * at_once, -(-count // pp) * pp * at_once})
            raise ConfigError(
                f"a global batch of {size} samples is {count} micro-batches on each data-parallel rank; "
                f"--pipeline-schedule {name} over --pipeline-model-parallel-size {pp} runs {rule}; use a global batch "
                f"of {one_of(working)} samples, or a smaller --micro-batch-size"
            )


def runs_micro_batches(schedule: str, pp: int, count: int) -> bool:
    """Whether torch's schedule of that name runs so many micro-batches: 1f1b wants its pipeline full once, the others
    whole rounds of equal size.
    """
    return count >= pp if schedule == "1f1b" else count % max(1, count // pp) == 0
