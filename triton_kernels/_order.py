"""Memory order: kernels walk a tensor linearly, in the order of its parameter's strides; others go through copies."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ._tables import is_capturing


def same_order(tensor: torch.Tensor, strides: tuple[int, ...]) -> bool:
    return tensor.stride() == strides or all(
        size == 1 or mine == theirs for size, mine, theirs in zip(tensor.shape, tensor.stride(), strides, strict=True)
    )


class DenseTensors:
    """Tensors in the wanted order for the length of one op; written ones are copied back at its end."""

    def __init__(self) -> None:
        self._held: list[torch.Tensor] = []
        self._written: list[torch.Tensor] = []
        self._copied_back: list[tuple[torch.Tensor, torch.Tensor]] = []

    def read(self, tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
        if same_order(tensor, strides):
            return tensor
        if is_capturing(tensor.device):
            raise RuntimeError(
                f"gradacc_fused: a tensor of shape {list(tensor.shape)} has strides {list(tensor.stride())}, its "
                f"parameter {list(strides)}, and a CUDA graph is captured. Give it the parameter's memory order: the "
                "copy that is made otherwise lies elsewhere each time."
            )
        copy = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
        self._held.append(copy)
        return copy

    def write(self, tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
        """Raises ValueError where the tensor overlaps itself."""
        if tensor.stride() == strides:
            self._written.append(tensor)
            return tensor
        if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise ValueError(
                "a tensor that is written must not overlap itself (an expanded tensor does), got strides "
                f"{list(tensor.stride())} for shape {list(tensor.shape)}. Call .contiguous() or .clone() on it."
            )
        dense = self.read(tensor, strides)
        if dense is not tensor:
            self._copied_back.append((tensor, dense))
        else:
            self._written.append(tensor)
        return dense

    def finish(self) -> None:
        """Call once the kernel is enqueued."""
        for tensor, dense in self._copied_back:
            tensor.copy_(dense)
        bump_versions(self._written)


def bump_versions(tensors: Sequence[torch.Tensor]) -> None:
    """As torch's own in-place ops do; an inference tensor has no version."""
    torch.autograd.graph.increment_version([tensor for tensor in tensors if not tensor.is_inference()])
