"""The 64-bit Mersenne Twister. References: the numbers of C++'s std::mt19937_64, and the generator word by word."""

import pytest

from megatron_parm.data.mersenne import MersenneTwister64


def test_first_numbers_are_those_of_the_standard_generator() -> None:
    found = MersenneTwister64(1235).draw(4).tolist()
    assert found == [12475983374653888083, 573922149886606219, 5802434057304372554, 9262138314722780250]


def test_the_ten_thousandth_number_is_the_one_that_the_cpp_standard_demands() -> None:
    """ISO C++ 26.6.5: a default-seeded (5489) mt19937_64 yields 9981545732273789042 in its 10000th call."""
    assert int(MersenneTwister64(5489).draw(10000)[-1]) == 9981545732273789042


@pytest.mark.parametrize("sizes", [(1,) * 700, (311, 1, 1, 312, 313), (0, 5, 0, 933)])
def test_the_stream_does_not_depend_on_how_much_is_drawn_at_once(sizes: tuple[int, ...]) -> None:
    whole = MersenneTwister64(7).draw(sum(sizes)).tolist()
    pieces = MersenneTwister64(7)
    assert [number for size in sizes for number in pieces.draw(size).tolist()] == whole
