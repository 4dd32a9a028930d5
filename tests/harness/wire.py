"""How calls and results travel between pytest and its workers: plain pickle, tensors by value.

Only between processes that the harness itself started. A tensor arrives detached, on the CPU and contiguous, without
the attributes (and so the process groups) that a Parameter carries; nothing is shared through file descriptors.
"""

import io
import pickle
from typing import Any

import torch
from torch import Tensor


def _rebuild(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        plain = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return _rebuild, (plain.numpy().tobytes(), value.dtype, tuple(value.shape))


def pack(value: Any) -> bytes:
    """`value` as bytes."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """The value of `pack`."""
    return pickle.loads(data)
