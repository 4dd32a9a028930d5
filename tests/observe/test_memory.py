"""Reference: the process's own peak as the kernel tells it (VmHWM, kB), and the size of an array just filled."""

from pathlib import Path

import numpy
import pytest
import torch

from megatron_parm.observe.memory import peak_memory


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_resident_peak_is_in_mib():
    filled = numpy.ones(4 * 1024 * 1024, dtype=numpy.float64)  # 32 MiB
    status = Path("/proc/self/status").read_text()
    kernel_mib = int(status.split("VmHWM:")[1].split()[0]) / 1024
    peak = peak_memory(torch.device("cpu"))
    assert peak.resident_mib == pytest.approx(kernel_mib, rel=0.05)  # the kernel batches its counters
    assert peak.resident_mib > filled.nbytes / 2**20
    assert peak.device_mib == 0.0
