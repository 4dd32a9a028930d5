"""Rules of pipeline stages. Reference: Megatron's validation; every message's remedy is tried."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from megatron_parm.config.checks_pipeline import runs_micro_batches
from megatron_parm.config.run import RunConfig, check_run, resolve
from megatron_parm.errors import ConfigError
from megatron_parm.pipeline.stages import SCHEDULES, ScheduleName
from tests.config.commands import config_of

PP = "--pipeline-model-parallel-size"
LAYERS_PER, STAGES_PER = "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"
FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
LONG = "--num-layers 8 --global-batch-size 16"

# ranks, flags, what the message names, the remedy that it proposes: flags to add
REFUSED = [
    (2, f"{STAGES_PER} 2", [f"{STAGES_PER} 2", f"{PP} 2"], f"{PP} 2 --num-layers 4 --global-batch-size 8"),
    (2, f"{FIRST} 1 --pipeline-schedule 1f1b", [f"{FIRST} 1 and --pipeline-schedule 1f1b", f"{PP} 2"],
     f"{PP} 2 --global-batch-size 8"),
    (2, f"{PP} 2 --num-layers 7 --global-batch-size 8", ["--num-layers 7", f"{PP} 2", f"{LAST} 4"], f"{LAST} 4"),
    (2, f"{PP} 2 --num-layers 7 --global-batch-size 8", ["--num-layers 6 or 8"], "--num-layers 8"),
    (4, f"{PP} 4 {LONG} {FIRST} 7", [f"{FIRST} 7 leave 1 of --num-layers 8", "other 3", "2 or 5"],
     f"--decoder-first-pipeline-num-layers 2 {LAST} 2"),
    (4, f"{PP} 4 {LONG} {FIRST} 3 {LAST} 2", [f"{FIRST} 3 and {LAST} 2 leave 3", "other 2"], f"{FIRST} 2 {LAST} 2"),
    (2, f"{PP} 2 {LONG} {FIRST} 3 {LAST} 4", [f"{FIRST} 3 and {LAST} 4", "--num-layers 8"], f"{LAST} 5"),
    (2, f"{PP} 2 {LONG} {LAYERS_PER} 2 {STAGES_PER} 2", [f"{LAYERS_PER} 2 and {STAGES_PER} 2", "keep one"], None),
    (2, f"{PP} 2 {LONG} {LAYERS_PER} 1 {LAST} 2", [f"{LAYERS_PER} 1", f"use {STAGES_PER} 1 or 2"], None),
    (2, f"{PP} 2 {LONG} {LAYERS_PER} 3", [f"{LAYERS_PER} 3", "the 4 layers", "1, 2 or 4"], f"{LAYERS_PER} 2"),
    (2, f"{PP} 2 {LONG} {STAGES_PER} 3", [f"{STAGES_PER} 3", "4, 4", "1, 2 or 4"], f"{STAGES_PER} 4"),
    (2, f"{PP} 2 {LONG} {STAGES_PER} 2 --pipeline-schedule 1f1b", ["schedule 1f1b", "2 virtual"],
     "--pipeline-schedule interleaved"),
    (2, f"{PP} 2 {LONG} --pipeline-schedule interleaved", ["interleaved", f"{STAGES_PER} 2 or 4"], f"{STAGES_PER} 2"),
    (2, f"{PP} 2 --pipeline-schedule interleaved --global-batch-size 8", ["--pipeline-schedule 1f1b"],
     "--pipeline-schedule 1f1b"),
    (2, f"{PP} 2 --global-batch-size 2", ["2 samples", "1 micro-batches", "1f1b", "at least 2", "of 4 samples"],
     "--global-batch-size 4"),
    (2, f"{PP} 2 --num-layers 4 {STAGES_PER} 2 --global-batch-size 10", ["interleaved", "multiple of 2", "8 or 12"],
     "--global-batch-size 12"),
    (2, f"{PP} 2 --num-layers 4 --pipeline-schedule zero-bubble --global-batch-size 14", ["zero-bubble", "12 or 16"],
     "--global-batch-size 16"),
    (2, f"{PP} 2 --global-batch-size 8 --pipeline-schedule zero-bubble --overlap-grad-reduce",
     ["--overlap-grad-reduce", "zero-bubble", "use --pipeline-schedule 1f1b"], "--pipeline-schedule 1f1b"),
    (2, f"{PP} 2 --global-batch-size 8 --pipeline-schedule zero-bubble --recompute-granularity full "
     "--recompute-method uniform", ["--recompute-granularity full", "zero-bubble", "use --pipeline-schedule 1f1b"],
     "--pipeline-schedule 1f1b"),
    (2, f"{PP} 2 {LONG} {STAGES_PER} 2 --pipeline-schedule zero-bubble --recompute-activations",
     ["--recompute-granularity selective", "use --pipeline-schedule interleaved"], "--pipeline-schedule interleaved"),
    (4, f"{PP} 4 {LONG} --train-samples 64 --rampup-batch-size 4 4 32", ["4 samples is 2 micro", "of 8 samples"],
     "--rampup-batch-size 8 4 32"),
]  # fmt: skip


def _config(flags: str) -> RunConfig:
    config = config_of(flags)
    if config.training.train_samples is None:
        return config
    return dataclasses.replace(config, training=dataclasses.replace(config.training, train_iters=None))


@pytest.mark.parametrize(("world", "flags", "named", "remedy"), REFUSED, ids=[f"{row[1]} {row[3]}" for row in REFUSED])
def test_stages_that_do_not_fit_are_refused_with_a_remedy_that_works(
    world: int, flags: str, named: list[str], remedy: str | None
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_run(_config(flags), world)
    for part in named:
        assert part in str(caught.value)
    if remedy is not None:
        check_run(_config(f"{flags} {remedy}"), world)


@pytest.mark.parametrize(
    ("flags", "stages"),
    [
        ("", (range(2),)),
        (f"{PP} 2 --global-batch-size 8", (range(1), range(1, 2))),
        (f"{PP} 2 {LONG} {LAYERS_PER} 2", (range(2), range(2, 4), range(4, 6), range(6, 8))),
        (f"{PP} 2 {LONG} {STAGES_PER} 2", (range(2), range(2, 4), range(4, 6), range(6, 8))),
        (f"{PP} 2 {LONG} {LAST} 3", (range(5), range(5, 8))),
        (f"{PP} 2 {LONG} {STAGES_PER} 1 --pipeline-schedule 1f1b", (range(4), range(4, 8))),
    ],
)
def test_which_layers_a_run_puts_on_which_stage(flags: str, stages: tuple[range, ...]) -> None:
    config = config_of(flags)
    check_run(config, 2 if PP in flags else 1)
    assert config.parallel.stages(config.model.num_layers) == stages


def test_a_growing_batch_is_counted_in_samples_and_cut_evenly() -> None:
    with pytest.raises(ConfigError, match="--train-samples"):
        check_run(config_of("--global-batch-size 16 --rampup-batch-size 8 4 32"), 1)
    with pytest.raises(ConfigError, match=r"6 samples is no multiple of 4.*use --rampup-batch-size 8 8 32"):
        check_run(_config("--global-batch-size 16 --train-samples 640 --rampup-batch-size 6 5 32"), 2)
    config = _config("--global-batch-size 16 --train-samples 640 --rampup-batch-size 8 4 32")
    check_run(config, 2)
    assert resolve(config, 2).train_iterations == 2 + 2 + (640 - 40) // 16  # 8, 8 | 12, 12 | 16 ...


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero-bubble"])
def test_torch_builds_a_schedule_for_exactly_the_counts_that_pass(schedule: ScheduleName, pp: int) -> None:
    """Reference: the constructors of torch.distributed.pipelining, which need no process group for this."""
    for count in range(1, 14):
        stage = SimpleNamespace(num_stages=pp, group_size=pp, group_rank=0, stage_index=0, submod=torch.nn.Identity())
        try:
            SCHEDULES[schedule](stage if schedule == "1f1b" else [stage], count, scale_grads=False)
        except ValueError:
            builds = False
        else:
            builds = True
        assert runs_micro_batches(schedule, pp, count) == builds, count
