"""Runs that start from a folder of Hugging Face. References: transformers' logits and losses with the same weights."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from megatron_parm.checkpoint.huggingface import read_huggingface
from megatron_parm.config.run import resolve
from megatron_parm.data.batches import Batch
from megatron_parm.errors import CheckpointError
from megatron_parm.models.gpt import GPTModel
from megatron_parm.parallel import transport
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.training.assemble import make_model
from megatron_parm.training.bert_family import BERT
from megatron_parm.training.family import ModelFamily
from megatron_parm.training.foreign import fill_from_foreign, open_foreign
from megatron_parm.training.gpt_family import GPT
from megatron_parm.training.resume import model_tensors
from tests.data.bert_texts import PIECES, random_sentences, write_sentences, write_vocabulary
from tests.harness.layouts import Layout
from tests.harness.pools import Pools
from tests.models.test_families import FAMILIES as FAMILIES_OF_FLAGS
from tests.models.test_families import LENGTH, SIZES, WORDS, tokens_of_rows
from tests.models.test_gpt import LOGITS_TOLERANCE, randomise
from tests.training.runs import Event, Text, flags, make_trainer, run_training, write_corpus
from tests.training.test_convert import their_model

EQUAL = 1e-5  # relative, float32
TP2 = "--tensor-model-parallel-size 2"
LAYOUTS = [Layout(1), Layout(2, tp=2), Layout(2, ep=2), Layout(2, esp=2)]
FAMILIES = ("GPT-3", "Llama", "Mixtral", "Qwen3-MoE", "OLMoE")


def _fits(name: str, layout: Layout) -> bool:
    return layout.ep * layout.esp == 1 or name not in ("GPT-3", "Llama")


@torch.no_grad()
def _our_logits(ctx: ParallelContext, folder: Path) -> Tensor:
    """[b, s, V] of our model, filled from the folder on the layout of `ctx`."""
    found = open_foreign(folder, ctx)
    assert found is not None
    foreign = found[1]
    config, moe = foreign.config, foreign.config.moe
    parallel = replace(
        config.parallel,
        tensor_model_parallel_size=ctx.tp.size,
        expert_model_parallel_size=ctx.ep.size,
        expert_tensor_parallel_size=ctx.esp.size,
    )
    config = replace(config, parallel=parallel, moe=moe and replace(moe, moe_schedule="s1"))
    built, _, _ = make_model(resolve(config, ctx.world.size), WORDS, ctx)
    fill_from_foreign(foreign, model_tensors(built), WORDS, ctx)
    assert isinstance(built.model, GPTModel)
    logits = built.model.eval()(tokens_of_rows(), torch.arange(LENGTH).expand(3, LENGTH))  # [s, b, V/tp]
    whole = torch.cat(list(transport.gather_stack(logits, ctx.tp)), dim=-1)[..., :WORDS]
    return whole.transpose(0, 1)


@pytest.mark.cover(name=FAMILIES, layout=LAYOUTS, where=_fits)
def test_logits_equal_those_of_the_folder(pools: Pools, tmp_path: Path, name: str, layout: Layout) -> None:
    hf = their_model(name)
    hf.save_pretrained(tmp_path / "theirs")
    with torch.no_grad():
        expected = hf(input_ids=tokens_of_rows()).logits
    for logits in pools.run(layout, _our_logits, tmp_path / "theirs"):
        assert (logits - expected).abs().max() < LOGITS_TOLERANCE


# --- whole runs, as `--load FOLDER` of pretrain_gpt.py and pretrain_bert.py starts them ---

CORPUS_WORDS = WORDS - 1  # numbers; the end of a document is one more
STEPS = "--train-iters 3 --micro-batch-size 1 --global-batch-size 4 --lr 1e-3"
BERT_SIZES = "--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --seq-length 32"


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("numbers") / "text", numbers=CORPUS_WORDS)


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("sentences")
    write_vocabulary(folder / "vocab.txt")
    return f"{write_sentences(folder / 'text', random_sentences(150))} --vocab-file {folder / 'vocab.txt'}"


def _gpt_run(numbers: str, name: str, *more: str) -> list[str]:
    return flags(numbers, SIZES, FAMILIES_OF_FLAGS[name].flags, STEPS, *more, numbers=CORPUS_WORDS)


def _bert_run(sentences: str, *more: str) -> list[str]:
    kind = "--tokenizer-type BertWordPieceLowerCase --bert-layout original --norm-epsilon 1e-12"
    argv = flags(sentences, BERT_SIZES, "--max-position-embeddings 32", kind, STEPS, *more)
    at = argv.index("--vocab-size")
    del argv[at : at + 2]
    return argv


def _their_bert(folder: Path) -> nn.Module:
    """Without rows for the [BOS] and [EOS] that our tokenizer adds, as every BERT of Hugging Face."""
    config = transformers.BertConfig(
        vocab_size=len(PIECES), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=32,
    )  # fmt: skip
    theirs = randomise(transformers.BertForPreTraining(config))
    theirs.save_pretrained(folder)
    return theirs


def _first_step(argv: list[str], family: ModelFamily) -> tuple[list[Batch], float, dict[str, float]]:
    """The micro-batches of the first step on one process, the loss that it tells, and the losses of the validation."""
    events: list[Event] = []
    trainer = make_trainer(ParallelContext.single(), argv, events, Text(), family)
    assert trainer.run.datasets.train is not None
    batches = list(itertools.islice(trainer.run.batches(trainer.run.datasets.train, 0), 4))
    trainer.train()
    told = next(event for event in events if event["event"] == "train")
    return batches, told["lm_loss"], told


@pytest.mark.parametrize("name", FAMILIES)
def test_the_first_loss_of_a_run_is_that_of_transformers(numbers: str, tmp_path: Path, name: str) -> None:
    hf = their_model(name)
    hf.save_pretrained(tmp_path / "theirs")
    batches, loss, _ = _first_step(_gpt_run(numbers, name, f"--load {tmp_path / 'theirs'}"), GPT)
    wanted = []
    for batch in batches:
        with torch.no_grad():
            logits = hf(input_ids=batch["tokens"]).logits
        wanted.append(cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).item())
    assert loss == pytest.approx(sum(wanted) / len(wanted), rel=EQUAL)
    assert loss > 2.5


def test_the_first_losses_of_a_bert_are_those_of_transformers(sentences: str, tmp_path: Path) -> None:
    hf = _their_bert(tmp_path / "theirs")
    batches, loss, told = _first_step(_bert_run(sentences, f"--load {tmp_path / 'theirs'}"), BERT)
    words, orders = [], []
    for batch in batches:
        mask = batch["padding_mask"]
        with torch.no_grad():
            found = hf(input_ids=batch["text"], attention_mask=mask, token_type_ids=batch["types"] * mask)
        is_masked = batch["loss_mask"].bool()
        words.append(cross_entropy(found.prediction_logits[is_masked], batch["labels"][is_masked]).item())
        orders.append(cross_entropy(found.seq_relationship_logits, batch["is_random"]).item())
    assert loss == pytest.approx(sum(words) / len(words), rel=EQUAL)
    assert told["sop_loss"] == pytest.approx(sum(orders) / len(orders), rel=EQUAL)


@pytest.mark.parametrize(
    ("name", "layout", "more"),
    [
        ("Llama", Layout(2, tp=2), "--tensor-model-parallel-size 2 --use-distributed-optimizer"),
        ("Mixtral", Layout(4, tp=2, ep=2, esp=2), f"{TP2} --expert-model-parallel-size 2 --moe-schedule s1"),
        ("GPT-3", Layout(2, pp=2), "--pipeline-model-parallel-size 2"),
    ],
    ids=lambda value: str(value) if isinstance(value, Layout) else "",
)
def test_it_trains_on_a_layout_as_on_one_process_and_goes_on_from_its_own_checkpoint(
    pools: Pools, numbers: str, tmp_path: Path, name: str, layout: Layout, more: str
) -> None:
    """`--pretrained-checkpoint FOLDER` beside the line of a restart: the folder counts in the first start alone."""
    their_model(name).save_pretrained(tmp_path / "theirs")
    (alone,) = pools.run(Layout(1), run_training, _gpt_run(numbers, name, f"--load {tmp_path / 'theirs'}"))
    assert alone.error is None, alone.error
    own = tmp_path / "own"
    restart = f"--pretrained-checkpoint {tmp_path / 'theirs'} --save {own} --load {own}"
    first = pools.run(layout, run_training, _gpt_run(numbers, name, more, restart, "--exit-interval 2"))
    second = pools.run(layout, run_training, _gpt_run(numbers, name, more, restart))
    assert first[0].error is second[0].error is None
    losses = first[0].column("lm_loss") + second[0].column("lm_loss")
    assert losses == pytest.approx(alone.column("lm_loss"), rel=EQUAL)
    assert len(set(losses)) == 3 and str(tmp_path / "theirs") in first[0].said


def test_flags_come_from_config_json_and_the_command_line_wins(pools: Pools, numbers: str, tmp_path: Path) -> None:
    their_model("Qwen3-MoE").save_pretrained(tmp_path / "theirs")
    (whole,) = pools.run(Layout(1), run_training, _gpt_run(numbers, "Qwen3-MoE", f"--load {tmp_path / 'theirs'}"))
    bare = (
        "--attention-dropout 0 --hidden-dropout 0 --make-vocab-size-divisible-by 1 --eval-iters 0 --split 80,10,10 "
        f"--num-workers 0 --log-interval 1 --tokenizer-type NullTokenizer --vocab-size {CORPUS_WORDS} --min-lr 1e-3 "
        f"--distributed-backend gloo --seq-length {LENGTH} --data-path {numbers} {STEPS} "
        f"--load {tmp_path / 'theirs'} --use-checkpoint-args"
    ).split()
    (taken,) = pools.run(Layout(1), run_training, bare)
    assert taken.error is None, taken.error
    assert taken.column("lm_loss") == whole.column("lm_loss")
    error = pools.run(Layout(1), run_training, [*bare, "--num-attention-heads", "8"])[0].error
    assert error is not None and error[1] == 21
    assert "--num-attention-heads: 8 here, 4 in the checkpoint" in error[2]


def test_a_dense_folder_is_upcycled(pools: Pools, numbers: str, tmp_path: Path) -> None:
    """The first loss is that of the dense model."""
    their_model("Llama").save_pretrained(tmp_path / "theirs")
    load = f"--load {tmp_path / 'theirs'} --min-lr 1e-3"
    (dense,) = pools.run(Layout(1), run_training, _gpt_run(numbers, "Llama", load))
    experts = "--num-experts 4 --moe-router-topk 2 --moe-use-upcycling --expert-model-parallel-size 2"
    for found in pools.run(Layout(2, ep=2), run_training, _gpt_run(numbers, "Llama", load, experts)):
        assert found.error is None, found.error
        assert found.column("lm_loss")[0] == pytest.approx(dense.column("lm_loss")[0], rel=EQUAL)
    (refused,) = pools.run(Layout(1), run_training, _gpt_run(numbers, "Mixtral", load))
    assert refused.error is not None and refused.error[1] == 21 and "--num-experts: 4 here, None" in refused.error[2]


def test_a_larger_vocabulary_than_the_folder_has_is_refused(tmp_path: Path) -> None:
    their_model("Llama").save_pretrained(tmp_path / "theirs")
    ctx = ParallelContext.single()
    foreign = read_huggingface(tmp_path / "theirs")
    built, _, _ = make_model(resolve(foreign.config, 1), WORDS + 1, ctx)
    with pytest.raises(CheckpointError, match=f"{WORDS + 1} tokens, the word embedding of --load {WORDS} rows"):
        fill_from_foreign(foreign, model_tensors(built), WORDS + 1, ctx)
