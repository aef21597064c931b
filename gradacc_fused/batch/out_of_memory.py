"""Which exceptions mean that memory ran out, and giving back what a failed attempt held."""

from __future__ import annotations

import gc

import torch

MESSAGES = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator of torch's or of Python's had no more memory."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in MESSAGES)


def release(device: torch.device) -> None:
    """Free what only garbage cycles hold, and the device memory that torch keeps in reserve."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
