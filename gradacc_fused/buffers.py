"""Memory of the package: flat main grads, host arrays that tensors look at, the scalar cells of a window."""

from __future__ import annotations

import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .layout import Layout, dense_strides, math_dtype

_TYPECODES: dict[torch.dtype, Any] = {torch.float64: "d", torch.int32: "i", torch.uint8: "B"}


class HostArray:
    """A host tensor over a Python array: writing an element costs no operator call."""

    def __init__(self, numel: int, dtype: torch.dtype, shape: Sequence[int] | None = None) -> None:
        typecode = _TYPECODES[dtype]
        self.values: array.array[Any] = array.array(typecode, bytes(max(numel, 1) * array.array(typecode).itemsize))
        self.numel = numel
        self.tensor = torch.frombuffer(self.values, dtype=dtype)[:numel].view(shape or (numel,))
        self._zeros = self.values[:]

    def fill(self, values: Sequence[float]) -> torch.Tensor:
        self.values[:] = array.array(self.values.typecode, values) if len(values) else self._zeros
        return self.tensor

    def zero(self) -> None:
        self.values[:] = self._zeros


def _scalar_on(value: float | torch.Tensor, device: torch.device) -> torch.Tensor:
    """As float64 on a device. A number is filled in there: a copy from the host would wait for the device."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(device=device, dtype=torch.float64).reshape(())
    return torch.full((), value, dtype=torch.float64, device=device)


class WeightArrays:
    """Weights as float64 tensors: a host array per length, or a stack where one of them lives on a device."""

    def __init__(self) -> None:
        self._arrays: dict[int, HostArray] = {}

    def tensor(self, weights: Sequence[float | torch.Tensor]) -> torch.Tensor:
        if any(isinstance(weight, torch.Tensor) for weight in weights):
            device = next(weight.device for weight in weights if isinstance(weight, torch.Tensor))
            return torch.stack([_scalar_on(weight, device) for weight in weights])
        host = self._arrays.get(len(weights))
        if host is None:
            host = self._arrays[len(weights)] = HostArray(len(weights), torch.float64)
        return host.fill([float(weight) for weight in weights])


def state_like(param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Zeros in the parameter's memory order, in ``dtype``."""
    return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format, requires_grad=False)


def allocate_main_grads(layout: Layout) -> list[torch.Tensor]:
    """Views of one flat buffer per math dtype, each in its parameter's memory order, not initialised."""
    flat = {dtype: torch.empty(size, dtype=dtype, device=layout.device) for dtype, size in layout.sizes.items()}
    views = []
    for param, offset in zip(layout.params, layout.offsets, strict=True):
        strides = dense_strides(param)
        views.append(flat[math_dtype(param.dtype)].as_strided(param.shape, strides, offset))
    return views


@dataclass
class Cells:
    """The device scalars of one window, allocated anew so that a StepResult outlives the next window."""

    total_norm: torch.Tensor
    clip_coef: torch.Tensor
    multiplier: torch.Tensor
    weight_sum: torch.Tensor
    found_inf: torch.Tensor
