"""The choice of a schedule. References: the least of the predicted times, and parm.md section 5 without overlap."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_parm.moe.choose import choose, fixed, predictions, unable
from megatron_parm.moe.cost import PUBLISHED, LayerShape, predict

SHAPE = LayerShape(
    num_tokens=4096,
    hidden_size=1024,
    ffn_hidden_size=4096,
    num_experts=8,
    topk=2,
    capacity_factor=1.2,
    min_capacity=1,
    has_slots=True,
    matrices=2,
    bytes_per_element=2,
    tp=4,
    ep=8,
    esp=4,
)


@given(
    tokens=st.integers(1, 10_000),
    hidden=st.sampled_from([64, 1024, 8192]),
    factor=st.one_of(st.none(), st.floats(0.05, 8.0)),
    tp=st.sampled_from([1, 2, 4, 8]),
    ep=st.sampled_from([1, 2, 8]),
    esp=st.sampled_from([1, 2, 4]),
)
def test_the_choice_is_the_least_of_those_that_can_run(
    tokens: int, hidden: int, factor: float | None, tp: int, ep: int, esp: int
) -> None:
    shape = replace(
        SHAPE,
        num_tokens=tokens,
        hidden_size=hidden,
        capacity_factor=factor,
        has_slots=factor is not None,
        tp=tp,
        ep=ep,
        esp=esp,
    )
    able = {"baseline"} | ({"s1"} if tokens % tp == 0 else set()) | ({"s2"} if factor is not None else set())
    choice = choose(shape, PUBLISHED)
    times = {name: predict(name, shape, PUBLISHED) for name in able}
    assert choice.predicted_ms == times
    assert choice.schedule in able and times[choice.schedule] == min(times.values())
    assert choice.chunks == 1


@pytest.mark.parametrize(("factor", "winner"), [(0.25, "s2"), (0.45, "s2"), (0.55, "s1"), (1.2, "s1"), (4.0, "s1")])
def test_without_overlap_s1_wins_exactly_if_k_f_is_more_than_1(factor: float, winner: str) -> None:
    assert choose(replace(SHAPE, capacity_factor=factor), PUBLISHED).schedule == winner


def test_the_reason_names_times_sizes_and_source() -> None:
    choice = choose(SHAPE, PUBLISHED)
    for phrase in ("s1 ", "s2 ", "baseline ", " ms", "k f = 2.4", "8.39 MB", PUBLISHED.source):
        assert phrase in choice.reason
    assert choice.reason.startswith(f"s1 {choice.predicted_ms['s1']:.2f} ms predicted")
    assert "dropless" in choose(replace(SHAPE, capacity_factor=None, has_slots=False), PUBLISHED).reason


def test_equals_go_to_the_first_of_the_table() -> None:
    """One rank: no schedule communicates."""
    assert choose(replace(SHAPE, tp=1, ep=1, esp=1), PUBLISHED).schedule == "baseline"


def test_s2_is_left_out_without_slots_in_training_or_evaluation() -> None:
    no_limit_in_evaluation = replace(SHAPE, has_slots=False)
    assert set(predictions(no_limit_in_evaluation, PUBLISHED)) == {"baseline", "s1"}
    assert "capacity" in str(unable("s2", no_limit_in_evaluation))
    assert unable("s2", SHAPE) is None


def test_s1_is_left_out_where_tokens_do_not_divide() -> None:
    odd = replace(SHAPE, num_tokens=4098)
    assert set(predictions(odd, PUBLISHED)) == {"baseline", "s2"}
    assert all(number in str(unable("s1", odd)) for number in ("4098", "tp 4"))
    assert choose(odd, PUBLISHED).schedule == "s2"


def test_a_fixed_schedule_is_kept_beside_all_predictions() -> None:
    choice = fixed("baseline", SHAPE, PUBLISHED)
    assert choice.schedule == "baseline" and "--moe-schedule baseline" in choice.reason
    assert choice.predicted_ms == predictions(SHAPE, PUBLISHED)
