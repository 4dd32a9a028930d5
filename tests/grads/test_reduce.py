"""Dense gradients over dp, expert gradients over edp, both divided by dp.

Reference: one process that differentiates the mean over dp of each replica's loss, with the full weights. The ranks
play a MoE layer in which every tp peer sends its own slice of the tokens of its replica, and a rank's experts see all
that the ranks of its ep_esp group send; the tokens are drawn from seeds, so only the reduction communicates.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from megatron_parm.grads.bucket import ordered_buckets, split_into_buckets
from megatron_parm.grads.buffer import GradientBuffers
from megatron_parm.grads.overlap import OverlappedReduction
from megatron_parm.grads.reduce import SequentialReduction, reduce_gradients
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.sharding import Cut, make_parameter, spec_of
from tests.harness.layouts import MOE_LAYOUTS, Layout, every_layout
from tests.harness.pools import Pools

EXPERTS, WIDTH, HIDDEN, TOKENS = 8, 8, 3, 16
TOLERANCE = 1e-12  # float64 rounding of sums of some hundred terms


def _full_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"dense": (HIDDEN, HIDDEN), "sliced": (WIDTH, HIDDEN), "experts": (EXPERTS, WIDTH, HIDDEN)}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def _tokens(replica: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 + replica)
    return torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64)


def _expert_loss(weights: Tensor, first_expert: int, tokens: Tensor, numbers: Tensor) -> Tensor:
    """Token t goes to expert t % EXPERTS; the loss is a sum over the width, so any slice of it gives its own part."""
    total = weights.sum() * 0
    for local in range(weights.shape[0]):
        mine = tokens[numbers % EXPERTS == first_expert + local]
        total = total + (mine @ weights[local].T).tanh().sum()
    return total


def _reference(dp: int) -> dict[str, Tensor]:
    weights = {name: value.requires_grad_() for name, value in _full_weights().items()}
    loss = torch.zeros((), dtype=torch.float64)
    for replica in range(dp):
        x = _tokens(replica)
        dense = (x @ weights["dense"]).tanh().sum() + (x @ weights["sliced"].T).sin().sum()
        loss = loss + (dense + _expert_loss(weights["experts"], 0, x, torch.arange(TOKENS))) / dp
    gradients = torch.autograd.grad(loss, list(weights.values()))
    return dict(zip(weights, gradients, strict=True))


def _shards(ctx: ParallelContext) -> dict[str, nn.Parameter]:
    cuts = {"dense": (), "sliced": (Cut(0, ctx.tp),), "experts": (Cut(0, ctx.ep), Cut(1, ctx.esp))}
    made = {}
    for name, full in _full_weights().items():
        role = "expert" if name == "experts" else "dense"
        made[name] = make_parameter(tuple(full.shape), *cuts[name], role=role, dtype=full.dtype, device=ctx.device)
        made[name].data.copy_(full[spec_of(made[name]).box])
    return made


def _backward(shards: dict[str, nn.Parameter], ctx: ParallelContext) -> None:
    x = _tokens(ctx.dp.rank)
    loss = (x @ shards["dense"]).tanh().sum() + (x @ shards["sliced"].T).sin().sum()
    first_expert = spec_of(shards["experts"]).box[0].start
    part = TOKENS // ctx.tp.size
    for sender in ctx.ep_esp.ranks:
        begin = ctx.grid.coordinate("tp", sender) * part
        numbers = torch.arange(begin, begin + part)
        sent = _tokens(ctx.grid.coordinate("dp", sender))[numbers]
        loss = loss + _expert_loss(shards["experts"], first_expert, sent, numbers)
    loss.backward()


def _errors(
    ctx: ParallelContext, fault: str = "", bucket_elements: int = 1000, overlap: bool = False, sharded: bool = False
) -> dict[str, tuple[float, Tensor]]:
    """Largest difference from the reference of each parameter's box, and the reduced gradient."""
    shards = _shards(ctx)
    axes = replace(ctx, edp_gradients=ctx.dp_gradients) if fault == "experts summed over dp" else ctx
    buffers = GradientBuffers(shards, axes, sharded=sharded)
    reduction = (OverlappedReduction if overlap else SequentialReduction)(buffers, ctx, bucket_elements)
    for step in range(2):  # the second finds what the first has left
        buffers.zero()
        reduction.begin(1)
        _backward(shards, ctx)
        reduction.finish(ctx.dp.size)
        assert not overlap or reduction.num_sent_early == len(ordered_buckets(buffers, bucket_elements)), step
    if fault == "experts divided by edp":
        buffers.reduced("experts").mul_(ctx.dp.size / ctx.edp.size)
    expected = _reference(ctx.dp.size)
    found = {}
    for name in shards:
        reduced = buffers.reduced(name)
        difference = reduced - expected[name][buffers.reduced_spec(name).box]
        found[name] = (max(difference.abs().flatten().tolist(), default=0.0), reduced)
    return found


@pytest.mark.cover(layout=MOE_LAYOUTS, bucket_elements=(1, 40, 1000), overlap=(False, True), sharded=(False, True))
def test_reduced_gradients_equal_one_process(
    pools: Pools, layout: Layout, bucket_elements: int, overlap: bool, sharded: bool
) -> None:
    """At the end or beside backward, whole or shared out; with several replicas no part is missing."""
    results = pools.run(layout, _errors, bucket_elements=bucket_elements, overlap=overlap, sharded=sharded)
    for result in results:
        for name, (error, _) in result.items():
            assert error < TOLERANCE, f"{name} is off by {error}"
    for name, axis in (("dense", "dp"), ("sliced", "dp"), ("experts", "edp")):
        for ranks in layout.grid.groups(axis):
            held = sum(results[rank][name][1].numel() for rank in ranks)
            copies = 1 if sharded else len(ranks)
            assert held == copies * (results[ranks[0]][name][1].numel() if not sharded else _box_size(layout, name))


def _box_size(layout: Layout, name: str) -> int:
    whole = _full_weights()[name].numel()
    return whole // {"dense": 1, "sliced": layout.tp, "experts": layout.ep * layout.esp}[name]


@pytest.mark.parametrize("layout", [Layout(4), Layout(4, ep=2), Layout(8, tp=2, esp=2, ep=2)], ids=str)
def test_replicas_stay_bitwise_equal(pools: Pools, layout: Layout) -> None:
    results = pools.run(layout, _errors)
    for name, axis in (("dense", "dp"), ("sliced", "dp"), ("experts", "edp")):
        for ranks in layout.grid.groups(axis):
            first, *others = (results[rank][name][1] for rank in ranks)
            assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("fault", ["experts divided by edp", "experts summed over dp"])
@pytest.mark.parametrize("layout", [Layout(2, ep=2), Layout(4, ep=2), Layout(8, tp=2, esp=2, ep=2)], ids=str)
def test_control_a_wrong_expert_reduction_is_detected(pools: Pools, layout: Layout, fault: str) -> None:
    """Layouts with dp != edp: only there do the rules differ. The dense part stays right."""
    assert layout.grid.dp != layout.grid.edp
    for result in pools.run(layout, _errors, fault):
        assert result["experts"][0] > 1e-2
        assert result["dense"][0] < TOLERANCE


def test_layouts_of_this_table_separate_dp_from_edp() -> None:
    """The controls' condition holds for most layouts, so the positive test above is not blind."""
    grids = [layout.grid for layout in every_layout((4, 8))]
    assert sum(grid.dp != grid.edp for grid in grids) > len(grids) / 2


def _by_tokens(ctx: ParallelContext) -> float:
    shards = _shards(ctx)
    buffers = GradientBuffers(shards, ctx)
    shards["dense"].sum().backward()
    reduce_gradients(buffers, ctx, divisor=10.0)
    return buffers.gradient_of("dense")[0, 0].item()


def test_another_divisor(pools: Pools) -> None:
    """Reference: by hand, 4 ranks x 1 / 10."""
    assert pools[4].run(_by_tokens) == [0.4] * 4


def _accumulated(ctx: ParallelContext, micro_batch: int, per_token: bool) -> Tensor:
    """The gradient of a global batch of 8 sequences, from micro-batches on every dp rank."""
    weight = make_parameter((HIDDEN, HIDDEN), dtype=torch.float64, device=ctx.device)
    weight.data.copy_(_full_weights()["dense"])
    buffers = GradientBuffers({"weight": weight}, ctx)
    sequences, mask = _sequences(per_token)
    count = 8 // (micro_batch * ctx.dp.size)
    for step in range(count):
        first = (step * ctx.dp.size + ctx.dp.rank) * micro_batch
        taken = slice(first, first + micro_batch)
        losses = (sequences[taken] @ weight).tanh().sum(-1) * mask[taken]
        (losses.sum() if per_token else losses.sum() / mask[taken].sum() / count).backward()
    reduce_gradients(buffers, ctx, divisor=mask.sum().item() if per_token else None)
    return buffers.gradient_of("weight")


def _sequences(masked: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    sequences = torch.randn(8, 6, HIDDEN, generator=generator, dtype=torch.float64)
    kept = torch.rand(8, 6, generator=generator) > 0.5
    return sequences, kept.double() if masked else torch.ones(8, 6, dtype=torch.float64)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize(("dp", "micro_batch"), [(1, 8), (1, 1), (2, 4), (2, 1), (4, 2), (4, 1)])
def test_accumulation_equals_one_big_batch(pools: Pools, dp: int, micro_batch: int, per_token: bool) -> None:
    """Reference: autograd over the whole batch at once; with an uneven mask for the rule per token."""
    weight = _full_weights()["dense"].requires_grad_()
    sequences, mask = _sequences(per_token)
    loss = ((sequences @ weight).tanh().sum(-1) * mask).sum() / mask.sum()
    (expected,) = torch.autograd.grad(loss, [weight])
    for found in pools.run(Layout(dp), _accumulated, micro_batch, per_token):
        torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("bucket_elements", [1, 16, 20, 100, 10_000])
def test_buckets_partition_the_buffer_at_slots(bucket_elements: int) -> None:
    ctx = ParallelContext.single()
    sizes = (3, 40, 16, 1, 100, 5)
    named = {str(size): make_parameter((size,), dtype=torch.float32, device=ctx.device) for size in sizes}
    (buffer,) = GradientBuffers(named, ctx).buffers
    buckets = [bucket.data for bucket in split_into_buckets(buffer, bucket_elements)]
    starts = [bucket.storage_offset() for bucket in buckets]
    assert starts[0] == 0
    assert set(starts) <= {slot.start for slot in buffer.slots}
    assert [*starts[1:], buffer.data.numel()] == [b.storage_offset() + b.numel() for b in buckets]
    for bucket in buckets:
        inside = [
            s for s in buffer.slots if bucket.storage_offset() <= s.start < bucket.storage_offset() + bucket.numel()
        ]
        assert len(inside) == 1 or inside[-1].stop - inside[0].start <= bucket_elements
    assert (len(buckets) == 1) == (bucket_elements == 10_000)
