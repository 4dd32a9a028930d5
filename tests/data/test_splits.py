"""Train, valid and test parts. Reference: Megatron's boundaries of both generations."""

from itertools import pairwise

import pytest

from megatron_parm.data.splits import parse_split, require_sequences, split_bounds
from megatron_parm.errors import ConfigError


@pytest.mark.parametrize(
    ("count", "rounding", "edges"),
    [
        (10, "classic", [0, 10, 10, 10]),
        (10, "core", [0, 9, 10, 10]),
        (12345, "classic", [0, 11716, 12333, 12345]),
        (12345, "core", [0, 11715, 12333, 12345]),
    ],
)
def test_known_answers(count, rounding, edges) -> None:
    bounds = split_bounds(parse_split("949,50,1"), count, rounding)
    assert bounds == list(pairwise(edges))


@pytest.mark.parametrize("rounding", ["core", "classic"])
@pytest.mark.parametrize("split", ["969, 30, 1", "1", "9,1", "0,1,0", "1/1/1", "100,0,0"])
def test_parts_are_neighbours_and_cover_everything(split, rounding) -> None:
    for count in (100, 1000, 12345):
        bounds = split_bounds(parse_split(split), count, rounding)
        assert sum(stop - start for start, stop in bounds) == count
    assert sum(parse_split(split)) == pytest.approx(1)


@pytest.mark.parametrize("split", ["", "a,b", "0,0,0", "-1,2,3", "1,2,3,4", "nan,1,1", "inf,1,1"])
def test_what_is_no_split_is_refused(split) -> None:
    with pytest.raises(ConfigError, match="--split"):
        parse_split(split)


def test_an_empty_part_is_named() -> None:
    with pytest.raises(ConfigError, match=r"the valid split of x is empty: --split 100,0,0 of 10 sequences"):
        require_sequences((10, 10), "valid", "100,0,0", "x", 10)
    require_sequences((9, 10), "valid", "90,10,0", "x", 10)
