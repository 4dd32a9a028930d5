"""How much memory this process has needed at most. Floor 2.

This room and `parallel/launch.py` are the two places that may name a device backend; it is asked through
`torch.get_device_module`, so any backend with torch's memory functions is served.
"""

import resource
import sys
from dataclasses import dataclass

import torch

MIB = 1024 * 1024


@dataclass(frozen=True)
class MemoryPeak:
    """Peak of this rank in MiB (2^20 bytes): resident host memory, and memory of tensors on its device (0 on a CPU)."""

    resident_mib: float
    device_mib: float


def peak_memory(device: torch.device) -> MemoryPeak:
    """The peaks since the process began."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    resident_bytes = peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB
    return MemoryPeak(resident_bytes / MIB, _peak_device_bytes(device) / MIB)


def _peak_device_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return 0
    module = torch.get_device_module(device)
    return int(module.max_memory_allocated(device)) if hasattr(module, "max_memory_allocated") else 0
