"""Memory for collectives on the wire, taken for a flight and given back when it has landed. Floor 4."""

import torch
from torch import Tensor


class Staging:
    """Keeps the buffers that were given back: writing to memory for the first time costs more than a sum over it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[tuple[torch.dtype, int], list[Tensor]] = {}
        self.allocated_bytes = 0

    def take(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """A contiguous tensor with arbitrary content."""
        numel = torch.Size(shape).numel()
        free = self._free.setdefault((dtype, numel), [])
        if free:
            return free.pop().view(shape)
        self.allocated_bytes += numel * dtype.itemsize
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def give_back(self, *tensors: Tensor) -> None:
        """End the use of tensors that `take` returned."""
        for tensor in tensors:
            self._free[tensor.dtype, tensor.numel()].append(tensor.view(-1))
