"""What every result file says of where it comes from: machine, versions, commit, date."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import torch

import megatron_parm
from tools.measure.launcher import ROOT

CPU_INFORMATION = Path("/proc/cpuinfo")


def machine_facts() -> dict[str, str]:
    """The facts, each a line of text."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _said("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12") or "unknown",
        "megatron_parm": megatron_parm.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": f"{_processor()}, {len(os.sched_getaffinity(0))} cores",
        "devices": _said("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
        or "none: it ran on the CPU with gloo",
    }


def _said(*command: str) -> str:
    """What a command prints, in one line; empty where it cannot run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return ", ".join(done.stdout.split("\n")).strip(", ")


def _processor() -> str:
    try:
        lines = CPU_INFORMATION.read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
