"""Parameters -> a frozen layout: which are active, their groups, math dtypes and offsets in the main-grad buffer.

Built once per parameter set and rebuilt only when the set changes. Works on ``meta`` tensors: a plan for any size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from .errors import dtype_name

CHUNK = 65536  # elements given to one block, and per partial of the norm; csrc/chunk_table.h holds the same number
ALIGN = 64  # elements: main grads start at multiples of it, 256 bytes in fp32

GRADIENT_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def math_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype an element is computed in: fp64 for fp64, fp32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def n_partials(tensors: Iterable[torch.Tensor]) -> int:
    """How many partials ``accumulate_`` and ``norm_`` fill: one per chunk of ``CHUNK`` elements, at least 1."""
    return max(1, sum(-(-tensor.numel() // CHUNK) for tensor in tensors))


def dense_strides(like: torch.Tensor) -> tuple[int, ...]:
    """The strides of ``like`` without its gaps."""
    if like.is_contiguous():
        return like.stride()
    return torch.empty_like(like, device="meta", memory_format=torch.preserve_format).stride()


@dataclass(frozen=True)
class Layout:
    """The active parameters (those that require a gradient), in group order.

    Attributes:
        params: The active parameters.
        indices: Their positions among all parameters of all groups.
        group_ids: The group each belongs to.
        offsets: First element of each in the flat main-grad buffer of its math dtype.
        sizes: Elements of the flat buffer per math dtype, padding included.
        all_params: Every parameter of every group, active or not.
        device: The one device they live on.
        n_partials: Partials of the norm.
    """

    params: tuple[torch.Tensor, ...]
    indices: tuple[int, ...]
    group_ids: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: dict[torch.dtype, int]
    all_params: tuple[torch.Tensor, ...]
    device: torch.device
    n_partials: int

    @cached_property
    def main_grad_bytes(self) -> int:
        """Bytes of the flat main-grad buffers: 4 per element in fp32, 8 in fp64, padding included."""
        return sum(size * dtype.itemsize for dtype, size in self.sizes.items())


def check_param(index: int, param: torch.Tensor) -> None:
    """Refuse by name what no kernel reads: complex, integer or sparse parameters."""
    if param.is_complex():
        raise TypeError(
            f"GradAccumOptimizer: parameter {index} is {dtype_name(param.dtype)}; complex parameters are not "
            "supported. Hold them as real pairs (torch.view_as_real) instead."
        )
    if param.dtype not in GRADIENT_DTYPES:
        raise TypeError(
            f"GradAccumOptimizer: parameter {index} must be float32, float64, float16 or bfloat16, got "
            f"{dtype_name(param.dtype)}."
        )
    if param.layout != torch.strided:
        raise TypeError(f"GradAccumOptimizer: parameter {index} must be dense, got layout {param.layout}.")


def build_layout(param_groups: Sequence[dict[str, Any]]) -> Layout:
    """Lay the parameters of an optimizer's groups out.

    Raises:
        TypeError: A parameter is complex, not floating point, or sparse.
        ValueError: Parameters live on more than one device, or one is listed twice (named).
    """
    everything = [param for group in param_groups for param in group["params"]]
    groups = [number for number, group in enumerate(param_groups) for _ in group["params"]]
    params: list[torch.Tensor] = []
    indices: list[int] = []
    group_ids: list[int] = []
    offsets: list[int] = []
    sizes: dict[torch.dtype, int] = {}
    seen: dict[torch.Tensor, int] = {}
    for index, (param, group) in enumerate(zip(everything, groups, strict=True)):
        if seen.setdefault(param, index) != index:
            raise ValueError(
                f"GradAccumOptimizer: parameter {index} is parameter {seen[param]} again; its gradient would count "
                "twice. List each parameter once."
            )
        if not param.requires_grad:
            continue
        check_param(index, param)
        first = params[0] if params else param
        if param.device != first.device:
            raise ValueError(
                f"GradAccumOptimizer: parameter {index} is on {param.device}, parameter {indices[0]} on "
                f"{first.device}; one optimizer works on one device. Make one GradAccumOptimizer per device."
            )
        dtype = math_dtype(param.dtype)
        offset = sizes.get(dtype, 0)
        params.append(param)
        indices.append(index)
        group_ids.append(group)
        offsets.append(offset)
        sizes[dtype] = offset + -(-param.numel() // ALIGN) * ALIGN
    device = params[0].device if params else (everything[0].device if everything else torch.device("cpu"))
    return Layout(
        tuple(params), tuple(indices), tuple(group_ids), tuple(offsets), sizes, tuple(everything), device,
        n_partials(params),
    )  # fmt: skip
