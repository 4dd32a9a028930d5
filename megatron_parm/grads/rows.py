"""Tensors of several ranks side by side: what a ReduceScatter sends and an AllGather brings. Floor 4."""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megatron_parm.parallel.sharding import Part, equal_parts


@dataclass(frozen=True)
class Rows:
    """Row i of `[count, width]` holds rank i's part (`equal_parts`) of each tensor of the given shapes.

    Parts differ by a row of their tensor at most; a shorter one
    leaves the end of its place unused.
    """

    shapes: tuple[tuple[int, ...], ...]
    count: int

    @cached_property
    def widths(self) -> list[int]:
        """Elements that each tensor takes in a row."""
        return [max(_numel(shape, part) for part in equal_parts(shape, self.count)) for shape in self.shapes]

    @property
    def width(self) -> int:
        """Elements of a row."""
        return sum(self.widths)

    def pack(self, tensors: list[Tensor], rows: Tensor) -> None:
        """Write every part of `tensors` into its place of `rows`."""
        for tensor, place in zip(tensors, self._places(rows), strict=True):
            if self._is_cut_along_memory(tensor):
                place.copy_(tensor.reshape(self.count, -1))
                continue
            for row, part in zip(place, equal_parts(tuple(tensor.shape), self.count), strict=True):
                _as(row, part.of(tensor)).copy_(part.of(tensor))

    def unpack(self, rows: Tensor, tensors: list[Tensor]) -> None:
        """Write every place of `rows` into its part of `tensors`."""
        for tensor, place in zip(tensors, self._places(rows), strict=True):
            if self._is_cut_along_memory(tensor):
                tensor.view(self.count, -1).copy_(place)
                continue
            for row, part in zip(place, equal_parts(tuple(tensor.shape), self.count), strict=True):
                part.of(tensor).copy_(_as(row, part.of(tensor)))

    def pack_one(self, parts: list[Tensor], row: Tensor) -> None:
        """Write one rank's parts into its row `[width]`."""
        for part, place in zip(parts, self._places(row), strict=True):
            _as(place, part).copy_(part)

    def unpack_one(self, row: Tensor, parts: list[Tensor]) -> None:
        """Write a row `[width]` into one rank's parts."""
        for part, place in zip(parts, self._places(row), strict=True):
            part.copy_(_as(place, part))

    def _places(self, rows: Tensor) -> tuple[Tensor, ...]:
        return torch.split(rows, self.widths, dim=-1)

    def _is_cut_along_memory(self, tensor: Tensor) -> bool:
        """Whether the parts follow each other in memory, all of one size: then one copy does for all."""
        return tensor.is_contiguous() and tensor.shape[0] % self.count == 0


def _numel(shape: tuple[int, ...], part: Part) -> int:
    return math.prod(shape) // shape[part.dim] * (part.stop - part.start)


def _as(place: Tensor, part: Tensor) -> Tensor:
    return place[: part.numel()].view(part.shape)
