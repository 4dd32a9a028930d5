"""Who writes what, and what a load needs. Reference: every element counted once by a mask of the whole tensor."""

import math
from itertools import product

import pytest
import torch

from megatron_parm.checkpoint.boxes import LEAST_PIECE_BYTES, Held, entries, overlaps, share_out, within
from megatron_parm.checkpoint.manifest import Part, TensorEntry


def _replicated(name: str, *shape: int) -> Held:
    return Held(name, "float32", shape, (0,) * len(shape), shape)


def test_replicas_write_everything_once_in_equal_shares() -> None:
    boxes = [_replicated(f"w{size}", size, 64) for size in range(1000, 9000, 250)]
    shares = share_out([boxes] * 4)
    assert sorted(piece.name for share in shares for piece in share) == sorted(box.name for box in boxes)
    sizes = [sum(piece.bytes for piece in share) for share in shares]
    assert max(sizes) < 1.1 * min(sizes)


@pytest.mark.parametrize("shape", [(10007, 128), (7, 300_000), (2_000_000,)])
def test_a_box_larger_than_a_fair_share_is_cut(shape: tuple[int, ...]) -> None:
    shares = share_out([[_replicated("embedding", *shape), _replicated("norm", 64)]] * 4)
    (entry,) = [entry for name, entry in entries(shares).items() if name == "embedding"]
    assert len(entry.parts) == 4 or len(entry.parts) == math.ceil(4 * math.prod(shape) / LEAST_PIECE_BYTES)
    count = torch.zeros(shape, dtype=torch.int8)
    for part in entry.parts:
        count[within(part.offsets, part.shape, (0,) * len(shape))] += 1
    assert bool((count == 1).all())
    assert len({part.file for part in entry.parts}) == len(entry.parts), "a rank writes two pieces of one name"


def test_a_small_box_is_not_cut() -> None:
    assert sum(map(len, share_out([[_replicated("norm", 64)]] * 8))) == 1


def test_what_only_one_rank_holds_is_written_there_and_the_rest_evens_it_out() -> None:
    own = Held("experts", "float32", (4000, 64), (0, 0), (2000, 64))
    other = Held("experts", "float32", (4000, 64), (2000, 0), (1000, 64))
    shared = [_replicated(f"w{place}", 500, 64) for place in range(2)]
    shares = share_out([[own, *shared], [other, *shared]])
    assert own in shares[0] and other in shares[1]
    assert {piece.name for piece in shares[1]} == {"experts", "w0", "w1"}


def test_empty_parts_are_not_written() -> None:
    empty = Held("moment", "float32", (3, 4), (3, 0), (0, 4))
    assert share_out([[_replicated("moment", 3, 4)], [empty]])[1] == []


def test_ranks_that_disagree_about_a_tensor_are_told() -> None:
    with pytest.raises(ValueError, match=r"w is \[4\] float32 on one rank and \[8\] float32"):
        share_out([[_replicated("w", 4)], [_replicated("w", 8)]])


def test_overlaps_cover_a_box_once_whatever_the_cuts() -> None:
    """Every cut of a [6, 4] tensor on a grid against every wanted box."""
    for rows, columns in product((1, 2, 3), (1, 2, 4)):
        sizes = (6 // rows, 4 // columns)
        parts = tuple(
            Part("f", (row * sizes[0], column * sizes[1]), sizes)
            for row, column in product(range(rows), range(columns))
        )
        entry = TensorEntry((6, 4), "float32", parts)
        for top, left, height, width in product(range(6), range(4), (1, 2, 5), (1, 3)):
            count = torch.zeros(12, 8)
            for one in overlaps(entry, (top, left), (height, width)):
                count[within(one.offsets, one.shape, (0, 0))] += 1
            wanted = torch.zeros(12, 8)
            wanted[top : min(6, top + height), left : min(4, left + width)] = 1
            assert torch.equal(count, wanted)
