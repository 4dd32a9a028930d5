"""Which samples make each micro-batch of one data-parallel rank, from any number of consumed samples. Floor 4.

Source: formats C.6. A block of micro_batch_size * dp_size samples gives every rank one micro-batch; an incomplete
last block is left out on all ranks alike.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_parm.errors import ConfigError


@dataclass(frozen=True)
class SequentialSampler:
    """`--dataloader-type single`: walks the samples once, in order.

    Samples [consumed, consumed + global batch) make the next global batch for every dp size.
    """

    total_samples: int
    consumed_samples: int
    micro_batch_size: int
    dp_rank: int
    dp_size: int

    def __iter__(self) -> Iterator[list[int]]:
        block = self.micro_batch_size * self.dp_size
        mine = self.dp_rank * self.micro_batch_size
        for start in range(self.consumed_samples, self.total_samples - block + 1, block):
            yield list(range(start + mine, start + mine + self.micro_batch_size))


@dataclass(frozen=True)
class CyclicSampler:
    """`--dataloader-type cyclic`: walks the samples epoch after epoch without end, each in a new random order.

    The order of an epoch depends on its number alone. With `is_sharded` (the default) each rank shuffles a part of its
    own, so the order depends on the dp size and micro-batch size too: a resume under others repeats or skips some
    samples of the epoch. Without (`--no-data-sharding`) all ranks share one order, dealt out in turn.
    """

    total_samples: int
    consumed_samples: int
    micro_batch_size: int
    dp_rank: int
    dp_size: int
    is_sharded: bool = True

    def __post_init__(self) -> None:
        block = self.micro_batch_size * self.dp_size
        if self.total_samples < block:
            raise ConfigError(
                f"--dataloader-type cyclic: {self.total_samples} samples are fewer than one micro-batch per rank "
                f"(--micro-batch-size {self.micro_batch_size} * {self.dp_size} data-parallel ranks = {block})"
            )
        if self.consumed_samples % self._active_samples % block:
            raise ConfigError(
                f"--dataloader-type cyclic: {self.consumed_samples} consumed samples do not end at a multiple of "
                f"--micro-batch-size {self.micro_batch_size} * {self.dp_size} data-parallel ranks; resume with the "
                "sizes of the earlier run"
            )

    @property
    def _active_samples(self) -> int:
        """Samples of an epoch that make whole blocks."""
        return self.total_samples - self.total_samples % (self.micro_batch_size * self.dp_size)

    def __iter__(self) -> Iterator[list[int]]:
        epoch, consumed = divmod(self.consumed_samples, self._active_samples)
        while True:
            indices = self._epoch(epoch)[consumed // self.dp_size :]
            for start in range(0, len(indices), self.micro_batch_size):
                yield indices[start : start + self.micro_batch_size]
            epoch, consumed = epoch + 1, 0

    def _epoch(self, epoch: int) -> list[int]:
        """This rank's samples of one epoch."""
        generator = torch.Generator().manual_seed(epoch)
        if self.is_sharded:
            bucket = self._active_samples // self.dp_size
            order = torch.randperm(bucket, generator=generator) + self.dp_rank * bucket
        else:
            whole = self.total_samples // self.micro_batch_size * self.micro_batch_size
            order = torch.randperm(whole, generator=generator)[: self._active_samples][self.dp_rank :: self.dp_size]
        indices: list[int] = order.tolist()
        return indices


def build_sampler(
    dataloader_type: str,
    total_samples: int,
    consumed_samples: int,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    is_sharded: bool = True,
) -> SequentialSampler | CyclicSampler:
    """The sampler that `--dataloader-type` names: `single` or `cyclic`."""
    if dataloader_type == "single":
        return SequentialSampler(total_samples, consumed_samples, micro_batch_size, dp_rank, dp_size)
    if dataloader_type == "cyclic":
        return CyclicSampler(total_samples, consumed_samples, micro_batch_size, dp_rank, dp_size, is_sharded)
    raise ConfigError(f"--dataloader-type {dataloader_type} is not known; use single or cyclic")
