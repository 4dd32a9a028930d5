"""Every differentiable collective: its values, its adjoint, and the gradient it may receive.

References: a local computation from the inputs of all ranks (each rank can make them itself), and the identity
<A x, y> = <x, A* y> summed over the axis, where a value that is identical on the axis counts once. Inputs of the value
tests are small integers, so sums are exact in every dtype and the comparison is bitwise.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from megatron_parm.parallel import collectives
from megatron_parm.parallel.context import Axis, ParallelContext
from tests.harness.layouts import Layout
from tests.harness.pools import Pools

# 1e-12: float64 sums of some thousand products of numbers about 1.
ADJOINT_TOLERANCE = 1e-12
SHAPE = (8, 16, 24)  # every dim divides by 8 ranks; all sizes differ, so a permutation shows

# Whole pools, consecutive ranks of a part, and ranks that stride.
PLACES = [
    (Layout(1), "tp"),
    (Layout(2, tp=2), "tp"),
    (Layout(4, tp=4), "tp"),
    (Layout(8, tp=8), "tp"),
    (Layout(4, tp=2), "tp"),
    (Layout(4, ep=2, esp=2), "ep"),
    (Layout(8, ep=4, esp=2), "ep"),
    (Layout(8, ep=2, esp=2), "ep_esp"),
]
PLACES_WITH_PEERS = PLACES[1:]


def _send_splits(size: int, sparse: bool) -> list[list[int]]:
    """Rows that rank i sends to rank j. Some are empty; in the sparse plan one rank gets and one sends nothing."""
    if sparse:
        return [[0 if j == 0 or i == size - 1 else 1 + i for j in range(size)] for i in range(size)]
    return [[(i + 2 * j) % 3 for j in range(size)] for i in range(size)]


@dataclass(frozen=True)
class Op:
    """A collective under test: how to call it, what it should give, and who holds identical values.

    `expected(inputs of all ranks, my place, dim)`. `same_input`: the input is identical on the axis; `same_output`:
    so are the output and the gradient that it may receive.
    """

    call: Callable[[Tensor, Axis, int], Tensor]
    expected: Callable[[list[Tensor], int, int], Tensor]
    same_input: bool = False
    same_output: bool = False
    rows: Callable[[int, int], int] = lambda size, me: SHAPE[0]  # of the input


def _slice(x: Tensor, count: int, me: int, dim: int) -> Tensor:
    return x.chunk(count, dim)[me]


def _sum(xs: list[Tensor]) -> Tensor:
    return torch.stack(xs).sum(dim=0)


def _exchanged(xs: list[Tensor], me: int, dim: int) -> Tensor:
    return torch.cat([_slice(x, len(xs), me, 0) for x in xs])


def _uneven(sparse: bool) -> Op:
    def call(x: Tensor, axis: Axis, dim: int) -> Tensor:
        plan = _send_splits(axis.size, sparse)
        received = [row[axis.rank] for row in plan]
        return collectives.all_to_all_uneven(x, axis, plan[axis.rank], received)

    def expected(xs: list[Tensor], me: int, dim: int) -> Tensor:
        plan = _send_splits(len(xs), sparse)
        return torch.cat([torch.split(x, sent)[me] for x, sent in zip(xs, plan, strict=True)])

    return Op(call, expected, rows=lambda size, me: sum(_send_splits(size, sparse)[me]))


OPS = {
    "split": Op(collectives.split, lambda xs, me, dim: _slice(xs[me], len(xs), me, dim), same_input=True),
    "all_gather": Op(collectives.all_gather, lambda xs, me, dim: torch.cat(xs, dim), same_output=True),
    "all_gather_summing": Op(collectives.all_gather_summing, lambda xs, me, dim: torch.cat(xs, dim)),
    "reduce_scatter": Op(collectives.reduce_scatter, lambda xs, me, dim: _slice(_sum(xs), len(xs), me, dim)),
    "all_reduce": Op(
        lambda x, axis, dim: collectives.all_reduce(x, axis), lambda xs, me, dim: _sum(xs), same_output=True
    ),
    "all_reduce_summing": Op(
        lambda x, axis, dim: collectives.all_reduce_summing(x, axis), lambda xs, me, dim: _sum(xs)
    ),
    "share": Op(lambda x, axis, dim: collectives.share(x, axis), lambda xs, me, dim: xs[me], same_input=True),
    "all_to_all": Op(lambda x, axis, dim: collectives.all_to_all(x, axis), _exchanged),
    "all_to_all_uneven": _uneven(sparse=False),
    "all_to_all_uneven_sparse": _uneven(sparse=True),
}

# An operator in a place where it receives the gradient of another: the identity must fail there.
MISUSED = {
    "all_gather where gradients are partial": Op(OPS["all_gather"].call, OPS["all_gather"].expected),
    "all_gather_summing where gradients are identical": Op(
        OPS["all_gather_summing"].call, OPS["all_gather_summing"].expected, same_output=True
    ),
    "all_reduce where gradients are partial": Op(OPS["all_reduce"].call, OPS["all_reduce"].expected),
    "all_reduce_summing where gradients are identical": Op(
        OPS["all_reduce_summing"].call, OPS["all_reduce_summing"].expected, same_output=True
    ),
    "no share where gradients are partial": Op(lambda x, axis, dim: x * 1, OPS["share"].expected, same_input=True),
}


def _input(op: Op, axis: Axis, place: int, dtype: torch.dtype, transposed: bool) -> Tensor:
    """The input of the rank at `place`, small integers that any rank can make."""
    shape = (op.rows(axis.size, place), *SHAPE[1:])
    generator = torch.Generator().manual_seed(100 * axis.ranks[0] + (0 if op.same_input else place))
    if transposed:
        return torch.randint(-8, 9, shape[::-1], generator=generator).to(dtype).permute(2, 1, 0)
    return torch.randint(-8, 9, shape, generator=generator).to(dtype)


def _compare_values(
    ctx: ParallelContext, axis_name: str, name: str, dim: int, dtype: torch.dtype, transposed: bool
) -> None:
    axis, op = ctx.axis(axis_name), OPS[name]
    inputs = [_input(op, axis, place, dtype, transposed) for place in range(axis.size)]
    x = inputs[axis.rank].clone(memory_format=torch.preserve_format)
    found = op.call(x, axis, dim)
    assert torch.equal(found, op.expected(inputs, axis.rank, dim)), f"{name} dim {dim}"
    assert found.dtype == dtype
    assert torch.equal(x, inputs[axis.rank]), "the input was changed"
    if axis.size == 1:
        assert found is x
    elif name not in ("share", "split"):  # these two may be views of x
        assert found.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() or not found.numel()


@pytest.mark.cover(
    place=PLACES,
    name=list(OPS),
    dim=[0, 1, 2, -1],
    dtype=[torch.float32, torch.float64, torch.bfloat16, torch.int64],
    transposed=[False, True],
)
def test_values_equal_the_local_computation(
    pools: Pools, place: tuple[Layout, str], name: str, dim: int, dtype: torch.dtype, transposed: bool
) -> None:
    layout, axis = place
    pools.run(layout, _compare_values, axis, name, dim, dtype, transposed)


@dataclass(frozen=True)
class Products:
    """Of one rank: <A x, y>, <x, A* y>, the output and the gradient."""

    forward: float
    backward: float
    output: Tensor
    gradient: Tensor


def _adjoint(ctx: ParallelContext, axis_name: str, op: Op, dim: int, transposed: bool) -> Products:
    axis = ctx.axis(axis_name)
    group, place = axis.ranks[0], axis.rank
    random = torch.Generator().manual_seed(1000 * group + (0 if op.same_input else place))
    x = torch.randn((op.rows(axis.size, place), *SHAPE[1:]), generator=random, dtype=torch.float64)
    x = (x.transpose(1, 2).contiguous().transpose(1, 2) if transposed else x).requires_grad_()
    output = op.call(x, axis, dim)
    random = torch.Generator().manual_seed(1000 * group + 500 + (0 if op.same_output else place))
    y = torch.randn(output.shape, generator=random, dtype=torch.float64)
    y = y.transpose(1, 2).contiguous().transpose(1, 2) if transposed else y
    (gradient,) = torch.autograd.grad(output, x, y)
    return Products((output * y).sum().item(), (x * gradient).sum().item(), output, gradient)


def _named_adjoint(ctx: ParallelContext, axis: str, name: str, dim: int, transposed: bool) -> Products:
    return _adjoint(ctx, axis, OPS[name], dim, transposed)


def _misused_adjoint(ctx: ParallelContext, axis: str, name: str, dim: int, transposed: bool) -> Products:
    return _adjoint(ctx, axis, MISUSED[name], dim, transposed)


def _mismatch(op: Op, group: list[Products]) -> float:
    """|<A x, y> - <x, A* y>| over the axis, identical values counted once, relative to their size."""
    forward = group[0].forward if op.same_output else sum(rank.forward for rank in group)
    backward = group[0].backward if op.same_input else sum(rank.backward for rank in group)
    return abs(forward - backward) / max(1.0, abs(forward))


@pytest.mark.cover(place=PLACES, name=list(OPS), dim=[0, 1, 2, -1], transposed=[False, True])
def test_backward_is_the_adjoint(
    pools: Pools, place: tuple[Layout, str], name: str, dim: int, transposed: bool
) -> None:
    layout, axis = place
    op = OPS[name]
    results = pools.run(layout, _named_adjoint, axis, name, dim, transposed)
    for ranks in layout.grid.groups(axis):
        group = [results[rank] for rank in ranks]
        assert _mismatch(op, group) <= ADJOINT_TOLERANCE
        for rank in group[1:]:
            assert not op.same_output or torch.equal(rank.output, group[0].output), "outputs differ on the axis"
            assert not op.same_input or torch.equal(rank.gradient, group[0].gradient), "gradients differ on the axis"


@pytest.mark.cover(place=PLACES_WITH_PEERS, name=list(MISUSED))
def test_a_wrong_pairing_fails_the_adjoint_test(pools: Pools, place: tuple[Layout, str], name: str) -> None:
    """The negative control: forward values are the same, only the identity tells."""
    layout, axis = place
    results = pools.run(layout, _misused_adjoint, axis, name, 1, False)
    for ranks in layout.grid.groups(axis):
        assert _mismatch(MISUSED[name], [results[rank] for rank in ranks]) > 1e-3


def _weight(axis: Axis, *shape: int) -> Tensor:
    """A weight of this rank's own."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(axis.rank), dtype=torch.float64)


def _column_then_row(x: Tensor, axis: Axis) -> Tensor:
    hidden = torch.tanh(collectives.share(x, axis) @ _weight(axis, x.shape[1], 3))
    return collectives.all_reduce(hidden @ _weight(axis, 3, 2), axis)


def _sequence_parallel(x: Tensor, axis: Axis) -> Tensor:
    shard = torch.tanh(collectives.split(x, axis, 0))
    whole = collectives.all_gather_summing(shard, axis, 0) @ _weight(axis, x.shape[1], 3)
    return collectives.all_gather(torch.tanh(collectives.reduce_scatter(whole, axis, 0)), axis, 0)


def _expert_slices(x: Tensor, axis: Axis) -> Tensor:
    shard = collectives.split(x, axis, 0)
    joined = collectives.all_gather_summing(shard, axis, 0)
    summed = collectives.all_reduce_summing(torch.tanh(joined @ _weight(axis, x.shape[1], 3)), axis)
    return collectives.all_gather(collectives.all_to_all(summed, axis) * _weight(axis, 3), axis, 0)


def _there_and_back(x: Tensor, axis: Axis) -> Tensor:
    shard = collectives.share(x, axis) * _weight(axis, x.shape[1])
    inbox = torch.tanh(collectives.all_to_all(shard, axis)) * (axis.rank + 1)
    return collectives.all_gather(collectives.all_to_all(inbox, axis), axis, 1)


def _uneven_there_and_back(x: Tensor, axis: Axis) -> Tensor:
    sent = _send_splits(axis.size, sparse=False)
    received = [row[axis.rank] for row in sent]
    rows = collectives.share(x, axis)[:1].expand(sum(sent[axis.rank]), -1) * (axis.rank + 1)
    inbox = torch.tanh(collectives.all_to_all_uneven(rows, axis, sent[axis.rank], received)) * _weight(axis, x.shape[1])
    back = collectives.all_to_all_uneven(inbox, axis, received, sent[axis.rank])
    return collectives.all_reduce(back.sum(dim=0), axis)


# Functions of a value that is identical on the axis, to one that is again: there finite differences taken by all ranks
# in step are those of the whole, so torch's gradcheck judges every pairing of operators at once.
CHAINS = {
    function.__name__: function
    for function in (_column_then_row, _sequence_parallel, _expert_slices, _there_and_back, _uneven_there_and_back)
}


def _gradcheck(ctx: ParallelContext, axis_name: str, chain: str) -> bool:
    axis = ctx.axis(axis_name)
    x = torch.randn(8, 2, generator=torch.Generator().manual_seed(7), dtype=torch.float64, requires_grad=True)
    return torch.autograd.gradcheck(lambda x: CHAINS[chain](x, axis), (x,), fast_mode=True, raise_exception=False)


@pytest.mark.cover(
    place=PLACES,
    chain=list(CHAINS),
    where=lambda place, chain: place[0].world > 1 or "uneven" not in chain,  # one rank sends itself no row in that plan
)
def test_chains_pass_gradcheck(pools: Pools, place: tuple[Layout, str], chain: str) -> None:
    assert all(pools.run(place[0], _gradcheck, place[1], chain))


def _sum_backward(ctx: ParallelContext, name: str) -> Tensor:
    """The gradient of sum() has strides of zero."""
    op = OPS[name]
    x = torch.zeros(op.rows(ctx.tp.size, ctx.tp.rank), *SHAPE[1:], requires_grad=True)
    (gradient,) = torch.autograd.grad(op.call(x, ctx.tp, 0).sum(), x)
    return gradient


@pytest.mark.cover(layout=[Layout(2, tp=2), Layout(4, tp=4)], name=list(OPS))
def test_an_expanded_gradient_is_sent_whole(pools: Pools, layout: Layout, name: str) -> None:
    """Reference: the sum of ones that reach an element, by the table of adjoints."""
    ones = layout.world if name in ("all_gather_summing", "all_reduce_summing", "share") else 1
    for gradient in pools.run(layout, _sum_backward, name):
        assert torch.equal(gradient, torch.full_like(gradient, ones))


def _indivisible(ctx: ParallelContext, name: str) -> None:
    for transposed in (torch.zeros(3, 5), torch.zeros(5, 3).t()):
        with pytest.raises(ValueError, match=r"dim 1 of \[3, 5\] .* 4 ranks of axis tp"):
            OPS[name].call(transposed, ctx.tp, 1)


@pytest.mark.parametrize("name", ["split", "reduce_scatter"])
def test_a_dim_that_does_not_divide_is_refused(pools: Pools, name: str) -> None:
    pools.run(Layout(4, tp=4), _indivisible, name)
