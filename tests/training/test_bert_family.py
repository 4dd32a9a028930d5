"""Whole runs of a BERT. References: the same run on one process, closed forms, and the run without a break."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_parm.data.batches import Batch
from megatron_parm.data.bert_masking import MaskingRules, make_bert_sample
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.training.bert_family import BERT, MASKED_WORDS, MASKED_WORDS_AND_ORDER
from tests.data.bert_texts import VOCABULARY, random_sentences, write_sentences, write_vocabulary
from tests.harness.layouts import MOE_LAYOUTS, SINGLE, Layout
from tests.harness.pools import Pools
from tests.models.bert_cases import bert_shape, build_bert_model
from tests.training.runs import Outcome, run_training, same_bits

EQUAL = 1e-5  # float32, sums in another order
TINY = """
--num-layers 4 --hidden-size 16 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
--attention-dropout 0 --hidden-dropout 0 --init-method-std 0.1 --make-vocab-size-divisible-by 1
--micro-batch-size 2 --global-batch-size 16 --train-iters 3 --lr 1e-2 --min-lr 1e-3 --eval-iters 1 --eval-interval 2
--split 80,10,10 --num-workers 0 --log-interval 1 --progress-bar off
--tokenizer-type BertWordPieceLowerCase --distributed-backend gloo
"""
MOE = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 --moe-expert-capacity-factor 2"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Flags that name a vocabulary and a corpus of sentences."""
    folder = tmp_path_factory.mktemp("bert")
    write_vocabulary(folder / "vocab.txt")
    prefix = write_sentences(folder / "text", random_sentences(150))
    return f"--vocab-file {folder / 'vocab.txt'} --data-path {prefix}"


def _bert(ctx: ParallelContext, argv: list[str]) -> Outcome:
    return run_training(ctx, argv, family=BERT)


def _run(pools: Pools, layout: Layout, *argv: str) -> list[Outcome]:
    outcomes: list[Outcome] = pools.run(layout, _bert, " ".join((TINY, *argv)).split())
    assert all(outcome.error is None for outcome in outcomes), outcomes[0].error
    return outcomes


def _sizes(layout: Layout) -> str:
    return (
        f"--tensor-model-parallel-size {layout.tp} --expert-model-parallel-size {layout.ep} "
        f"--expert-tensor-parallel-size {layout.esp} --pipeline-model-parallel-size {layout.pp}"
    )


@pytest.fixture(scope="module")
def alone(pools: Pools, corpus: str) -> dict[str, Outcome]:
    """By layout of norms: the MoE run on one process."""
    return {kind: _run(pools, SINGLE, corpus, MOE, f"--bert-layout {kind}")[0] for kind in ("megatron", "original")}


def _compare(pools: Pools, corpus: str, alone: dict[str, Outcome], layout: Layout, kind: str, more: str) -> None:
    assert len(alone[kind].column("sop_loss")) == 3 and alone[kind].column("sop_loss", "valid")
    for outcome in _run(pools, layout, corpus, MOE, f"--bert-layout {kind}", _sizes(layout), more):
        for name in ("lm_loss", "sop_loss", "load_balancing_loss", "grad_norm"):
            assert outcome.column(name) == pytest.approx(alone[kind].column(name), rel=EQUAL)
        for name in ("lm_loss", "sop_loss"):
            assert outcome.column(name, "valid") == pytest.approx(alone[kind].column(name, "valid"), rel=EQUAL)


# every schedule, every axis, with and without sequence parallelism, on 2, 4 and 8 processes
ROWS = [
    (Layout(2, tp=2, esp=2), "baseline", "megatron", False),
    (Layout(2, ep=2), "s2", "original", False),
    (Layout(4, tp=2, esp=2, ep=2), "deepspeed", "original", True),
    (Layout(4, tp=2, ep=2), "s1", "megatron", True),
    (Layout(4, tp=4, esp=2, ep=2), "s1", "original", False),
    (Layout(8, tp=2, esp=2, ep=2), "s1h", "megatron", False),
    (Layout(8, tp=4, esp=2, ep=4), "s2h", "original", True),
    (Layout(8, tp=2, esp=4, ep=2), "s2", "megatron", True),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row)))
def test_layouts_and_schedules_tell_the_losses_of_one_process(
    pools: Pools, corpus: str, alone: dict[str, Outcome], row: tuple[Layout, str, str, bool]
) -> None:
    layout, schedule, kind, is_cut = row
    more = f"--moe-schedule {schedule}" + (" --sequence-parallel" if is_cut else "")
    _compare(pools, corpus, alone, layout, kind, more)


def _can_run(layout: Layout, schedule: str, kind: str, is_cut: bool) -> bool:
    return (schedule != "deepspeed" or layout.esp in (1, layout.tp)) and (not is_cut or layout.tp > 1)


@pytest.mark.full
@pytest.mark.cover(
    layout=MOE_LAYOUTS[1:],
    schedule=("baseline", "deepspeed", "s1", "s2", "s1h", "s2h"),
    kind=("megatron", "original"),
    is_cut=(False, True),
    where=_can_run,
)
def test_every_layout_and_schedule_tells_the_losses_of_one_process(
    pools: Pools, corpus: str, alone: dict[str, Outcome], layout: Layout, schedule: str, kind: str, is_cut: bool
) -> None:
    more = f"--moe-schedule {schedule}" + (" --sequence-parallel" if is_cut else "")
    _compare(pools, corpus, alone, layout, kind, more)


# stages of a pipeline: the order of passes, virtual stages, every other axis beside them
STAGES = [
    (Layout(2, pp=2), "baseline", "megatron", ""),
    (Layout(2, pp=2), "s1", "original", "--pipeline-schedule zero-bubble"),
    (Layout(4, pp=4), "baseline", "original", ""),
    (Layout(4, pp=2), "s1", "megatron", "--num-layers-per-virtual-pipeline-stage 1"),
    (Layout(8, tp=2, esp=2, ep=2, pp=2), "s2", "original", "--sequence-parallel"),
]


@pytest.mark.parametrize("row", STAGES, ids=lambda row: "-".join(map(str, row)))
def test_stages_of_a_pipeline_tell_the_losses_of_one_process(
    pools: Pools, corpus: str, alone: dict[str, Outcome], row: tuple[Layout, str, str, str]
) -> None:
    """Heads and embedding on two ranks, with one weight between them (FC-34)."""
    layout, schedule, kind, more = row
    _compare(pools, corpus, alone, layout, kind, f"--moe-schedule {schedule} {more}")


@pytest.mark.parametrize("layout", [Layout(2, tp=2), Layout(4, tp=2), Layout(8, tp=4)], ids=str)
def test_a_dense_bert_without_the_order_head_tells_the_losses_of_one_process(
    pools: Pools, corpus: str, layout: Layout
) -> None:
    argv = (corpus, "--bert-no-binary-head --micro-batch-size 1")
    alone = _run(pools, SINGLE, *argv)[0]
    assert "sop_loss" not in alone.of("train")[0]
    for outcome in _run(pools, layout, *argv, f"--tensor-model-parallel-size {layout.tp}"):
        for name in ("lm_loss", "grad_norm"):
            assert outcome.column(name) == pytest.approx(alone.column(name), rel=EQUAL)


def _batch(number: int = 3) -> Batch:
    sentences = random_sentences(1)[0][:4]
    rules = MaskingRules(32, 0.15, True)
    samples = [
        make_bert_sample(sentences, 20, rules, VOCABULARY, np.random.RandomState(seed)) for seed in range(number)
    ]
    columns: Any = {
        name: torch.stack([torch.from_numpy(sample[name]) for sample in samples])  # type: ignore[literal-required]
        for name in samples[0]
    }
    return columns  # type: ignore[no-any-return]


def test_sums_and_counts_are_of_masked_words_and_of_samples() -> None:
    model = build_bert_model(bert_shape(vocab_size=60, padded_vocab_size=64, max_positions=32), dtype=torch.float64)
    batch: Any = _batch()
    output = model(batch["text"], batch["padding_mask"], batch["types"], batch["labels"], batch["is_random"])
    sums, counts = MASKED_WORDS_AND_ORDER.sums(model, batch), MASKED_WORDS_AND_ORDER.counts(batch)
    words = sum(output.words[row, place] for row, place in (batch["labels"] >= 0).nonzero().tolist())
    torch.testing.assert_close(sums, torch.stack([words, output.order.sum()]))
    assert counts.tolist() == [int((batch["labels"] >= 0).sum()), 3]
    alone = build_bert_model(
        bert_shape(vocab_size=60, padded_vocab_size=64, max_positions=32), dtype=torch.float64, has_order_head=False
    )
    assert MASKED_WORDS.sums(alone, batch).shape == MASKED_WORDS.counts(batch).shape == (1,)


def test_what_stands_at_padding_changes_no_loss() -> None:
    """Also where the padding id is no type of segment, as it is then in the types too."""
    model = build_bert_model(bert_shape(vocab_size=60, padded_vocab_size=64, max_positions=32), dtype=torch.float64)
    batch: Any = _batch()
    before = MASKED_WORDS_AND_ORDER.sums(model, batch)
    is_padding = batch["padding_mask"] == 0
    assert is_padding.any()
    batch["text"][is_padding], batch["types"][is_padding] = 59, 59
    assert torch.equal(before, MASKED_WORDS_AND_ORDER.sums(model, batch))


def test_texts_of_which_hardly_a_word_is_masked_stay_finite(pools: Pools, corpus: str, tmp_path: Path) -> None:
    """FC-10: two words, micro-batches of one sample, a probability of 0.01: nothing is masked, the loss is 0."""
    prefix = write_sentences(tmp_path / "short", [[[5, 7], [8, 10]]] * 60)
    argv = (corpus, f"--data-path {prefix} --mask-prob 0.01 --micro-batch-size 1 --train-iters 20 --eval-iters 0")
    for outcome in _run(pools, Layout(2), *argv, "--seq-length 8"):
        losses = outcome.column("lm_loss")
        assert len(losses) == 20 and all(0 <= loss < 10 for loss in losses) and min(losses) == 0.0
        assert all(0 < norm < 100 for norm in outcome.column("grad_norm"))


@pytest.mark.parametrize("layout", [SINGLE, Layout(4, tp=2, ep=2)], ids=str)
def test_a_resume_goes_on_bit_for_bit(pools: Pools, corpus: str, tmp_path: Path, layout: Layout) -> None:
    """FC-11, with dropout."""
    dropout = "--attention-dropout 0.1 --hidden-dropout 0.1 --train-iters 4"
    argv = (corpus, MOE, _sizes(layout), dropout, f"--save {tmp_path} --load {tmp_path}")
    straight = _run(pools, layout, *argv[:-1])
    _run(pools, layout, *argv, "--exit-interval 2")
    for ended, whole in zip(_run(pools, layout, *argv), straight, strict=True):
        assert ended.column("sop_loss") == whole.column("sop_loss")[2:]
        assert same_bits(ended.state, whole.state) == []


def test_another_layout_of_norms_or_a_missing_head_is_another_model(pools: Pools, corpus: str, tmp_path: Path) -> None:
    _run(pools, SINGLE, corpus, f"--train-iters 1 --eval-iters 0 --save {tmp_path}")
    more = f"--load {tmp_path} --bert-layout original --bert-no-binary-head --mask-prob 0.2"
    error = pools.run(SINGLE, _bert, f"{TINY} {corpus} {more}".split())[0].error
    assert error is not None and error[:2] == ("CheckpointError", 21)
    for words in (
        "--bert-layout: original here, megatron",
        "--bert-no-binary-head: True here",
        "--mask-prob: 0.2 here",
    ):
        assert words in error[2]


def test_a_gpt_is_not_resumed_as_a_bert(pools: Pools, corpus: str, tmp_path: Path) -> None:
    _run(pools, SINGLE, corpus, f"--train-iters 1 --eval-iters 0 --save {tmp_path}")
    argv = f"{TINY} {corpus} --train-iters 1 --load {tmp_path}".split()
    error = pools.run(SINGLE, run_training, argv)[0].error
    assert error is not None and "--bert-layout: None here, megatron in the checkpoint" in error[2]
