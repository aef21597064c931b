"""The optimizer's way into the passes of a device: what the host decides is copied there only when it changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..collector import Piece
from ..rules import Late, with_late
from .ops_path import OpsPath


class Mirror:
    """A small host array as it is on the device.

    It is copied when it changes, to the same address as long as its shape stays; what a captured launch reads is left
    alone, and the next copy lies elsewhere.

    Args:
        device: Where the copy lies.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: tuple[torch.Tensor, list[tuple[int, int]]] | None = None
        self._copy: torch.Tensor | None = None
        self._captured = False
        self._for_graphs: list[torch.Tensor] = []

    def of(self, host: torch.Tensor, late: Late | None = None) -> torch.Tensor:
        """The copy, made anew if the array has changed since. No sync: it is made from pinned memory of its own.

        Args:
            host: The array.
            late: Places that the caller overwrites with values of the device's own.

        Raises:
            RuntimeError: It has changed, and a CUDA graph is captured: every replay would make the old copy again.
        """
        places = [(row, column) for row, column, _ in late or ()]
        capturing = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        known = self._known
        if self._copy is None or known is None or known[1] != places or not torch.equal(known[0], host):
            if capturing:
                raise RuntimeError(
                    "step: hyper-parameters or the set of parameters with gradients changed, and a CUDA graph is "
                    "captured. Run one window with the same ones before the capture; give a changing lr as a CUDA "
                    "tensor."
                )
            self._known = None
            if self._copy is None or self._copy.shape != host.shape or self._captured:
                self._copy = torch.empty_like(host, device=self._device)
            self._captured = False
            value = host.clone()
            self._copy.copy_(value.pin_memory() if self._device.type == "cuda" else value, non_blocking=True)
            self._known = value, places
        if capturing and not self._captured:
            self._captured = True
            self._for_graphs.append(self._copy)
        return self._copy


class DevicePath(OpsPath):
    """As OpsPath; hyper-parameters, touched flags and group ids are mirrored, so that a usual window copies nothing."""

    def __init__(
        self, ops: Any, params: Sequence[torch.Tensor], group_ids: torch.Tensor, device: torch.device
    ) -> None:  # fmt: skip
        super().__init__(ops, params, Mirror(device).of(group_ids), device)
        self._hyper, self._touched = Mirror(device), Mirror(device)

    def _hyper_rows(self, host: torch.Tensor, late: Late) -> torch.Tensor:
        return with_late(self._hyper.of(host, late), late)

    def update(
        self, pieces: Sequence[Piece], weights: torch.Tensor, stored: bool, hyper: torch.Tensor, late: Late,
        touched: torch.Tensor, multiplier: torch.Tensor, found_inf: torch.Tensor, max_grad_value: float,
    ) -> None:  # fmt: skip
        super().update(
            pieces, weights, stored, hyper, late, self._touched.of(touched), multiplier, found_inf, max_grad_value
        )  # fmt: skip
