"""Micro-batches as torch tensors, with or without worker processes. Floor 4.

The stream is fixed by the sampler alone: the number of workers changes neither content nor order, and reading it draws
nothing from torch's default random generator, so a resume sees the same dropout as the run it continues. Training and
evaluation each hold a stream, and a number of consumed samples, of their own.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NotRequired, TypedDict, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from megatron_parm.data.gpt_dataset import Sample, SampleSource


class Batch(TypedDict):
    """One micro-batch. Shapes [b, s]; `attention_mask` [b, 1, s, s] (True = may not attend) where samples have one.

    `is_text` [b, s], False for padding, where samples are padded.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    attention_mask: NotRequired[Tensor]
    is_text: NotRequired[Tensor]


def collate(samples: Sequence[Sample]) -> Batch:
    """Stack samples to a micro-batch."""
    columns = {
        name: torch.from_numpy(np.stack([cast(dict[str, "np.ndarray"], sample)[name] for sample in samples]))
        for name in samples[0]
    }  # [b, ...]
    return cast(Batch, columns)


def micro_batches(
    dataset: SampleSource, sampler: Iterable[list[int]], num_workers: int = 0, pin_memory: bool = False
) -> Iterator[Batch]:
    """The micro-batches of the samples that `sampler` lists, in its order.

    With `num_workers` processes the samples are read ahead; they are forked by this call and end with the
    iterator. The caller counts consumed samples: what was read ahead but not taken is not consumed.
    """
    loader = DataLoader(
        cast("Dataset[Sample]", dataset),
        batch_sampler=sampler,
        num_workers=num_workers,
        collate_fn=(_pack_tensor if pin_memory else _pack) if num_workers else collate,
        pin_memory=pin_memory,
        generator=torch.Generator().manual_seed(0),  # else DataLoader draws a seed from the default generator
    )
    return map(_unpack, loader) if num_workers else iter(loader)


_Layout = list[tuple[str, torch.dtype, list[int]]]


def _pack(samples: Sequence[Sample]) -> tuple["np.ndarray", _Layout]:
    """A micro-batch as one array, which travels through the worker's pipe: a tensor would cost a connection to it."""
    columns = cast("dict[str, Tensor]", collate(samples))
    names = sorted(columns, key=lambda name: -columns[name].element_size())  # so that each begins at a whole number
    layout = [(name, columns[name].dtype, list(columns[name].shape)) for name in names]
    return torch.cat([columns[name].flatten().view(torch.uint8) for name in names]).numpy(), layout


def _pack_tensor(samples: Sequence[Sample]) -> tuple[Tensor, _Layout]:
    """The same as a tensor, which the loader's thread copies into pinned memory."""
    memory, layout = _pack(samples)
    return torch.from_numpy(memory), layout


def _unpack(packed: "tuple[Tensor | np.ndarray, _Layout]") -> Batch:
    memory, layout = torch.as_tensor(packed[0]), packed[1]
    columns, start = {}, 0
    for name, dtype, shape in layout:
        stop = start + math.prod(shape) * dtype.itemsize
        columns[name] = memory[start:stop].view(dtype).view(shape)
        start = stop
    return cast(Batch, columns)
