"""The choice of a schedule. References: the least of the predicted times, and parm.md section 5 without overlap."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_parm.moe.choose import candidate_name, choose, predictions, unable
from megatron_parm.moe.cost import CHUNK_COUNTS, PUBLISHED, LayerShape, predict

SHAPE = LayerShape(
    num_tokens=4096,
    hidden_size=1024,
    ffn_hidden_size=4096,
    num_experts=8,
    topk=2,
    capacity_factor=1.2,
    min_capacity=1,
    has_slots=True,
    pads=True,
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
    able = {"baseline"} | ({"s1", "s1h"} if tokens % tp == 0 else set())
    if factor is not None:
        able |= {"s2", "s2h"} | ({"deepspeed"} if esp in (1, tp) else set())
    choice = choose(shape, PUBLISHED)
    times = {(name, r): predict(name, r, shape, PUBLISHED) for name in able for r in CHUNK_COUNTS}
    assert choice.predicted_ms == {candidate_name(*key): time for key, time in times.items()}
    assert times[choice.schedule, choice.chunks] == min(times.values())


@pytest.mark.parametrize(("factor", "winner"), [(0.25, "s2"), (0.45, "s2"), (0.55, "s1"), (1.2, "s1"), (4.0, "s1")])
def test_without_overlap_s1_beats_s2_exactly_if_k_f_is_more_than_1(factor: float, winner: str) -> None:
    times = predictions(replace(SHAPE, capacity_factor=factor), PUBLISHED, (1,))
    assert min(("s1", "s2"), key=lambda name: times[name, 1]) == winner


def test_one_copy_between_nodes_wins_where_esp_shards_share_it() -> None:
    """parm.md section 5: sequential S1H beats S1 iff (N_ESP - 1) b_a2a > N_ESP b_ag; here 3 * 3.06 > 4 * 1.68."""
    times = predictions(SHAPE, PUBLISHED, (1,))
    assert times["s1h", 1] < times["s1", 1]
    assert choose(SHAPE, PUBLISHED).schedule == "s1h"


def test_the_reason_names_times_sizes_and_source() -> None:
    choice = choose(SHAPE, PUBLISHED)
    for phrase in ("s1h", " ms", "k f = 2.4", "8.39 MB", PUBLISHED.source):
        assert phrase in choice.reason
    best = choice.predicted_ms[candidate_name(choice.schedule, choice.chunks)]
    assert choice.reason.startswith(f"{best:.2f} ms predicted")
    assert "dropless" in choose(replace(SHAPE, capacity_factor=None, has_slots=False), PUBLISHED).reason


def test_equals_go_to_the_first_of_the_table() -> None:
    """One rank: no schedule communicates."""
    assert choose(replace(SHAPE, tp=1, ep=1, esp=1), PUBLISHED).schedule == "baseline"


def test_s2_is_left_out_without_slots_in_training_or_evaluation() -> None:
    no_limit_in_evaluation = replace(SHAPE, has_slots=False)
    assert {name for name, _ in predictions(no_limit_in_evaluation, PUBLISHED)} == {"baseline", "s1", "s1h"}
    assert "capacity" in str(unable("s2", no_limit_in_evaluation))
    assert unable("s2", SHAPE) is None


def test_s1_is_left_out_where_tokens_do_not_divide() -> None:
    odd = replace(SHAPE, num_tokens=4098)
    assert {name for name, _ in predictions(odd, PUBLISHED)} == {"baseline", "deepspeed", "s2", "s2h"}
    assert all(number in str(unable("s1", odd)) for number in ("4098", "tp 4"))
    assert choose(odd, PUBLISHED).schedule == "s2h"


def test_a_fixed_schedule_is_kept_beside_all_predictions() -> None:
    choice = choose(SHAPE, PUBLISHED, "baseline", 1)
    assert (choice.schedule, choice.chunks) == ("baseline", 1) and "--moe-schedule baseline" in choice.reason
    assert set(choice.predicted_ms) == {name for name, _ in predictions(SHAPE, PUBLISHED)}


def test_fixed_chunks_are_kept_and_free_ones_chosen() -> None:
    assert choose(SHAPE, PUBLISHED, "auto", 3).chunks == 3
    times = predictions(SHAPE, PUBLISHED)
    choice = choose(SHAPE, PUBLISHED, "s2", None)
    assert choice.schedule == "s2" and times["s2", choice.chunks] == min(times["s2", r] for r in CHUNK_COUNTS)
