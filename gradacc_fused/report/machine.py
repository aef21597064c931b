"""What numbers depend on: machine, versions, threads."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from .. import __version__
from ..backends import registry


def environment() -> dict[str, str | int]:
    """Machine, torch, threads, version and available backends."""
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text().splitlines() if cpu_info.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "machine": f"{model or platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "gradacc_fused": __version__,
        "backends": ", ".join(name for name, status in registry.backends().items() if status.available),
    }
