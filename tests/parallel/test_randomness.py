"""Which ranks draw alike, and that a saved state draws on. Reference: equality of the numbers drawn."""

from itertools import combinations

import pytest
import torch
from torch import Tensor

from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.randomness import RandomStates, derive_seed
from tests.harness.layouts import Layout
from tests.harness.pools import Pools


def _draw(states: RandomStates) -> tuple[Tensor, Tensor]:
    return torch.rand(8, generator=states.replicated), torch.rand(8)


def _streams(ctx: ParallelContext, seed: int) -> tuple[tuple[int, int], Tensor, Tensor]:
    return ((ctx.pp.rank, ctx.dp.rank), *_draw(RandomStates(seed, ctx)))


@pytest.mark.parametrize("layout", [Layout(4, tp=2), Layout(8, tp=2, pp=2), Layout(4, ep=2, esp=2), Layout(4, tp=4)])
def test_replicated_is_alike_on_tp_alone_and_sharded_nowhere(pools: Pools, layout: Layout) -> None:
    for first, second in combinations(pools.run(layout, _streams, 7), 2):
        assert torch.equal(first[1], second[1]) == (first[0] == second[0])
        assert not torch.equal(first[2], second[2])


def test_both_streams_follow_the_seed(pools: Pools) -> None:
    first, again, other = (pools.run(Layout(2), _streams, seed)[1] for seed in (7, 7, 8))
    for stream in (1, 2):
        assert torch.equal(first[stream], again[stream])
        assert not torch.equal(first[stream], other[stream])
    assert not torch.equal(first[1], first[2])


def _resume(ctx: ParallelContext) -> tuple[bool, bool]:
    states = RandomStates(3, ctx)
    _draw(states)
    saved = {name: state.clone() for name, state in states.state_dict().items()}
    expected = _draw(states)
    resumed = RandomStates(99, ctx)
    resumed.load_state_dict(saved)
    found = _draw(resumed)
    return torch.equal(found[0], expected[0]), torch.equal(found[1], expected[1])


@pytest.mark.parametrize("layout", [Layout(1), Layout(2, tp=2)], ids=str)
def test_a_saved_state_draws_on(pools: Pools, layout: Layout) -> None:
    assert pools.run(layout, _resume) == [(True, True)] * layout.world


def _saved_types(ctx: ParallelContext) -> dict[str, Tensor]:
    return RandomStates(3, ctx).state_dict()


def test_states_are_bytes_on_the_host(pools: Pools) -> None:
    states = pools.run(Layout(1), _saved_types)[0]
    assert set(states) == {"replicated", "sharded"}
    assert all(state.dtype == torch.uint8 and state.device.type == "cpu" for state in states.values())


def test_seeds_are_the_same_on_every_machine() -> None:
    """Reference: the sha256sum tool on "1234/replicated/0/0"; the first 8 bytes, little endian, halved."""
    assert derive_seed(1234, "replicated", 0, 0) == 0x1CE9352DBF7610C9 >> 1
    assert derive_seed(1, 23) != derive_seed(12, 3)
    assert 0 <= derive_seed("x") < 2**63
