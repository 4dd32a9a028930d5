"""Dropout draws from its own stream only, keeps the mean, and its gradient passes through the kept elements."""

import torch

from megatron_parm.layers.dropout import StreamDropout


def stream(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_same_stream_same_mask_whatever_the_default_stream_does() -> None:
    x = torch.ones(1000)
    torch.manual_seed(1)
    first = StreamDropout(0.5, stream())(x)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert torch.equal(StreamDropout(0.5, stream())(x), first)
    assert torch.equal(torch.get_rng_state(), before), "the default stream has moved"
    assert not torch.equal(StreamDropout(0.5, stream(2))(x), first)


def test_rate_scale_and_gradient() -> None:
    x = torch.ones(100_000, requires_grad=True)
    found = StreamDropout(0.2, stream())(x)
    found.sum().backward()
    assert found.unique().tolist() == [0.0, 1.25]
    assert abs((found == 0).float().mean().item() - 0.2) < 5 * (0.2 * 0.8 / 1e5) ** 0.5  # five sigma
    assert torch.equal(x.grad, found.detach())


def test_evaluation_and_zero_are_the_identity() -> None:
    x, generator = torch.ones(10), stream()
    before = generator.get_state()
    assert StreamDropout(0.0, generator)(x) is x
    assert StreamDropout(0.5, generator).eval()(x) is x
    assert torch.equal(generator.get_state(), before)
