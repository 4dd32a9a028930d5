"""Whole models under each way to run them, against one process in float64: the loss and every weight's gradient."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megatron_parm.config.moe import Schedule
from megatron_parm.config.run import check_run, resolve
from megatron_parm.grads import finish
from megatron_parm.models.execution import Execution
from megatron_parm.parallel.context import ParallelContext
from tests.harness.layouts import Layout
from tests.harness.pools import Pools
from tests.layers.parallel_check import TOLERANCE, TP_LAYOUTS, Box, boxes_of, gradient_differences, randomise_vectors
from tests.models.gpt_cases import batch_of, build, small_shape
from tools import check_layouts

SLICED = Execution(sequence_parallel=True)
SHAPES = {
    "gpt2": small_shape(),
    "llama": small_shape(
        positions="rope", activation="swiglu", normalisation="RMSNorm", has_bias=False, has_qkv_bias=False,
        ties_embeddings=False,
    ),
    "megatron": small_shape(norm_is_zero_centred=True, residual_is_normed=True, has_norm_of_heads=True),
}  # fmt: skip
MOE_LAYOUTS = (
    Layout(2, tp=2),
    Layout(4, tp=2, ep=2),
    Layout(4, tp=2, esp=2, ep=2),
    Layout(4, tp=4, esp=2, ep=2),
    Layout(8, tp=2, esp=2, ep=2),
)
SCHEDULES: tuple[Schedule, ...] = ("baseline", "s1", "s2", "s1h", "s2h")


def run_model(ctx: ParallelContext, name: str, documents: bool, execution: Execution) -> tuple[Tensor, dict[str, Box]]:
    """Loss [b, s] and every gradient of this rank, with a weight for each token."""
    shape = SHAPES[name]
    model = build(shape, ctx.tp, torch.float64, execution=execution)
    randomise_vectors(model)
    tokens, position_ids, labels = batch_of(shape, length=8)
    document = torch.arange(8) // 5
    mask = (document[:, None] != document).expand(3, 1, 8, 8) if documents else None
    loss = model(tokens, position_ids, labels, mask)
    (loss * torch.arange(1.0, 1 + loss.numel()).view(loss.shape)).sum().backward()
    return loss.detach(), boxes_of(model, ctx.tp)


@pytest.mark.cover(layout=TP_LAYOUTS, name=list(SHAPES), documents=(False, True))
def test_a_dense_model_on_slices_equals_one_process(pools: Pools, layout: Layout, name: str, documents: bool) -> None:
    whole, gradients = pools.run(Layout(1), run_model, name, documents, Execution())[0]
    parts = pools.run(layout, run_model, name, documents, SLICED)
    for loss, _ in parts:
        torch.testing.assert_close(loss, whole, atol=TOLERANCE, rtol=0)
    found = gradient_differences(gradients, [boxes for _, boxes in parts[: layout.tp]])
    assert max(found.values()) < TOLERANCE, found


def _moe_gradients(
    ctx: ParallelContext, layout: Layout, schedule: Schedule, dropless: bool, sums: bool = True
) -> float:
    _, wanted = check_layouts.train_alone("fp64", 1, dropless, ctx.device)
    table_row = check_layouts.Layout(layout.world, tp=layout.tp, ep=layout.ep, esp=layout.esp)
    config = check_layouts.make_config(table_row, schedule, "fp64", dropless=dropless)
    config = replace(config, parallel=replace(config.parallel, sequence_parallel=True))
    check_run(config, layout.world)
    with patch.object(finish, "sum_over_", finish.sum_over_ if sums else lambda x, _: x):
        return check_layouts.gradient_difference(resolve(config, layout.world), ctx, wanted)


def _can_run(layout: Layout, schedule: Schedule, dropless: bool) -> bool:
    return not (dropless and schedule in ("s2", "s2h"))


@pytest.mark.cover(layout=MOE_LAYOUTS, schedule=SCHEDULES, dropless=(False, True), where=_can_run)
def test_a_model_of_experts_on_slices_has_the_gradients_of_one_process(
    pools: Pools, layout: Layout, schedule: Schedule, dropless: bool
) -> None:
    """After the reduction and the rules of grads/finish.py, relative to each gradient's largest entry."""
    assert max(pools.run(layout, _moe_gradients, layout, schedule, dropless)) <= check_layouts.LIMITS["gradients"]


def test_without_the_rule_the_gradients_of_norms_are_parts(pools: Pools) -> None:
    """The negative control."""
    assert min(pools.run(Layout(2, tp=2), _moe_gradients, Layout(2, tp=2), "s1", False, sums=False)) > 1e-3


def _dropped(ctx: ParallelContext) -> tuple[Tensor, Tensor]:
    """Which elements of the embedding, and of the first block's branches, the dropout of this rank kept."""
    torch.manual_seed(ctx.rank)  # the default stream, as `RandomStates` seeds it: another on each rank
    shape = small_shape(hidden_dropout=0.5, ties_embeddings=False)
    model = build(shape, ctx.tp, torch.float64, execution=SLICED)
    torch.nn.init.ones_(model.embedding.word_embeddings.weight)
    torch.nn.init.zeros_(model.embedding.position_embeddings.weight)
    tokens, position_ids, labels = batch_of(shape, length=8)
    embedded = model.embedding(tokens, position_ids)  # [s/tp, b, h]
    return (embedded != 0).double(), model(tokens, position_ids, labels).detach()


def test_dropout_differs_between_slices_and_the_loss_agrees(pools: Pools) -> None:
    """tp ranks differ where each holds its own slice, and agree where all hold the same: the loss."""
    first, second = pools.run(Layout(2, tp=2), _dropped)
    assert 0.4 < first[0].mean() < 0.6 and 0.4 < second[0].mean() < 0.6
    assert 0.3 < (first[0] == second[0]).double().mean() < 0.7, "the masks of the slices repeat"
    assert torch.equal(first[1], second[1])
