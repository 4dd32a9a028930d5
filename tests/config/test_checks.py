"""config/checks.py. Reference: Megatron's validation rules, and the values that the messages propose, tried again."""

import dataclasses
import itertools
import re
from collections.abc import Callable

import pytest

from megatron_parm.config.checks import check_ranks, divisors, one_of
from megatron_parm.config.parallel import ParallelConfig
from megatron_parm.config.run import check_run
from megatron_parm.config.training import TrainingConfig
from megatron_parm.errors import ConfigError, LayoutError
from megatron_parm.parallel.grid import RankGrid
from tests.config.commands import config_of

LAYOUTS = [
    (8, "--num-experts 6 --expert-model-parallel-size 4", ["6", "4", "world 8"]),
    (4, "--num-experts 8 --expert-model-parallel-size 8", ["8", "4 ranks", "world 4"]),
    (8, "--num-experts 6 --expert-model-parallel-size 3", ["3", "8 ranks", "--num-experts 6"]),
    (8, "--num-experts 4 --expert-model-parallel-size 3", ["4", "3", "world 8"]),
    (8, "--num-experts 4 --expert-model-parallel-size 8", ["--num-experts 4", "8", "world 8"]),
    (8, "--num-experts 8 --expert-model-parallel-size 2 --expert-tensor-parallel-size 3", ["2", "3", "6", "8 ranks"]),
    (
        8,
        "--num-experts 8 --tensor-model-parallel-size 4 --expert-model-parallel-size 4",
        ["its default", "16", "8 ranks"],
    ),
    (4, "--tensor-model-parallel-size 3", ["3", "4 ranks"]),
    (4, "--tensor-model-parallel-size 8", ["8", "4 ranks"]),
    (4, "--pipeline-model-parallel-size 3", ["3", "must divide the 4 ranks"]),
    (2, "--expert-model-parallel-size 2", ["--expert-model-parallel-size 2", "none", "--num-experts"]),
]

OTHERS = [
    (
        2,
        "--micro-batch-size 2 --global-batch-size 6",
        ["--global-batch-size 6", "--micro-batch-size 2", "2 data-parallel"],
    ),
    (
        3,
        "--hidden-size 36 --tensor-model-parallel-size 3",
        ["--num-attention-heads 4", "--tensor-model-parallel-size 3"],
    ),
    (1, "--hidden-size 30", ["--hidden-size 30", "--num-attention-heads 4", "32"]),
    (1, "--group-query-attention --num-query-groups 3", ["--num-attention-heads 4", "--num-query-groups 3"]),
    (4, "--group-query-attention --num-query-groups 2 --tensor-model-parallel-size 4", ["groups 2", "size 4"]),
    (4, "--ffn-hidden-size 90 --tensor-model-parallel-size 4", ["--ffn-hidden-size 90", "size 4", "92"]),
    (4, "--num-experts 4 --moe-ffn-hidden-size 90 --expert-tensor-parallel-size 4", ["90", "size 4", "92"]),
    (1, "--hidden-size 16 --swiglu", ["--swiglu", "--ffn-hidden-size"]),
    (1, "--seq-length 32", ["--seq-length 32", "--max-position-embeddings 16"]),
    (1, "--swiglu --squared-relu", ["--swiglu", "--squared-relu"]),
    (1, "--normalization RMSNorm --apply-layernorm-1p", ["--apply-layernorm-1p", "RMSNorm"]),
    (1, "--position-embedding-type rope --rotary-percent 0.2", ["--rotary-percent 0.2"]),
    (1, "--min-lr 1", ["--min-lr 1.0", "--lr 0.001"]),
    (1, "--lr-warmup-init 1", ["--lr-warmup-init 1.0"]),
    (1, "--train-samples 64", ["--train-iters 4", "--train-samples 64"]),
    (1, "--lr-decay-samples 64", ["--lr-decay-samples 64", "--lr-decay-iters"]),
    (1, "--lr-warmup-samples 8", ["--lr-warmup-samples 8", "--lr-warmup-iters"]),
    (1, "--lr-wsd-decay-samples 8", ["--lr-wsd-decay-samples 8"]),
    (1, "--lr-warmup-fraction 0.1 --lr-warmup-iters 1", ["--lr-warmup-fraction 0.1", "--lr-warmup-iters"]),
    (1, "--lr-warmup-iters 4", ["--lr-warmup-iters 4", "4", "at most 3"]),
    (1, "--lr-decay-style WSD", ["--lr-wsd-decay-iters"]),
    (1, "--lr-decay-style WSD --lr-wsd-decay-iters 5", ["--lr-wsd-decay-iters 5", "at most 4"]),
    (1, "--start-weight-decay 0.1", ["--weight-decay-incr-style"]),
    (1, "--weight-decay-incr-style linear", ["--start-weight-decay", "--end-weight-decay"]),
    (1, "--override-lr-scheduler --use-checkpoint-lr-scheduler", ["keep one"]),
    (1, "--data-path x", ["--data-path", "--mock-data"]),
    (1, "--data-args-path x", ["--data-args-path and --mock-data"]),
    (1, "--train-data-path x", ["--mock-data and --train-data-path"]),
    (1, "--per-split-data-args-path x", ["--mock-data and --per-split-data-args-path"]),
    (1, "--tokenizer-type GPT2BPETokenizer", ["--vocab-file and --merge-file"]),
    (1, "--tokenizer-type SentencePieceTokenizer", ["--tokenizer-model"]),
    (1, "--split 0,0,0", ["--split 0,0,0"]),
    (1, "--finetune", ["--finetune needs --load"]),
    (1, "--ckpt-step 3", ["--ckpt-step needs --load"]),
    (1, "--exit-on-missing-checkpoint", ["--exit-on-missing-checkpoint needs --load"]),
    (1, "--num-experts 4 --moe-router-topk 5", ["--moe-router-topk 5", "--num-experts 4"]),
    (1, "--num-experts 4 --moe-router-topk 1", ["--moe-router-pre-softmax"]),
    (1, "--num-experts 4 --moe-expert-capacity-factor 0", ["--moe-expert-capacity-factor 0", "-1"]),
    (1, "--num-experts 4 --moe-layer-freq [0,0]", ["--moe-layer-freq [0,0]"]),
    (1, "--num-experts 4 --moe-layer-freq [0,1,1]", ["describes 3 layers", "--num-layers is 2"]),
    (
        1,
        "--num-experts 4 --moe-schedule s2",
        ["--moe-expert-capacity-factor", "for instance 2", "s1, s1h, baseline or auto"],
    ),
    (1, "--num-experts 4 --moe-schedule s2 --moe-expert-capacity-factor 2 --moe-eval-capacity-factor -1", ["eval"]),
    (
        4,
        "--num-experts 4 --moe-schedule s1 --tensor-model-parallel-size 4 --seq-length 15 --micro-batch-size 1",
        ["15"],
    ),
    (1, "--num-experts 4 --moe-schedule deepspeed", ["--moe-schedule deepspeed", "for instance 2"]),
    (1, "--num-experts 4 --moe-schedule s2h", ["--moe-schedule s2h", "for instance 2"]),
    (
        4,
        "--num-experts 4 --moe-schedule s1h --tensor-model-parallel-size 4 --seq-length 15 --micro-batch-size 1",
        ["s1h", "15"],
    ),
    (
        4,
        "--num-experts 4 --moe-schedule deepspeed --moe-expert-capacity-factor 2 --tensor-model-parallel-size 4 "
        "--expert-tensor-parallel-size 2",
        ["--expert-tensor-parallel-size 2", "--tensor-model-parallel-size 4"],
    ),
    (1, "--num-experts 4 --moe-pad-expert-input-to-capacity", ["--moe-pad-expert-input-to-capacity", "instance 2"]),
    (
        4,
        "--tensor-model-parallel-size 4 --sequence-parallel --seq-length 14",
        ["--sequence-parallel", "--seq-length 14", "--tensor-model-parallel-size 4", "16", "1, 2, 7 or 14"],
    ),
    (1, "--recompute-modules core_attn mla_up_proj", ["mla_up_proj", "core_attn, layernorm, mlp, moe, shared_experts"]),
    (1, "--recompute-modules moe_act", ["moe_act", "part of moe"]),
    (
        1,
        "--recompute-activations --recompute-num-layers 2",
        ["--recompute-num-layers 2", "leave out --recompute-num-layers", "--recompute-granularity full"],
    ),
    (1, "--recompute-activations --recompute-method block", ["--recompute-method block", "selective"]),
    (1, "--num-experts 4 --bp-pipeline-degree 2", ["--bp-pipeline-degree 2", "--pipeline-degree 1"]),
]

GOOD = [
    (1, ""),
    (8, "--tensor-model-parallel-size 2"),
    (
        8,
        "--num-experts 8 --tensor-model-parallel-size 2 --expert-model-parallel-size 2 --expert-tensor-parallel-size 2",
    ),
    (
        4,
        "--num-experts 4 --tensor-model-parallel-size 4 --expert-model-parallel-size 2 --expert-tensor-parallel-size 2",
    ),
    (4, "--num-experts 4 --expert-model-parallel-size 2 --expert-tensor-parallel-size 2"),
    (1, "--num-experts 4 --moe-schedule s2 --moe-expert-capacity-factor 2"),
    (1, "--num-experts 4 --moe-schedule s1"),
    (1, "--num-experts 4 --moe-pipeline-chunks auto"),
    (1, "--num-experts 4 --moe-pipeline-chunks 2"),
    (1, "--num-experts 4 --moe-schedule deepspeed --moe-expert-capacity-factor 2 --moe-pad-expert-input-to-capacity"),
    (1, "--num-experts 4 --pipeline-degree 1 --bp-pipeline-degree 1"),
    (1, "--num-experts 1 --moe-router-topk 1 --moe-router-pre-softmax"),
    (4, "--num-experts 4 --ffn-hidden-size 90 --moe-ffn-hidden-size 92 --tensor-model-parallel-size 4"),
    (1, "--lr-decay-style WSD --lr-wsd-decay-iters 2"),
    (1, "--weight-decay-incr-style cosine --start-weight-decay 0 --end-weight-decay 0.1"),
    (2, "--micro-batch-size 1 --global-batch-size 6"),
    (4, "--tensor-model-parallel-size 4 --sequence-parallel"),
    (1, "--recompute-granularity full --recompute-method block --recompute-num-layers 2"),
    (1, "--num-experts 4 --moe-layer-recompute --recompute-activations"),
    (1, "--sequence-parallel --seq-length 15"),
]


@pytest.mark.parametrize(("world", "flags", "named"), LAYOUTS, ids=[row[1] for row in LAYOUTS])
def test_a_layout_that_does_not_fit(world: int, flags: str, named: list[str]) -> None:
    with pytest.raises(LayoutError) as error:
        check_run(config_of(flags), world)
    for text in named:
        assert text in str(error.value)


@pytest.mark.parametrize(("world", "flags", "named"), OTHERS, ids=[row[1] for row in OTHERS])
def test_settings_that_do_not_go_together(world: int, flags: str, named: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        check_run(config_of(flags), world)
    for text in named:
        assert text in str(error.value)


@pytest.mark.parametrize(("world", "flags"), GOOD, ids=[row[1] for row in GOOD])
def test_settings_that_go_together(world: int, flags: str) -> None:
    check_run(config_of(flags), world)


@pytest.mark.parametrize(("world", "flags", "_named"), LAYOUTS + OTHERS, ids=[row[1] for row in LAYOUTS + OTHERS])
def test_a_proposed_size_works(world: int, flags: str, _named: list[str]) -> None:
    """Take the first `use --flag N` of a message: with it, the same complaint is gone."""
    with pytest.raises(ConfigError) as before:
        check_run(config_of(flags), world)
    proposal = re.search(r"use (--[a-z-]+) (\d+)", str(before.value))
    if proposal is None:
        return
    try:
        check_run(config_of(f"{flags} {proposal[1]} {proposal[2]}"), world)
    except ConfigError as after:
        assert str(after).split()[0] != str(before.value).split()[0]  # another rule may come next


@pytest.mark.parametrize("world", [1, 2, 4, 6, 8])
def test_layouts_pass_exactly_if_the_grid_takes_them(world: int) -> None:
    """Reference: the grid of parallel/grid.py, written apart from these checks."""
    sizes = (1, 2, 3, 4, 8)
    for tp, ep, esp in itertools.product((1, 2, 4), sizes, sizes):
        parallel = ParallelConfig(
            tensor_model_parallel_size=tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=esp
        )
        assert _refuses(check_ranks, parallel, 24, world) == _refuses(RankGrid, world, tp, 1, ep, esp)


def _refuses(call: Callable[..., object], *words: object) -> bool:
    try:
        call(*words)
    except LayoutError:
        return True
    return False


def test_a_run_needs_a_length_unless_it_only_evaluates() -> None:
    config = config_of()
    no_length = dataclasses.replace(config, training=TrainingConfig(micro_batch_size=2))
    with pytest.raises(ConfigError, match="--train-iters or --train-samples is required"):
        check_run(no_length, 1)
    check_run(dataclasses.replace(config, training=TrainingConfig(micro_batch_size=2, skip_train=True)), 1)


def test_texts_of_numbers() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert one_of([1]) == "1"
    assert one_of([1, 2]) == "1 or 2"
    assert one_of([1, 2, 4]) == "1, 2 or 4"
    assert one_of([]) == "none"
    assert one_of(list(range(20))).endswith("7 ...")
