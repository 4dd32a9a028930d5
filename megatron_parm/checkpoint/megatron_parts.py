"""Tensors of a Megatron model put together of what its ranks saved. Floor 6.

Ranks of tensor parallelism hold slices by the rule of each weight, ranks of pipeline stages their layers numbered from
0, ranks of expert parallelism their experts numbered from 0. Before version 2 rows of queries, keys and values stand
in another order. Source: formats C.7.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron_parm.checkpoint.megatron_names import Cut
from megatron_parm.checkpoint.tensor_files import TensorInfo
from megatron_parm.errors import CheckpointError


@dataclass(frozen=True)
class Slice:
    """What one rank holds of a tensor, read when it is asked for. `where`: its file, for messages."""

    info: TensorInfo
    read: Callable[[], Tensor]
    where: str

    def changed(self, change: Callable[[Tensor], Tensor]) -> "Slice":
        """The same with its dims or rows in another order."""
        return Slice(TensorInfo.of(change(self.info.outline)), lambda: change(self.read()).contiguous(), self.where)


def ordered_rows(rows: Tensor, version: float, head_dim: int) -> Tensor:
    """Rows of queries, keys and values of one rank in today's order: for each head its query, key and value.

    Version 0 has all queries, then all keys, then all values; version 1 has, for each head, the three of each feature.
    """
    if version >= 2:
        return rows
    heads = rows.shape[0] // (3 * head_dim)
    if version == 0:
        return rows.unflatten(0, (3, heads, head_dim)).transpose(0, 1).flatten(0, 2)  # type: ignore[no-untyped-call,no-any-return]
    return rows.unflatten(0, (heads, head_dim, 3)).transpose(1, 2).flatten(0, 2)  # type: ignore[no-untyped-call,no-any-return]


def of_grouped_experts(first: bool, num_local: int, hidden_size: int, expert: int, whole: Tensor) -> Tensor:
    """One expert's weight [out, in] of `weight1` or `weight2` of a grouped product, which are [in, out] an expert."""
    shape = (num_local, hidden_size, -1) if first else (num_local, -1, hidden_size)
    return whole.reshape(shape)[expert].t()


def grouped_slices(name: str, held: Slice, num_local: int, hidden_size: int) -> dict[str, Slice]:
    """`....experts.weight1` or `weight2` of a rank as the weights of its single experts."""
    stem, _, last = name.rpartition(".")
    first = last == "weight1"
    target = "linear_fc1" if first else "linear_fc2"
    return {
        f"{stem}.local_experts.{expert}.{target}.weight": held.changed(
            partial(of_grouped_experts, first, num_local, hidden_size, expert)
        )
        for expert in range(num_local)
    }


@dataclass(frozen=True)
class Joined:
    """A whole tensor: its slices in the order of ranks, how they are cut, and further copies of the first one."""

    slices: Sequence[Slice]
    cut: Cut

    def info(self, name: str) -> TensorInfo:
        """That of the whole. Raises CheckpointError if the slices do not fit together."""
        try:
            return TensorInfo.of(self._join([held.info.outline for held in self.slices]))
        except (RuntimeError, ValueError, IndexError):
            told = ", ".join(f"{held.info} in {held.where}" for held in self.slices)
            raise CheckpointError(f"{name}: the slices do not fit together: {told}") from None

    def read(self, name: str) -> Tensor:
        """The whole. Raises CheckpointError if ranks that must hold the same do not."""
        values = [held.read() for held in self.slices]
        if self.cut == "whole":
            for held, copy in zip(self.slices[1:], values[1:], strict=True):
                if not torch.equal(copy, values[0]):
                    raise CheckpointError(
                        f"{name} must be the same on all ranks, but {held.where} and {self.slices[0].where} differ"
                    )
        return self._join(values)

    def _join(self, values: Sequence[Tensor]) -> Tensor:
        first = values[0]
        if any(value.dtype != first.dtype for value in values):
            raise ValueError("several types")
        if self.cut == "whole":
            if any(value.shape != first.shape for value in values):
                raise ValueError("several shapes")
            return first
        if self.cut == "gated rows":
            halves = [value.unflatten(0, (2, -1)) for value in values]  # type: ignore[no-untyped-call]
            return torch.cat(halves, dim=1).flatten(0, 1)
        return torch.cat(list(values), dim=0 if self.cut == "rows" else 1)


def cut_out(whole: Tensor, cut: Cut, rank: int, size: int) -> Tensor:
    """The slice of a rank: the inverse of `Joined`."""
    if cut == "whole":
        return whole
    if cut == "gated rows":
        halves: Tensor = whole.unflatten(0, (2, -1))  # type: ignore[no-untyped-call]
        return halves.chunk(size, dim=1)[rank].flatten(0, 1)
    return whole.chunk(size, dim=0 if cut == "rows" else 1)[rank]


class JoinedTensors:
    """All tensors of a model, whole, by core names."""

    def __init__(self, tensors: Mapping[str, Joined]) -> None:
        self._tensors = tensors
        self._entries = {name: joined.info(name) for name, joined in tensors.items()}

    @property
    def entries(self) -> Mapping[str, TensorInfo]:
        """All of them."""
        return self._entries

    def read(self, name: str) -> Tensor:
        """One of them."""
        return self._tensors[name].read(name)
