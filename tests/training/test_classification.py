"""Classification of texts. References: metrics worked by hand, one process, the checkpoint's own weights."""

import json
import math
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from megatron_parm.parallel.context import ParallelContext
from megatron_parm.training.bert_family import BERT
from megatron_parm.training.classification import CLASSIFIER, Metrics, tell_metrics
from tests.data.bert_texts import PIECES, random_sentences, write_sentences, write_vocabulary
from tests.harness.layouts import SINGLE, Layout
from tests.harness.pools import Pools
from tests.models.test_gpt import randomise
from tests.training.runs import Outcome, Text, make_trainer, run_training, same_bits, state_of
from tests.training.test_bert_family import MOE, TINY

EQUAL = 1e-5  # float32, sums in another order
CLASS = "--class-names yes no maybe --classifier-dropout 0"


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Flags that name a vocabulary and pairs of texts whose first word tells the class."""
    folder = tmp_path_factory.mktemp("classes")
    write_vocabulary(folder / "vocab.txt")
    pieces = (folder / "vocab.txt").read_text().split()
    words = [piece for piece in pieces if piece[0] not in "[#"]
    names = ("yes", "no", "maybe")
    for file, count in (("train", 60), ("valid", 23), ("test", 10)):
        rows = [
            {"label": names[n % 3], "text": f"{words[n % 3]} {words[n % 7]}", "text_b": words[n % 5]}
            for n in range(count)
        ]
        (folder / f"{file}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return (
        f"{CLASS} --vocab-file {folder}/vocab.txt --train-data-path {folder}/train.jsonl "
        f"--valid-data-path {folder}/valid.jsonl --test-data-path {folder}/test.jsonl"
    )


def _train(ctx: ParallelContext, argv: list[str]) -> Outcome:
    return run_training(ctx, argv, family=CLASSIFIER)


def _bert(ctx: ParallelContext, argv: list[str]) -> Outcome:
    return run_training(ctx, argv, family=BERT)


def _sizes(layout: Layout) -> str:
    return (
        f"--tensor-model-parallel-size {layout.tp} --expert-model-parallel-size {layout.ep} "
        f"--expert-tensor-parallel-size {layout.esp} --pipeline-model-parallel-size {layout.pp}"
    )


def _words(*parts: str) -> list[str]:
    return " ".join((TINY, *parts)).split()


ROWS = [
    (Layout(2, tp=2), "--sequence-parallel"),
    (Layout(2, ep=2), "--use-distributed-optimizer"),
    (Layout(4, pp=2), "--bert-layout original"),
    (Layout(8, tp=2, esp=2, ep=2, pp=2), ""),
]


@pytest.fixture(scope="module")
def alone(pools: Pools, task: str) -> dict[str, Outcome]:
    """By layout of norms: the run on one process."""
    return {kind: pools.run(SINGLE, _train, _words(task, MOE, kind))[0] for kind in ("", "--bert-layout original")}


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_layouts_tell_the_losses_of_one_process(
    pools: Pools, task: str, alone: dict[str, Outcome], row: tuple[Layout, str]
) -> None:
    layout, more = row
    wanted = alone[more if "layout" in more else ""]
    assert wanted.error is None, wanted.error
    for outcome in pools.run(layout, _train, _words(task, MOE, more, _sizes(layout))):
        assert outcome.error is None, outcome.error
        for name in ("lm_loss", "grad_norm"):
            assert outcome.column(name) == pytest.approx(wanted.column(name), rel=EQUAL)
        assert outcome.column("lm_loss", "valid") == pytest.approx(wanted.column("lm_loss", "valid"), rel=EQUAL)


def _measured(ctx: ParallelContext, argv: list[str], folder: str) -> str:
    trainer = make_trainer(ctx, [*argv, "--save", folder], [], None, CLASSIFIER)
    trainer.run.log.say = lambda text: None  # type: ignore[method-assign]  # a test's log has no stream
    trainer.train()
    tell_metrics(trainer.run)
    return (Path(folder) / "metrics.json").read_text() if ctx.rank == 0 else ""


LEARNING = "--num-layers 2 --train-iters 30 --eval-iters 0 --lr 1e-2"


@pytest.fixture(scope="module")
def learned(pools: Pools, task: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a classifier that has learned the task, and what it told of itself."""
    folder = tmp_path_factory.mktemp("learned")
    return folder, pools.run(SINGLE, _measured, _words(task, LEARNING), str(folder))[0]


@pytest.mark.parametrize("layout", [Layout(2), Layout(2, pp=2), Layout(4, tp=2)], ids=str)
def test_metrics_count_every_text_once_on_every_layout(
    pools: Pools, task: str, learned: tuple[Path, str], tmp_path: Path, layout: Layout
) -> None:
    """23 and 10 texts, which no batch divides; the task is learned."""
    folder, told = learned
    argv = [*_words(task, LEARNING, _sizes(layout)), "--load", str(folder)]
    found, wanted = json.loads(pools.run(layout, _measured, argv, str(tmp_path))[0]), json.loads(told)
    assert {name: figures["samples"] for name, figures in found.items()} == {"valid": 23, "test": 10}
    assert found["valid"]["accuracy"] > 0.8
    for name, figures in found.items():
        assert figures == pytest.approx(wanted[name], abs=1e-12)


def test_a_resume_goes_on_bit_for_bit(pools: Pools, task: str, tmp_path: Path) -> None:
    argv = _words(task, MOE, "--attention-dropout 0.1 --classifier-dropout 0.2 --train-iters 4")
    (straight,) = pools.run(SINGLE, _train, argv)
    folder = ["--save", str(tmp_path), "--load", str(tmp_path)]
    pools.run(SINGLE, _train, [*argv, *folder, "--exit-interval", "2"])
    (ended,) = pools.run(SINGLE, _train, [*argv, *folder])
    assert ended.error is None, ended.error
    assert same_bits(ended.state, straight.state) == []


def _started(ctx: ParallelContext, argv: list[str]) -> dict[str, Tensor]:
    return state_of(make_trainer(ctx, argv, [], Text(), CLASSIFIER))


HEADS = {"model.classification_head.weight", "model.classification_head.bias"}


@pytest.fixture(scope="module")
def pretrained(pools: Pools, task: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """The folder of a pretrained BERT, and how its training ended."""
    folder = tmp_path_factory.mktemp("pretrained")
    vocabulary = next(word for word in task.split() if word.endswith("vocab.txt"))
    prefix = write_sentences(folder / "text", random_sentences(150))
    pretraining = f"--vocab-file {vocabulary} --data-path {prefix} --eval-iters 0 --save {folder / 'run'}"
    (outcome,) = pools.run(SINGLE, _bert, _words(pretraining, MOE))
    assert outcome.error is None, outcome.error
    return folder / "run", outcome


@pytest.mark.parametrize("flag", ["--pretrained-checkpoint {}", "--load {} --finetune"])
def test_it_starts_from_the_encoder_of_a_pretrained_bert(
    pools: Pools, task: str, pretrained: tuple[Path, Outcome], flag: str
) -> None:
    """Embedding, layers and pooler are those of the checkpoint, on tp 2 too; the head is new."""
    folder, before = pretrained
    argv = _words(task, MOE, "--seed 77", flag.format(folder))
    (started,) = pools.run(SINGLE, _started, argv)
    names = {name for name in started if name.startswith("model.")}
    assert all(torch.equal(started[name], before.state[name]) for name in names - HEADS)
    assert names >= HEADS and not {name for name in names if "lm_head" in name or "binary_head" in name}
    halves = pools.run(Layout(2, tp=2), _started, [*argv, "--tensor-model-parallel-size", "2"])
    name = "model.encoder.layers.0.self_attention.linear_qkv.weight"
    torch.testing.assert_close(torch.cat([half[name] for half in halves]), started[name], rtol=0, atol=0)


def test_a_restart_goes_on_from_its_own_checkpoint_and_another_task_takes_its_encoder(
    pools: Pools, task: str, pretrained: tuple[Path, Outcome], tmp_path: Path
) -> None:
    """The line that started the run starts it again; a classifier of other classes is refused, with both lists."""
    argv = _words(task, MOE, f"--train-iters 4 --pretrained-checkpoint {pretrained[0]}")
    (straight,) = pools.run(SINGLE, _train, argv)
    folder = ["--save", str(tmp_path), "--load", str(tmp_path)]
    pools.run(SINGLE, _train, [*argv, *folder, "--exit-interval", "2"])
    (ended,) = pools.run(SINGLE, _train, [*argv, *folder])
    assert ended.error is None and ended.progress["iteration"] == 4
    assert same_bits(ended.state, straight.state) == []
    others = _words(task, MOE, f"--class-names no maybe yes --pretrained-checkpoint {tmp_path}")
    error = pools.run(SINGLE, _train, others)[0].error
    assert error is not None and error[1] == 21
    assert "--class-names: ['no', 'maybe', 'yes'] here, ['yes', 'no', 'maybe'] in the checkpoint" in error[2]


def test_a_bert_of_another_shape_is_refused_by_its_flags(
    pools: Pools, task: str, pretrained: tuple[Path, Outcome]
) -> None:
    argv = _words(task, MOE, f"--pretrained-checkpoint {pretrained[0]} --bert-layout original --ffn-hidden-size 24")
    error = pools.run(SINGLE, _train, argv)[0].error
    assert error is not None and error[1] == 21
    assert "--bert-layout: original here, megatron in the checkpoint" in error[2]
    assert "--ffn-hidden-size: 24 here" in error[2]


def test_it_starts_from_the_encoder_of_a_folder_of_hugging_face(pools: Pools, task: str, tmp_path: Path) -> None:
    """Reference: transformers' pooler output under our head, in evaluation mode."""
    words = len(PIECES)
    config = transformers.BertConfig(
        vocab_size=words, hidden_size=16, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=32,
    )  # fmt: skip
    theirs = randomise(transformers.BertForPreTraining(config))
    theirs.save_pretrained(tmp_path / "theirs")
    more = f"--bert-layout original --norm-epsilon 1e-12 --pretrained-checkpoint {tmp_path / 'theirs'}"
    trainer = make_trainer(ParallelContext.single(), _words(task, more), [], Text(), CLASSIFIER)
    model = trainer.run.built.model.eval()
    tokens, mask = torch.arange(2 * 30).view(2, 30) % words, torch.ones(2, 30, dtype=torch.int64)
    with torch.no_grad():
        pooled = theirs.bert(input_ids=tokens, attention_mask=mask, token_type_ids=mask * 0).pooler_output
        wanted = pooled @ model.classification_head.weight.t() + model.classification_head.bias
        assert (model(tokens, mask, mask * 0) - wanted).abs().max() < EQUAL
    (found,) = pools.run(SINGLE, _train, _words(task, more))
    assert found.error is None and "the classification head is new" in found.said


def test_metrics_are_the_hand_computed_ones() -> None:
    """Binary [[5, 1], [2, 4]]: F1 of the second class 8/11, Matthews (20 - 2) / sqrt(5 * 6 * 7 * 6)."""
    binary = Metrics.of([[5, 1], [2, 4]])
    assert binary.samples == 12 and binary.accuracy == 0.75
    assert binary.f1 == pytest.approx(8 / 11)
    assert binary.matthews == pytest.approx(18 / math.sqrt(1260))
    three = Metrics.of([[2, 0, 0], [1, 1, 0], [0, 0, 4]])
    assert three.accuracy == 7 / 8 and three.f1 == pytest.approx((4 / 5 + 2 / 3 + 1) / 3)
    assert three.matthews == pytest.approx((56 - (6 + 2 + 16)) / math.sqrt((64 - 26) * (64 - 24)))
    assert Metrics.of([[3, 0], [3, 0]]).matthews == 0.0


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("--class-names yes no", ("'maybe'", "--class-names", "line 3")),
        ("--class-names yes", ("--class-names yes", "two or more")),
        ("--train-data-path /no/such.tsv", ("/no/such.tsv",)),
    ],
)
def test_what_cannot_work_is_a_message(pools: Pools, task: str, more: str, told: tuple[str, ...]) -> None:
    error = pools.run(SINGLE, _train, _words(task, more))[0].error
    assert error is not None and error[1] == 2
    assert all(text in error[2] for text in told), error[2]
