"""The backend ``cuda_on_cpu``: csrc/cuda's kernels and ops, executed on CPU tensors. Not a GPU, and not for users."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from gradacc_fused.backends import cpu

from . import build

NAME = "cuda_on_cpu"
Collector: Any = cpu.Collector
StateRecord: Any = cpu.StateRecord
host_value = cpu.host_value


def unavailable_reason() -> str | None:
    return build.missing() or cpu.unavailable_reason()


def _load() -> tuple[ctypes.CDLL, ModuleType]:
    library = Path(os.environ.get("GRADACC_HARNESS_KERNELS") or build.kernels())
    runtime = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    for name in ("harness_launches", "harness_copies", "harness_event_waits"):
        getattr(runtime, name).restype = ctypes.c_int64
    path = os.environ.get("GRADACC_HARNESS_MODULE") or build.torch_side()
    spec = importlib.util.spec_from_file_location(build.MODULE, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return runtime, module


if unavailable_reason() is None:
    runtime, module = _load()
    accumulate_, norm_, clip_, update_ = module.accumulate_, module.norm_, module.clip_, module.update_
    hot_path = module.HotPath


@contextmanager
def small_arrays_on_device() -> Iterator[None]:
    """Weights, counts and the like count as lying on the device: the kernels read them there."""
    module.set_small_arrays_on_host(False)
    try:
        yield
    finally:
        module.set_small_arrays_on_host(True)


@contextmanager
def processors(count: int) -> Iterator[None]:
    """A device of so many multiprocessors, each holding one block: the most blocks of a launch."""
    runtime.harness_set_processors(count)
    try:
        yield
    finally:
        runtime.harness_set_processors(2)


@contextmanager
def order(wish: str) -> Iterator[None]:
    """Threads, warps and blocks run ascending ("asc"), descending ("desc"), or as drawn from a seed (a number)."""
    before = os.environ.get("GRADACC_HARNESS_ORDER")
    os.environ["GRADACC_HARNESS_ORDER"] = wish
    try:
        yield
    finally:
        if before is None:
            del os.environ["GRADACC_HARNESS_ORDER"]
        else:
            os.environ["GRADACC_HARNESS_ORDER"] = before


@contextmanager
def delayed_stream() -> Iterator[None]:
    """The stream does its work only when somebody waits for it, at the latest at the end."""
    runtime.harness_set_delayed(1)
    try:
        yield
    finally:
        runtime.harness_drain()
        runtime.harness_set_delayed(0)


@contextmanager
def capture() -> Iterator[None]:
    """What is enqueued is recorded and not done; ``runtime.harness_replay()`` does it."""
    runtime.harness_set_capturing(1)
    try:
        yield
    finally:
        runtime.harness_set_capturing(0)
