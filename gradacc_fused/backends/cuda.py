"""The CUDA backend: C++ and CUDA kernels, reached through the registered ops."""

from __future__ import annotations

from typing import Any

import torch

from .. import _ops
from . import cpu, extension

# After cpu: its collector's pieces are an argument of this one's hot path.
_C, _import_error = extension.load("_C_cuda")

Collector = cpu.Collector
StateRecord = cpu.StateRecord
hot_path: Any = None if _C is None else _C.HotPath
host_value = cpu.host_value
accumulate_ = _ops.op("accumulate_")
norm_ = _ops.op("norm_")
clip_ = _ops.op("clip_")
update_ = _ops.op("update_")


def unavailable_reason() -> str | None:
    if _C is None:
        return (
            f"the CUDA extension is not here ({_import_error}). With a CUDA build of torch and nvcc of the same major "
            "version, run 'GRADACC_FUSED_CUDA=1 pip install --no-build-isolation .' in the source tree."
        )
    if not extension.is_of_this_version(_C):
        return "the CUDA extension is of another version than the Python files. Reinstall the package."
    if cpu.unavailable_reason() is not None:
        return f"it takes gradients with the cpu backend's collector, and {cpu.unavailable_reason()}"
    if not torch.cuda.is_available():
        return "there is no usable GPU: torch.cuda.is_available() is False. Check the driver with nvidia-smi."
    return None
