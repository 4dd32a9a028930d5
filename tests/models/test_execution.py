"""Whole models under each way to run them, against one process in float64: the loss and every weight's gradient."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megatron_parm.config.moe import Schedule
from megatron_parm.config.run import check_run, resolve
from megatron_parm.grads import finish
from megatron_parm.layers.initialise import initialise_weights
from megatron_parm.layers.recompute import Recomputation
from megatron_parm.models.block import make_feed_forward
from megatron_parm.models.execution import Execution, LayerRecompute
from megatron_parm.models.gpt import GPTModel
from megatron_parm.parallel.context import ParallelContext
from tests.harness.collectives import counted
from tests.harness.layouts import Layout
from tests.harness.memory import KeptBytes
from tests.harness.pools import Pools
from tests.layers.parallel_check import TOLERANCE, TP_LAYOUTS, Box, boxes_of, gradient_differences, randomise_vectors
from tests.models.gpt_cases import CPU, batch_of, build, small_shape
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
    wanted = check_layouts.train_alone("fp64", 1, dropless, ctx.device).gradients
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


# --- recomputation ---

RECOMPUTED: dict[str, dict[str, Any]] = {
    "core_attn": {"recomputed_modules": frozenset({"core_attn"})},
    "layernorm": {"recomputed_modules": frozenset({"layernorm"})},
    "mlp": {"recomputed_modules": frozenset({"mlp"})},
    "all three": {"recomputed_modules": frozenset({"core_attn", "layernorm", "mlp"})},
    "uniform 1": {"recomputed_layers": LayerRecompute("uniform", 1)},
    "uniform 2": {"recomputed_layers": LayerRecompute("uniform", 2)},
    "block 1": {"recomputed_layers": LayerRecompute("block", 1)},
    "block 9": {"recomputed_layers": LayerRecompute("block", 9)},
}


def recomputed_run(
    ctx: ParallelContext, how: str, sequence_parallel: bool, **changes: Any
) -> tuple[list[Tensor], int, list[str]]:
    """(loss, gradients, what both streams draw next), bytes kept after the forward, collectives of both passes."""
    shape = small_shape(num_layers=3, hidden_dropout=0.2, attention_dropout=0.2, max_positions=32, **changes)
    stream = torch.Generator().manual_seed(5)
    execution = Execution(
        sequence_parallel=sequence_parallel, recomputation=Recomputation((stream,)), **RECOMPUTED.get(how, {})
    )
    model = GPTModel(
        shape,
        lambda layer: make_feed_forward(shape, tp=ctx.tp, dtype=torch.float32, device=CPU, execution=execution),
        tp=ctx.tp,
        generator=None if sequence_parallel else stream,
        dtype=torch.float32,
        device=CPU,
        execution=execution,
    )
    initialise_weights(model, seed=7)
    torch.manual_seed(ctx.rank)
    calls: list[str] = []
    with counted(calls):
        with KeptBytes() as kept:
            loss = model(*batch_of(shape, rows=2, length=32)).mean()
            in_bytes = kept.alive()
        loss.backward()
    drawn = [torch.rand(3, generator=stream), torch.rand(3)]
    return [loss.detach(), *(p.grad for p in model.parameters()), *drawn], in_bytes, calls


@pytest.mark.cover(
    layout=[Layout(1), Layout(2, tp=2)],
    how=list(RECOMPUTED),
    sequence_parallel=[False, True],
    kind=[{}, {"positions": "rope", "normalisation": "RMSNorm", "activation": "swiglu"}, {"residual_is_normed": True}],
)
def test_recomputation_changes_no_bit_and_keeps_less(
    pools: Pools, layout: Layout, how: str, sequence_parallel: bool, kind: dict[str, Any]
) -> None:
    """With dropout of both streams: loss, gradients, the streams afterwards; and the memory that it is for."""
    wanted = pools.run(layout, recomputed_run, "nothing", sequence_parallel, **kind)
    for (values, kept, calls), (plain, everything, own) in zip(
        pools.run(layout, recomputed_run, how, sequence_parallel, **kind), wanted, strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(values, plain, strict=True))
        assert kept < everything
        assert len(calls) >= len(own) and (len(calls) == len(own) or how not in ("core_attn", "layernorm"))


def test_whole_layers_keep_their_inputs_alone() -> None:
    """3 layers keep at least 10 [s, b, h] each, of which full recomputation leaves 1; the rest is the same."""
    single = ParallelContext.single()
    everything = recomputed_run(single, "nothing", False)[1]
    by_depth = [everything - recomputed_run(single, how, False)[1] for how in ("block 1", "block 9")]
    one = 32 * 2 * 32 * 4
    assert by_depth[0] > 9 * one
    assert by_depth[1] == pytest.approx(3 * by_depth[0], rel=0.05)


def test_collectives_of_a_dense_model_that_run_again(pools: Pools) -> None:
    """Whole layers repeat those of a forward, mlp its AllGather under sequence parallelism and nothing without it."""
    layout = Layout(2, tp=2)
    for sequence_parallel, of_layer, of_mlp in ((True, 4, 1), (False, 2, 0)):
        counts = {}
        for how in ("nothing", "mlp", "uniform 1"):
            first, second = (calls for _, _, calls in pools.run(layout, recomputed_run, how, sequence_parallel))
            assert first == second
            counts[how] = len(first)
        assert counts["mlp"] - counts["nothing"] == 3 * of_mlp
        assert counts["uniform 1"] - counts["nothing"] == 3 * of_layer


@pytest.mark.parametrize(
    ("method", "num_layers", "groups"),
    [
        ("uniform", 2, [("0 1", True), ("2 3", True), ("4", True)]),
        ("uniform", 9, [("0 1 2 3 4", True)]),
        ("block", 2, [("0", True), ("1", True), ("2", False), ("3", False), ("4", False)]),
        ("block", 9, [(str(layer), True) for layer in range(5)]),
    ],
)
def test_groups_of_layers(method: Any, num_layers: int, groups: list[tuple[str, bool]]) -> None:
    found = Execution(recomputed_layers=LayerRecompute(method, num_layers)).groups(list("01234"))
    assert [(" ".join(names), again) for names, again in found] == groups
