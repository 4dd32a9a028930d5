"""The experts. References: a loop over experts in plain torch, and the padded layout beside the packed one."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_parm.layers.feed_forward import Activation
from megatron_parm.layers.initialise import Initialiser, attach, initialise_weights
from megatron_parm.moe.buckets import Loads, Packed
from megatron_parm.moe.experts import Experts
from megatron_parm.parallel import transport
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.sharding import spec_of
from tests.harness.layouts import Layout
from tests.harness.pools import Pools

EXPERTS = 4
# Rows of (peer, expert): an expert without a row at all (2), a peer without one for an expert it has rows of (0, 1).
COUNTS = ((2, 0, 0, 3), (1, 4, 0, 2))
LAYOUTS = {
    "uneven": COUNTS,
    "one peer": ((2, 0, 1, 3),),
    "an idle peer": ((2, 1, 0, 3), (0, 0, 0, 0), (1, 4, 0, 2)),
}


def make_experts(
    ctx: ParallelContext,
    hidden: int = 8,
    ffn: int = 16,
    activation: Activation = "gelu",
    bias: bool = True,
    dtype: torch.dtype = torch.float64,
) -> Experts:
    experts = Experts(
        hidden,
        ffn,
        EXPERTS,
        activation=activation,
        bias=bias,
        ep=ctx.ep,
        esp=ctx.esp,
        initialiser=Initialiser("normal", 0.5),
        output_initialiser=Initialiser("normal", 0.5),
        dtype=dtype,
        device=ctx.device,
    )
    for parameter in experts.parameters():
        attach(parameter, Initialiser("normal", 0.5))  # biases too
    initialise_weights(experts, 5)
    return experts


def make_rows(hidden: int = 8, dtype: torch.dtype = torch.float64, counts: Loads = COUNTS) -> Tensor:
    count = sum(map(sum, counts))
    return torch.randn(count, hidden, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def _expert(x: Tensor, experts: Experts, e: int) -> Tensor:
    weight = experts.weight1[e]
    if weight.dim() == 3:
        biases = (None, None) if experts.bias1 is None else experts.bias1[e]
        gate, up = (F.linear(x, w, b) for w, b in zip(weight, biases, strict=True))
        x = F.silu(gate) * up
    else:
        x = F.gelu(F.linear(x, weight, None if experts.bias1 is None else experts.bias1[e]))
    return F.linear(x, experts.weight2[e], None if experts.bias2 is None else experts.bias2[e])


def loop(rows: Tensor, experts: Experts, counts: Loads = COUNTS) -> Tensor:
    """Each block of rows through its own expert."""
    sizes = [count for peer in counts for count in peer]
    blocks = [_expert(block, experts, i % EXPERTS) for i, block in enumerate(torch.split(rows, sizes))]
    return torch.cat(blocks)


def _gradients(experts: Experts, rows: Tensor) -> dict[str, Tensor | None]:
    return {"rows": rows.grad} | {name: parameter.grad for name, parameter in experts.named_parameters()}


def _compare(
    dtype: torch.dtype,
    tolerance: float,
    hidden: int,
    ffn: int,
    activation: Activation = "gelu",
    bias: bool = True,
    counts: Loads = COUNTS,
) -> None:
    """Outputs and all gradients of the packed path against the loop in float64 on the same numbers."""
    ctx = ParallelContext.single()
    experts = make_experts(ctx, hidden, ffn, activation, bias, dtype)
    exact = make_experts(ctx, hidden, ffn, activation, bias, torch.float64)
    with torch.no_grad():
        for one, other in zip(experts.parameters(), exact.parameters(), strict=True):
            other.copy_(one)
    rows = make_rows(hidden, dtype, counts).requires_grad_()
    exact_rows = rows.detach().double().requires_grad_()
    loads = (tuple(range(EXPERTS)),)
    output = experts(Packed(rows, counts, loads))
    assert isinstance(output, Packed) and output.counts == counts and output.loads == loads
    expected = loop(exact_rows, exact, counts)
    gradient = make_rows(hidden, dtype, counts).flip(0)
    output.rows.backward(gradient)
    expected.backward(gradient.double())
    pairs = {"output": (output.rows, expected)}
    found, wanted = _gradients(experts, rows), _gradients(exact, exact_rows)
    for name in wanted:
        assert found[name] is not None and wanted[name] is not None, name
        pairs[name] = (found[name], wanted[name])  # type: ignore[assignment]
    for name, (one, other) in pairs.items():
        assert one.dtype == dtype
        error = (one.double() - other).abs().max() / other.abs().max()
        assert error < tolerance, name


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_packed_equals_the_loop_in_float64(activation: Activation, bias: bool) -> None:
    _compare(torch.float64, 1e-13, 8, 16, activation, bias)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("counts", LAYOUTS.values(), ids=LAYOUTS)
def test_rows_may_come_from_any_number_of_peers(counts: Loads, dtype: torch.dtype) -> None:
    _compare(dtype, 8 * torch.finfo(dtype).eps, 8, 16, counts=counts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("hidden", "ffn"), [(16, 32), (6, 16), (16, 10), (5, 7)], ids=["aligned", "odd hidden", "odd width", "odd both"]
)
def test_grouped_product_equals_the_loop(dtype: torch.dtype, hidden: int, ffn: int) -> None:
    """grouped_mm refuses rows that are no multiple of 16 bytes. Tolerance: some roundings of the dtype."""
    _compare(dtype, 8 * torch.finfo(dtype).eps, hidden, ffn)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_padded_equals_packed(dtype: torch.dtype, activation: Activation) -> None:
    """`[peers, e, c, h]` against the same rows as Packed: outputs and gradients."""
    experts = make_experts(ParallelContext.single(), activation=activation, dtype=dtype)
    slots = torch.randn(3, EXPERTS, 2, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    slots = slots.to(dtype).requires_grad_()
    rows = slots.detach().view(-1, 8).clone().requires_grad_()
    gradient = torch.randn(slots.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)
    output = experts(slots)
    assert isinstance(output, Tensor) and output.shape == slots.shape
    output.backward(gradient)
    first = [parameter.grad for parameter in experts.parameters()]
    experts.zero_grad()
    packed = experts(Packed(rows, ((2,) * EXPERTS,) * 3))
    assert isinstance(packed, Packed) and slots.grad is not None
    packed.rows.backward(gradient.view(-1, 8))
    second = [parameter.grad for parameter in experts.parameters()]
    pairs = [
        (output.reshape(-1, 8), packed.rows),
        (slots.grad.view(-1, 8), rows.grad),
        *zip(first, second, strict=True),
    ]
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=100 * torch.finfo(dtype).eps, atol=100 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_an_idle_expert_has_gradient_exactly_zero(dtype: torch.dtype) -> None:
    """FC-25: not absent, not NaN. The workers' new memory is NaN, so an unwritten gradient shows."""
    experts = make_experts(ParallelContext.single(), dtype=dtype)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        output = experts(Packed(make_rows(dtype=dtype), COUNTS))
        assert isinstance(output, Packed)
        output.rows.square().sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    for name, parameter in experts.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all()
        assert parameter.grad[2].abs().max() == 0, name
        assert all(parameter.grad[e].abs().max() > 0 for e in (0, 1, 3)), name


@pytest.mark.parametrize("peers", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_rank_without_any_row_takes_part_in_backward(dtype: torch.dtype, peers: int) -> None:
    experts = make_experts(ParallelContext.single(), dtype=dtype)
    rows = torch.empty(0, 8, dtype=dtype, requires_grad=True)
    output = experts(Packed(rows, ((0,) * EXPERTS,) * peers))
    assert isinstance(output, Packed) and output.rows.shape == (0, 8)
    output.rows.sum().backward()
    assert rows.grad is not None and rows.grad.shape == (0, 8)
    for parameter in experts.parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() == 0


@pytest.mark.parametrize("counts", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gradient_of_stride_0_passes(dtype: torch.dtype, counts: Loads) -> None:
    """`sum().backward()` sends an expanded scalar, of which grouped_mm's own backward is not capable."""
    found = {}
    for form in ("expanded", "written out"):
        experts = make_experts(ParallelContext.single(), dtype=dtype, bias=False)
        output = experts(Packed(make_rows(dtype=dtype, counts=counts), counts))
        assert isinstance(output, Packed)
        if form == "expanded":
            output.rows.sum().backward()
        else:
            output.rows.backward(torch.ones_like(output.rows))
        found[form] = experts.weight1.grad
    torch.testing.assert_close(found["expanded"], found["written out"], rtol=0, atol=0)


def test_copies_divide_the_weights_gradient_alone() -> None:
    """The baseline's MP peers send every token tp times."""
    gradients = []
    for copies in (1, 4):
        experts = make_experts(ParallelContext.single())
        slots = torch.ones(1, EXPERTS, 2, 8, dtype=torch.float64, requires_grad=True)
        output = experts(slots, copies=copies)
        assert isinstance(output, Tensor)
        output.square().sum().backward()
        gradients.append(([parameter.grad for parameter in experts.parameters()], slots.grad))
    for one, other in zip(gradients[0][0], gradients[1][0], strict=True):
        assert one is not None and other is not None
        torch.testing.assert_close(other * 4, one, rtol=1e-14, atol=0)
    assert torch.equal(gradients[0][1], gradients[1][1])  # type: ignore[arg-type]


def _shard(ctx: ParallelContext, activation: Activation) -> dict[str, object]:
    """This rank's part of the outputs for the rows of its experts, summed over esp."""
    experts = make_experts(ctx, activation=activation)
    local = EXPERTS // ctx.ep.size
    slots = torch.randn(1, EXPERTS, 3, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    own = slots[:, ctx.ep.rank * local : (ctx.ep.rank + 1) * local]
    output = experts(own)
    assert isinstance(output, Tensor)
    return {
        "output": transport.sum_over(output.detach(), ctx.esp),
        "experts": slice(ctx.ep.rank * local, (ctx.ep.rank + 1) * local),
        "weights": {name: (spec_of(p).box, p.detach()) for name, p in experts.named_parameters()},
    }


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("layout", [Layout(2, esp=2), Layout(2, ep=2), Layout(4, ep=2, esp=2)], ids=str)
def test_the_parts_of_esp_add_up(pools: Pools, layout: Layout, activation: Activation) -> None:
    """Reference: one process. The second bias must be counted once."""
    experts = make_experts(ParallelContext.single(), activation=activation)
    slots = torch.randn(1, EXPERTS, 3, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = experts(slots)
    assert isinstance(expected, Tensor)
    for found in pools.run(layout, _shard, activation):
        torch.testing.assert_close(found["output"], expected.detach()[:, found["experts"]], rtol=1e-13, atol=1e-13)
        for name, parameter in experts.named_parameters():
            box, part = found["weights"][name]
            assert torch.equal(part, parameter.detach()[box])
