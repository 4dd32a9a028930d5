"""The rank grid. References: tables written by hand from docs/parm.md's rank order; counting for random sizes."""

from math import lcm

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_parm.errors import LayoutError
from megatron_parm.parallel.grid import AXES, RankGrid


@st.composite
def grids(draw: st.DrawFn) -> RankGrid:
    """A grid that fits, also with sizes that are no powers of two."""
    tp, ep, esp = (draw(st.sampled_from([1, 2, 3, 4])) for _ in range(3))
    pp, spare = (draw(st.sampled_from([1, 2])) for _ in range(2))
    stage = lcm(tp, ep * esp) * spare
    return RankGrid(world=pp * stage, tp=tp, pp=pp, ep=ep, esp=esp)


# Dense part: tp fastest, then dp, then pp. Experts: esp fastest, then ep, then edp, then pp.
BY_HAND = [
    (
        RankGrid(8, tp=2, ep=2, esp=2),
        {
            "tp": [(0, 1), (2, 3), (4, 5), (6, 7)],
            "dp": [(0, 2, 4, 6), (1, 3, 5, 7)],
            "pp": [(0,), (1,), (2,), (3,), (4,), (5,), (6,), (7,)],
            "esp": [(0, 1), (2, 3), (4, 5), (6, 7)],
            "ep": [(0, 2), (1, 3), (4, 6), (5, 7)],
            "ep_esp": [(0, 1, 2, 3), (4, 5, 6, 7)],
            "edp": [(0, 4), (1, 5), (2, 6), (3, 7)],
            "stage": [(0, 1, 2, 3, 4, 5, 6, 7)],
            "world": [(0, 1, 2, 3, 4, 5, 6, 7)],
        },
    ),
    (
        RankGrid(8, tp=2, pp=2, ep=4),
        {
            "tp": [(0, 1), (2, 3), (4, 5), (6, 7)],
            "dp": [(0, 2), (1, 3), (4, 6), (5, 7)],
            "pp": [(0, 4), (1, 5), (2, 6), (3, 7)],
            "ep": [(0, 1, 2, 3), (4, 5, 6, 7)],
            "ep_esp": [(0, 1, 2, 3), (4, 5, 6, 7)],
            "edp": [(0,), (1,), (2,), (3,), (4,), (5,), (6,), (7,)],
            "stage": [(0, 1, 2, 3), (4, 5, 6, 7)],
        },
    ),
    (
        RankGrid(4, tp=4, ep=2, esp=2),
        {
            "tp": [(0, 1, 2, 3)],
            "dp": [(0,), (1,), (2,), (3,)],
            "esp": [(0, 1), (2, 3)],
            "ep": [(0, 2), (1, 3)],
            "ep_esp": [(0, 1, 2, 3)],
        },
    ),
    (
        RankGrid(6, tp=1, pp=2, ep=3),
        {"ep": [(0, 1, 2), (3, 4, 5)], "dp": [(0, 1, 2), (3, 4, 5)], "pp": [(0, 3), (1, 4), (2, 5)]},
    ),
]


@pytest.mark.parametrize(("grid", "groups"), BY_HAND, ids=lambda value: str(value)[:60] if value else "")
def test_groups_equal_the_tables_by_hand(grid: RankGrid, groups: dict[str, list[tuple[int, ...]]]) -> None:
    assert {axis: grid.groups(axis) for axis in groups} == groups


@given(grids())
def test_every_rank_is_in_exactly_one_group_of_every_axis(grid: RankGrid) -> None:
    for axis in AXES:
        groups = grid.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(grid.world))
        assert {len(group) for group in groups} == {grid.size(axis)}
        assert all(list(group) == sorted(group) for group in groups)


@given(grids(), st.data())
def test_coordinates_rebuild_the_rank(grid: RankGrid, data: st.DataObject) -> None:
    """Reference: the mixed-radix number of the coordinates, slowest axis first."""
    rank = data.draw(st.integers(0, grid.world - 1))
    for order in (("pp", "dp", "tp"), ("pp", "edp", "ep", "esp")):
        number = 0
        for axis in order:
            number = number * grid.size(axis) + grid.coordinate(axis, rank)
            assert rank in grid.group_of(axis, rank)
        assert number == rank


@given(grids())
def test_joint_axes_hold_their_parts(grid: RankGrid) -> None:
    for rank in range(grid.world):
        joint = grid.coordinate("ep", rank) * grid.esp + grid.coordinate("esp", rank)
        assert grid.coordinate("ep_esp", rank) == joint, "esp is the fastest in ep_esp"
        stage = set(grid.group_of("stage", rank))
        for axis in ("tp", "dp", "esp", "ep", "edp", "ep_esp"):
            assert stage.issuperset(grid.group_of(axis, rank)), "no group of a layer crosses a stage"


def test_first_and_last_stage_share_a_group_and_no_other_stage_does() -> None:
    grid = RankGrid(8, tp=2, pp=4)
    assert [grid.ends_of(rank) for rank in range(8)] == [(0, 6), (1, 7), (2,), (3,), (4,), (5,), (0, 6), (1, 7)]
    assert RankGrid(4, tp=2).ends_of(1) == (1,)


@given(grids())
def test_the_sets_that_need_a_group_are_those_of_every_axis_and_of_the_ends(grid: RankGrid) -> None:
    found = grid.rank_sets()
    wanted = {ranks for axis in AXES for ranks in grid.groups(axis)} | {grid.ends_of(r) for r in range(grid.world)}
    assert len(found) == len(set(found)) and set(found) == {ranks for ranks in wanted if len(ranks) > 1}


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({"world": 8, "tp": 3}, ["--tensor-model-parallel-size 3", "8 ranks", "multiple of 3", "1, 2, 4, 8"]),
        ({"world": 6, "tp": 2, "pp": 2}, ["x --pipeline-model-parallel-size 2 = 4", "6 ranks", "1, 2, 3, 6"]),
        (
            {"world": 8, "pp": 2, "ep": 4, "esp": 2},
            [
                "--expert-model-parallel-size 4",
                "--expert-tensor-parallel-size 2 = 8",
                "4 ranks",
                "world 8 / pp 2",
                "1, 2, 4",
            ],
        ),
        ({"world": 8, "esp": 3}, ["--expert-tensor-parallel-size 3", "1, 2, 4, 8"]),
        ({"world": 8, "tp": 0}, ["--tensor-model-parallel-size 0", "at least 1"]),
        ({"world": 8, "ep": -2}, ["--expert-model-parallel-size -2", "at least 1"]),
    ],
)
def test_sizes_that_do_not_fit_are_refused_in_the_words_of_the_flags(sizes: dict[str, int], told: list[str]) -> None:
    with pytest.raises(LayoutError) as caught:
        RankGrid(**sizes)
    assert caught.value.exit_code == 2
    for part in told:
        assert part in str(caught.value)
