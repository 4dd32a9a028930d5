"""The tables hold what their names say, and a cover meets every pair."""

from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.layouts import DENSE_LAYOUTS, MOE_LAYOUTS, POOL_SIZES, Layout, cover, every_layout, everything


def _pairs(rows: list[tuple[int, ...]]) -> set[tuple[tuple[int, int], ...]]:
    return {pair for row in rows for pair in combinations(tuple(enumerate(row)), min(2, len(row)))}


@given(st.lists(st.integers(1, 5).map(lambda size: list(range(size))), min_size=1, max_size=4))
def test_a_cover_meets_every_pair_of_the_product_and_no_row_is_idle(axes: list[list[int]]) -> None:
    rows = cover(*axes)
    assert _pairs(rows) == _pairs(list(product(*axes)))
    assert len(set(rows)) == len(rows) and rows == sorted(rows)
    assert rows == cover(*axes)


@given(st.sets(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)), max_size=40))
def test_a_cover_keeps_to_the_allowed_rows(allowed: set[tuple[int, ...]]) -> None:
    def where(*row: int) -> bool:
        return row in allowed

    axes = [range(4)] * 3
    assert set(cover(*axes, where=where)) <= allowed
    assert _pairs(cover(*axes, where=where)) == _pairs(list(allowed))
    assert set(everything(*axes, where=where)) == allowed


def test_layouts_of_the_largest_pool_share_their_pairs() -> None:
    layouts = [Layout(2), Layout(4), Layout(8), Layout(8, tp=2), Layout(8, ep=2)]
    rows = cover(layouts, range(6))
    assert {(layout.world, number) for layout, number in rows} == set(product((2, 4, 8), range(6)))
    assert {layout for layout, _ in rows} == set(layouts) and len(rows) == 18


def test_a_cover_is_small() -> None:
    """Reference: no cover of four axes of 4 has under 16 rows; the product has 256."""
    assert 16 <= len(cover(*[range(4)] * 4)) <= 24
    assert cover("ab") == [("a",), ("b",)]
    assert len(everything("ab", "cd")) == 4


@pytest.mark.parametrize("layout", [*MOE_LAYOUTS, *DENSE_LAYOUTS], ids=str)
def test_the_tables_hold_layouts_that_a_pool_can_run(layout: Layout) -> None:
    assert layout.world in (1, *POOL_SIZES)
    assert layout.grid.dp * layout.tp == layout.world


def test_moe_layouts_hold_every_relation_of_the_axes() -> None:
    grids = [layout.grid for layout in MOE_LAYOUTS]
    for name, holds in {
        "tp < esp": any(g.tp < g.esp for g in grids),
        "tp = esp > 1": any(g.tp == g.esp > 1 for g in grids),
        "tp > esp > 1": any(g.tp > g.esp > 1 for g in grids),
        "edp > 1 beside ep and esp": any(g.edp > 1 and g.ep > 1 and g.esp > 1 for g in grids),
        "tp != ep * esp": any(g.tp not in (1, g.ep * g.esp) and g.ep > 1 for g in grids),
        "edp and dp differ": any(g.edp != g.dp and g.edp > 1 for g in grids),
    }.items():
        assert holds, name
    assert len(set(MOE_LAYOUTS)) == len(MOE_LAYOUTS)


def test_every_layout_counts() -> None:
    """Reference by hand, world 2: tp in (1, 2) and (ep, esp) in ((1, 1), (1, 2), (2, 1))."""
    assert {(x.tp, x.ep, x.esp) for x in every_layout([2])} == {
        (tp, ep, esp) for tp in (1, 2) for ep, esp in ((1, 1), (1, 2), (2, 1))
    }
    assert Layout(2, pp=2) in set(every_layout([2], pipeline=True))
    assert set(MOE_LAYOUTS) <= set(every_layout())


@pytest.mark.cover(layout=MOE_LAYOUTS[:2], size=[1, 2], where=lambda layout, size: size <= layout.world)
def test_the_cover_marker_parametrises(layout: Layout, size: int) -> None:
    assert size <= layout.world
