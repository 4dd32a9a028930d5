"""Recomputation against the same function without it: bitwise equal gradients and streams, and less memory kept."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from megatron_parm.layers.dropout import StreamDropout
from megatron_parm.layers.recompute import Recomputation, without_keeping
from tests.harness.memory import KeptBytes

X = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))


class Noisy(nn.Module):
    """Products between dropouts of both streams."""

    def __init__(self) -> None:
        super().__init__()
        self.stream = torch.Generator().manual_seed(3)
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)
        self.of_stream, self.of_device = StreamDropout(0.3, self.stream), StreamDropout(0.3, None)
        self.runs = self.ends = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        y = self.second(self.of_device(torch.tanh(self.of_stream(self.first(x)))))
        self.ends += 1
        return y


def noisy() -> Noisy:
    torch.manual_seed(2)
    return Noisy()


def outcome(module: Noisy, run: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Output, gradients, and what both streams draw next."""
    torch.manual_seed(4)
    x = X.clone().requires_grad_()
    output = run(run(x))
    output.square().sum().backward()
    drawn = [torch.rand(3, generator=module.stream), torch.rand(3)]
    return [output.detach(), x.grad, *(p.grad for p in module.parameters()), *drawn]


@pytest.mark.parametrize("is_local", [True, False])
def test_gradients_and_streams_are_bitwise_those_without(is_local: bool) -> None:
    plain, again = noisy(), noisy()
    recompute = Recomputation((again.stream,))
    wanted = outcome(plain, plain)
    found = outcome(again, lambda x: recompute(again, x, is_local=is_local))
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    assert (plain.runs, again.runs) == (2, 4)


def test_a_stream_that_is_not_named_draws_other_numbers() -> None:
    """The negative control: the gradients of another mask."""
    plain, again = noisy(), noisy()
    wanted, found = outcome(plain, plain), outcome(again, lambda x: Recomputation()(again, x))
    assert torch.equal(wanted[0], found[0]) and not torch.equal(wanted[1], found[1])


def test_a_function_that_communicates_runs_to_its_end() -> None:
    for is_local, ends in ((True, 1), (False, 2)):
        module = noisy()
        module.second = nn.Identity()
        tail = Recomputation((module.stream,))(lambda x, m=module: m(x), X.clone().requires_grad_(), is_local=is_local)
        tail.sum().backward()
        assert (module.runs, module.ends) == (2, ends)


def test_the_second_run_is_quiet_and_evaluation_has_none() -> None:
    quiet: list[bool] = []

    @contextmanager
    def quietly() -> Iterator[None]:
        quiet.append(True)
        yield
        quiet.append(False)

    module = noisy()
    recompute = Recomputation((module.stream,), quietly)
    with torch.no_grad():
        recompute(module, X)
    assert module.runs == 1 and quiet == []
    output = recompute(module, X.clone().requires_grad_(), is_local=False)
    assert quiet == []
    output.sum().backward()
    assert quiet == [True, False] and module.runs == 3


def _kept(run: Callable[[Tensor], Tensor]) -> int:
    x = X.clone().requires_grad_()
    with KeptBytes() as bytes_:
        output = run(x)
        return bytes_.alive(but=[output, x])


def test_only_the_inputs_are_kept() -> None:
    module = noisy()
    with_all, inputs_alone = _kept(module), _kept(lambda x: Recomputation((module.stream,))(module, x))
    assert inputs_alone <= 5056 + 64 * 16 * 4 < with_all  # the state of the device's stream, at most the input again


def test_an_output_that_can_be_made_again_is_not_kept() -> None:
    """The weight's gradient needs the input of a product, which the norm makes again from its own input."""
    norm, product = nn.LayerNorm(16), nn.Linear(16, 16)

    def run(x: Tensor, keeps: bool) -> Tensor:
        normed = norm(x)
        if keeps:
            return product(normed)
        with without_keeping(normed, lambda: norm(x.detach())):
            return product(normed)

    kept, made_again = (_kept(lambda x, k=keeps: run(x, k)) for keeps in (True, False))
    assert kept - made_again == X.numel() * 4
    gradients = []
    for keeps in (True, False):
        x = X.clone().requires_grad_()
        parameters = [x, *norm.parameters(), *product.parameters()]
        gradients.append(torch.autograd.grad(run(x, keeps).square().sum(), parameters))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
