"""The backend ``triton_on_cpu``: the Triton kernels in the corrected interpreter, on CPU tensors. Not for users."""

from __future__ import annotations

import importlib.util
import os

NAME = "triton_on_cpu"
if os.environ.get("GRADACC_HARNESS") != "0" and importlib.util.find_spec("triton") is not None:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

from gradacc_fused.backends import triton as backend  # noqa: E402

Collector = backend.Collector
StateRecord = backend.StateRecord
accumulate_, norm_, clip_, update_ = backend.accumulate_, backend.norm_, backend.clip_, backend.update_
host_value, hot_path = backend.host_value, backend.hot_path


def unavailable_reason() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install triton"
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "left out by GRADACC_HARNESS=0"
    return (
        None
        if importlib.util.find_spec("ml_dtypes") is not None
        else "ml_dtypes is not installed: pip install ml_dtypes"
    )


if unavailable_reason() is None:
    from . import triton_interpreter

    triton_interpreter.install()
    backend.BLOCK = backend.UPDATE_BLOCK = 8192  # few, large tiles: the interpreter takes as long for a small one
    backend.programs = lambda device, slices: max(1, min(slices, 3))
