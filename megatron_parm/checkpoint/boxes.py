"""Which part of each tensor a rank holds, who writes it, and where saved parts overlap a wanted one. Floor 6.

A box that several ranks hold (replicas over dp, copies over tp) is written by one of them; the writers are chosen so
that every rank writes about as many bytes, and a box larger than a rank's fair share is cut. Every rank computes the
same shares from the same list, so nothing but the list travels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from megatron_parm.checkpoint.manifest import DTYPES, Part, TensorEntry
from megatron_parm.checkpoint.paths import shard_name
from megatron_parm.parallel.sharding import ShardSpec, equal_parts

LEAST_PIECE_BYTES = 1 << 20  # a box is not cut into pieces smaller than this: they would cost more than they balance


@dataclass(frozen=True)
class Box:
    """This rank's part of a global tensor: it begins at `offsets`."""

    local: Tensor
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]

    @staticmethod
    def of(local: Tensor, spec: ShardSpec) -> "Box":
        """The box that `spec` says this rank holds."""
        return Box(local, spec.global_shape, tuple(part.start for part in spec.box))

    @staticmethod
    def whole(tensor: Tensor) -> "Box":
        """A tensor that lies on this rank alone."""
        return Box(tensor, tuple(tensor.shape), (0,) * tensor.ndim)


@dataclass(frozen=True)
class Held:
    """A box without its values, as it is told to the other ranks."""

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @staticmethod
    def of(name: str, box: Box) -> "Held":
        """The description of a box."""
        dtype = str(box.local.dtype).removeprefix("torch.")
        return Held(name, dtype, box.global_shape, box.offsets, tuple(box.local.shape))

    @property
    def bytes(self) -> int:
        """The size of its values."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize

    def cut(self, count: int) -> "list[Held]":
        """The same in `count` pieces, or fewer where it has not so many rows."""
        if count <= 1 or not self.shape:
            return [self]
        pieces = []
        for part in equal_parts(self.shape, min(count, max(self.shape))):
            offsets, shape = list(self.offsets), list(self.shape)
            offsets[part.dim] += part.start
            shape[part.dim] = part.stop - part.start
            pieces.append(Held(self.name, self.dtype, self.global_shape, tuple(offsets), tuple(shape)))
        return [piece for piece in pieces if prod(piece.shape)]


def share_out(held: Sequence[Sequence[Held]]) -> list[list[Held]]:
    """What each rank writes, of what each rank holds: every box once, in shares of about equal size.

    No rank writes two pieces of one box. The same on every rank. Raises ValueError if ranks disagree about a tensor.
    """
    holders: dict[Held, list[int]] = {}
    for rank, boxes in enumerate(held):
        for box in boxes:
            if prod(box.shape):  # of sharded optimizer state a rank may have an empty part
                holders.setdefault(box, []).append(rank)
    _check_agreement(holders)
    fair = max(LEAST_PIECE_BYTES, -(-sum(box.bytes for box in holders) // len(held)))
    shares: list[list[Held]] = [[] for _ in held]
    load = [0] * len(held)
    # those without a choice first, then the largest, which are the hardest to place
    for box, ranks in sorted(holders.items(), key=lambda item: (len(item[1]) > 1, -item[0].bytes)):
        pieces = box.cut(min(len(ranks), -(-box.bytes // fair)))
        for piece, rank in zip(pieces, sorted(ranks, key=lambda rank: (load[rank], rank)), strict=False):
            shares[rank].append(piece)
            load[rank] += piece.bytes
    return shares


def _check_agreement(holders: Mapping[Held, Sequence[int]]) -> None:
    seen: dict[str, Held] = {}
    for box in holders:
        other = seen.setdefault(box.name, box)
        if (box.global_shape, box.dtype) != (other.global_shape, other.dtype):
            raise ValueError(
                f"{box.name} is {list(other.global_shape)} {other.dtype} on one rank and {list(box.global_shape)} "
                f"{box.dtype} on another"
            )


def entries(shares: Sequence[Sequence[Held]]) -> dict[str, TensorEntry]:
    """Every tensor and the parts that make it up, in the files that the ranks write."""
    found: dict[str, TensorEntry] = {}
    for rank, share in enumerate(shares):
        for piece in share:
            before = found[piece.name].parts if piece.name in found else ()
            part = Part(shard_name(rank), piece.offsets, piece.shape)
            found[piece.name] = TensorEntry(piece.global_shape, piece.dtype, (*before, part))
    return found


def values_of(piece: Held, box: Box) -> Tensor:
    """The values of a piece of `box`; they share its memory."""
    return box.local.detach()[within(piece.offsets, piece.shape, box.offsets)]


def within(offsets: Sequence[int], shape: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    """A box of the global tensor as slices of one that begins at `origin`."""
    return tuple(
        slice(start - first, start - first + size) for start, size, first in zip(offsets, shape, origin, strict=True)
    )


@dataclass(frozen=True)
class Overlap:
    """What a saved part and a wanted box have in common, in global places."""

    file: str
    part_offsets: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


def overlaps(entry: TensorEntry, offsets: Sequence[int], shape: Sequence[int]) -> list[Overlap]:
    """The saved parts of a tensor that a box at `offsets` needs."""
    found = []
    for part in entry.parts:
        starts = tuple(map(max, part.offsets, offsets))
        stops = tuple(
            min(a + size, b + wanted)
            for a, size, b, wanted in zip(part.offsets, part.shape, offsets, shape, strict=True)
        )
        common = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        if all(size > 0 for size in common):
            found.append(Overlap(part.file, part.offsets, starts, common))
    return found
