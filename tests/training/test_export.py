"""Models that were trained here, as folders of Hugging Face. Reference: our own logits at the end of the training.

Nothing of these models came from Hugging Face: config.json is made of our settings, and transformers takes every size,
activation, rotation and rule of the router from it.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from megatron_parm.models.bert import BertModel, BertOutput
from megatron_parm.models.gpt import GPTModel
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.training.bert_family import BERT
from megatron_parm.training.family import ModelFamily
from megatron_parm.training.gpt_family import GPT
from tests.data.bert_texts import random_sentences, write_sentences, write_vocabulary
from tests.models.test_families import FAMILIES, LENGTH, SIZES
from tests.models.test_gpt import LOGITS_TOLERANCE
from tests.training.runs import NUMBERS, Event, Text, flags, make_trainer
from tests.training.test_convert import assert_equal_bits, convert, tensors_of

EXPORTED = {
    "GPT-3": "gpt2", "Llama": "llama", "Llama 3.1": "llama", "YaRN": "llama", "Llama, linear": "llama",
    "Mistral, window": "mistral", "Qwen2": "qwen2", "Mixtral": "mixtral", "Qwen2-MoE": "qwen2_moe",
    "Qwen3-MoE": "qwen3_moe", "OLMoE": "olmoe",
}  # fmt: skip
SIX = ("GPT-3", "Llama", "Mixtral", "Qwen3-MoE", "OLMoE")
TWO_STEPS = "--train-iters 2 --micro-batch-size 4 --lr 1e-2"
PADDED = "--make-vocab-size-divisible-by 8"  # 31 words in 32 rows, 17 in 24


def _trained(argv: list[str], family: ModelFamily) -> Any:
    """The model at the end of a run that saved it."""
    events: list[Event] = []
    trainer = make_trainer(ParallelContext.single(), argv, events, Text(), family)
    trainer.train()
    assert len([event for event in events if event["event"] == "train"]) == 2
    return trainer.run.built.model.eval()


def _exported(root: Path) -> tuple[Path, str]:
    convert("megatron_parm", root / "ours", "hf", root / "theirs")
    config = json.loads((root / "theirs" / "config.json").read_text())
    return root / "theirs", config["model_type"]


def _tokens(words: int) -> Tensor:
    return torch.randint(0, words, (3, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SIX else pytest.mark.full) for name in EXPORTED]
)
@torch.no_grad()
def test_a_gpt_that_was_trained_here_is_read_by_transformers(corpus: str, tmp_path: Path, name: str) -> None:
    argv = flags(corpus, SIZES, FAMILIES[name].flags, TWO_STEPS, PADDED, f"--save {tmp_path / 'ours'}")
    with torch.enable_grad():
        model = _trained(argv, GPT)
    assert isinstance(model, GPTModel)
    words = NUMBERS + 1
    ours = model(_tokens(words), torch.arange(LENGTH).expand(3, LENGTH))[..., :words].transpose(0, 1)  # [b, s, V]
    folder, kind = _exported(tmp_path)
    assert kind == EXPORTED[name]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    assert theirs.config.vocab_size == words
    logits = theirs(input_ids=_tokens(words)).logits
    assert logits.std() > 0.1 and (logits - ours).abs().max() < LOGITS_TOLERANCE
    theirs.save_pretrained(tmp_path / "again")
    assert_equal_bits(tensors_of(tmp_path / "again"), tensors_of(folder))


@pytest.mark.parametrize("layout", ["original", "megatron"])
@torch.no_grad()
def test_a_bert_that_was_trained_here_is_read_by_transformers(tmp_path: Path, layout: str) -> None:
    """Both heads, on rows of which one is padded."""
    write_vocabulary(tmp_path / "vocab.txt")
    prefix = write_sentences(tmp_path / "text", random_sentences(150))
    more = f"--tokenizer-type BertWordPieceLowerCase --vocab-file {tmp_path / 'vocab.txt'} --bert-layout {layout}"
    argv = flags(prefix, SIZES, more, TWO_STEPS, PADDED, f"--save {tmp_path / 'ours'}")
    at = argv.index("--vocab-size")
    del argv[at : at + 2]
    with torch.enable_grad():
        model = _trained(argv, BERT)
    assert isinstance(model, BertModel)
    words = model.shape.vocab_size
    tokens, mask = _tokens(words), (torch.arange(LENGTH) < torch.tensor([[LENGTH], [15], [LENGTH]])).long()
    types = (torch.arange(LENGTH) > 7).long().expand(3, LENGTH)
    ours = model(tokens, mask, types)
    assert isinstance(ours, BertOutput) and ours.order is not None
    folder, kind = _exported(tmp_path)
    assert kind == {"original": "bert", "megatron": "megatron-bert"}[layout]
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    theirs = getattr(transformers, name).from_pretrained(folder, attn_implementation="eager").eval()
    found = theirs(input_ids=tokens, attention_mask=mask, token_type_ids=types)
    at_words = ours.words[..., :words].transpose(0, 1)[mask == 1]
    assert found.prediction_logits.std() > 0.1
    assert (found.prediction_logits[mask == 1] - at_words).abs().max() < LOGITS_TOLERANCE
    assert (found.seq_relationship_logits - ours.order).abs().max() < LOGITS_TOLERANCE
