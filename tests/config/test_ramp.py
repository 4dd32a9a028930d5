"""A growing batch. References: Megatron's calculator, written out step by step; whole runs walked sample by sample."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_parm.config.ramp import RampUp
from megatron_parm.errors import ConfigError


def _ramp(text: str, full: int) -> RampUp:
    ramp = RampUp.of(text.split(), full)
    assert ramp is not None
    return ramp


def _megatron(start: int, increment: int, samples: int, full: int, consumed: int) -> int:
    """Its formula: floor(consumed / (samples / increments)) increments, the full size beyond the ramp."""
    per_increment = samples / ((full - start) // increment)
    if consumed > samples:
        return full
    return min(start + int(consumed / per_increment) * increment, full)


def test_sizes_by_hand() -> None:
    ramp = _ramp("8 4 40", 24)
    assert ramp.sizes == [8, 12, 16, 20, 24]
    assert [ramp.size_at(consumed) for consumed in (0, 8, 9, 10, 19, 20, 30, 39, 40, 41)] == [
        8, 8, 8, 12, 12, 16, 20, 20, 24, 24,
    ]  # fmt: skip


@given(st.integers(1, 20), st.integers(1, 8), st.integers(1, 8), st.integers(1, 500), st.integers(0, 600))
def test_sizes_equal_megatrons(start: int, increment: int, increments: int, samples: int, consumed: int) -> None:
    full = start + increment * increments
    ramp = RampUp(start, increment, samples, full)
    if (consumed * increments) % samples:  # at a border Megatron's float division may fall on either side
        assert ramp.size_at(consumed) == _megatron(start, increment, samples, full, consumed)


@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 5), st.integers(1, 99), st.integers(0, 400))
def test_iterations_and_samples_equal_a_walk(
    start: int, increment: int, increments: int, samples: int, total: int
) -> None:
    ramp = RampUp(start, increment, samples, start + increment * increments)
    steps = consumed = 0
    while consumed + ramp.size_at(consumed) <= total:
        assert ramp.samples_of(steps, 0) == consumed
        consumed += ramp.size_at(consumed)
        steps += 1
    assert ramp.iterations(total) == steps
    assert ramp.samples_of(steps, 0) == consumed
    assert ramp.samples_of(3, consumed) == ramp.samples_of(steps + 3, 0) - consumed


def test_no_words_are_no_ramp() -> None:
    assert RampUp.of((), 8) is None


@pytest.mark.parametrize(
    ("text", "full", "told"),
    [
        ("8 4", 24, ["--rampup-batch-size 8 4", "three whole numbers"]),
        ("8 x 40", 24, ["three whole numbers"]),
        ("0 4 40", 24, ["at least 1"]),
        ("24 4 40", 24, ["less than the full batch"]),
        ("8 5 40", 24, ["growth of 16", "--global-batch-size 23 or 28", "increment of 4"]),
    ],
)
def test_what_cannot_grow_is_refused(text: str, full: int, told: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        RampUp.of(text.split(), full)
    for part in told:
        assert part in str(caught.value)
    if "increment of 4" in told:
        for size in (23, 28):
            assert RampUp.of(text.split(), size) is not None
