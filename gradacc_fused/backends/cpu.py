"""The compiled CPU backend: C++ loops over torch's threads, reached through the registered ops."""

from __future__ import annotations

from typing import Any

import torch

from .. import _ops
from . import extension

_C, _import_error = extension.load("_C")

Collector: Any = None if _C is None else _C.Collector
StateRecord: Any = None if _C is None else _C.StateRecord
hot_path: Any = None if _C is None else _C.HotPath
accumulate_ = _ops.op("accumulate_")
norm_ = _ops.op("norm_")
clip_ = _ops.op("clip_")
update_ = _ops.op("update_")


def unavailable_reason() -> str | None:
    if _C is None:
        return (
            f"the compiled extension is not here ({_import_error}). With a C++ compiler on PATH, run "
            "'pip install --no-build-isolation .' in the source tree."
        )
    if not extension.is_of_this_version(_C):
        return "the compiled extension is of another version than the Python files. Reinstall the package."
    try:
        _C.isa()
    except ValueError as error:
        return str(error)
    return None


def host_value(tensor: torch.Tensor) -> float | None:
    """The value of a scalar in host memory, read in C++ without an operator call; None for other devices."""
    return _C.read_host_scalar(tensor) if tensor.device.type == "cpu" else None
