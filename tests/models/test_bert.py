"""BERT cut over tp against one process, and what its heads see. Real weights: tests/checkpoint/test_huggingface.py."""

import pytest
import torch
from torch import Tensor

from megatron_parm.models import bert
from megatron_parm.models.bert import BertOutput
from megatron_parm.models.execution import PLAIN, Execution
from megatron_parm.parallel.collectives import share
from megatron_parm.parallel.context import ParallelContext
from tests.harness.layouts import Layout
from tests.harness.pools import Pools
from tests.layers.parallel_check import TOLERANCE, TP_LAYOUTS, Box, boxes_of, gradient_differences, randomise_vectors
from tests.models.bert_cases import bert_batch, bert_shape, build_bert_model

SHAPES = {
    "megatron": bert_shape(),
    "original": bert_shape(norm_placement="post"),
    "rotary": bert_shape(positions="rope", activation="swiglu", normalisation="RMSNorm", has_bias=False),
}


def _weighted(losses: Tensor) -> Tensor:
    return (losses * torch.arange(1.0, 1 + losses.numel()).view(losses.shape)).sum()


def run_model(
    ctx: ParallelContext, name: str, has_order_head: bool, execution: Execution = PLAIN
) -> tuple[list[Tensor], dict[str, Box]]:
    """Losses of both heads and every gradient of this rank, with a weight for each loss."""
    model = build_bert_model(SHAPES[name], ctx.tp, torch.float64, has_order_head, execution)
    randomise_vectors(model)
    output = model(*bert_batch(13, length=8).everything)
    losses = [output.words] if output.order is None else [output.words, output.order]
    sum(map(_weighted, losses)).backward()  # type: ignore[union-attr]
    return [loss.detach() for loss in losses], boxes_of(model, ctx.tp)


WAYS = [PLAIN, Execution(sequence_parallel=True)]


@pytest.mark.cover(layout=TP_LAYOUTS, name=list(SHAPES), has_order_head=(True, False), sliced=(0, 1))
def test_cut_over_tp_equals_one_process(
    pools: Pools, layout: Layout, name: str, has_order_head: bool, sliced: int
) -> None:
    """Whole sequences on each rank, and slices up to the heads."""
    whole, gradients = pools.run(Layout(1), run_model, name, has_order_head)[0]
    parts = pools.run(layout, run_model, name, has_order_head, WAYS[sliced])
    assert len(whole) == 1 + has_order_head
    for losses, _ in parts:
        for loss, wanted in zip(losses, whole, strict=True):
            torch.testing.assert_close(loss, wanted, atol=TOLERANCE, rtol=0)
    found = gradient_differences(gradients, [boxes for _, boxes in parts[: layout.tp]])
    assert max(found.values()) < TOLERANCE, found


def _shared_twice(ctx: ParallelContext) -> tuple[list[Tensor], dict[str, Box]]:
    """The order head's hidden states taken through `share` too, as those of the word head are."""
    kept = bert.Pooler.forward
    bert.Pooler.forward = lambda self, hidden: kept(self, share(hidden, ctx.tp))  # type: ignore[method-assign]
    try:
        return run_model(ctx, "megatron", True)
    finally:
        bert.Pooler.forward = kept  # type: ignore[method-assign]


def test_an_order_head_whose_gradient_is_summed_over_tp_is_wrong(pools: Pools) -> None:
    """The negative control: the losses cannot see it, every gradient below the head does."""
    whole, gradients = pools.run(Layout(1), run_model, "megatron", True)[0]
    parts = pools.run(Layout(2, tp=2), _shared_twice)
    torch.testing.assert_close(parts[0][0], whole, atol=TOLERANCE, rtol=0)
    found = gradient_differences(gradients, [boxes for _, boxes in parts])
    assert found["binary_head.weight"] < TOLERANCE and found["encoder.final_layernorm.weight"] > 1e-3


@pytest.mark.parametrize("name", SHAPES)
def test_padding_is_seen_by_nobody_and_everything_else_by_all(name: str) -> None:
    model = build_bert_model(SHAPES[name], dtype=torch.float64)
    batch = bert_batch(13)
    before = model.encode(*batch.inputs).transpose(0, 1)  # [b, s, h]
    for place, rows_that_move in ((9, [True, False, False]), (7, [True, True, False]), (0, [True, True, True])):
        tokens = batch.tokens.clone()
        tokens[:, place] = 14 % 13 + (tokens[:, place] + 1) % 12
        after = model.encode(tokens, batch.padding_mask, batch.types).transpose(0, 1)
        moved = ((after - before).abs().amax(-1) > 1e-9) & (batch.padding_mask == 1)
        for row, moves in enumerate(rows_that_move):
            length = int(batch.padding_mask[row].sum())
            assert moved[row].tolist() == [moves] * length + [False] * (10 - length)


def test_the_segment_of_a_token_counts() -> None:
    model = build_bert_model(SHAPES["megatron"], dtype=torch.float64)
    batch = bert_batch(13)
    first = model.encode(batch.tokens, batch.padding_mask, torch.zeros_like(batch.types))
    assert torch.equal(first, model.encode(batch.tokens, batch.padding_mask, None))
    assert not torch.allclose(first, model.encode(*batch.inputs))


def test_losses_are_those_of_the_logits() -> None:
    model = build_bert_model(SHAPES["original"], dtype=torch.float64)
    batch = bert_batch(13)
    logits, losses = model(*batch.inputs), model(*batch.everything)
    assert isinstance(losses, BertOutput) and logits.order.shape == (3, 2)
    order = torch.nn.functional.cross_entropy(logits.order, batch.is_random, reduction="none")
    torch.testing.assert_close(losses.order, order)
    words = logits.words[..., :13].permute(1, 2, 0)  # [b, V, s]
    wanted = torch.nn.functional.cross_entropy(words, batch.labels, ignore_index=-1, reduction="none")
    labelled = batch.labels >= 0
    torch.testing.assert_close(losses.words[labelled], wanted[labelled])


def test_parameter_names_are_megatron_cores() -> None:
    names = {name for name, _ in build_bert_model(SHAPES["megatron"]).named_parameters()}
    ends = ("weight", "bias")
    heads = {f"{module}.{end}" for module in ("lm_head.dense", "lm_head.layer_norm", "pooler.dense") for end in ends}
    embeddings = {f"embedding.{kind}_embeddings.weight" for kind in ("word", "position", "tokentype")}
    others = {"output_layer.bias", "binary_head.weight", "binary_head.bias"}
    others |= {f"encoder.final_layernorm.{end}" for end in ends}
    assert {name for name in names if ".layers." not in name} == heads | embeddings | others
    assert "encoder.layers.1.self_attention.linear_qkv.weight" in names
    without = {name for name, _ in build_bert_model(SHAPES["megatron"], has_order_head=False).named_parameters()}
    assert names - without == {f"{module}.{end}" for module in ("pooler.dense", "binary_head") for end in ends}
