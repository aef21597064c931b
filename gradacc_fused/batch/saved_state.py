"""What a forward leaves behind beside gradients: random-number generators and running statistics."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence

import torch


class SavedState:
    """The random-number generators (torch's on the CPU and on a device, Python's, NumPy's if it is loaded) and buffers.

    Args:
        buffers: Copied now, written back by ``restore``.
        device: Whose generator is saved beside the CPU's.
    """

    def __init__(self, buffers: Sequence[torch.Tensor], device: torch.device) -> None:
        self._device = device
        self._torch = torch.get_rng_state()
        self._on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in buffers]

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back as it was."""
        torch.set_rng_state(self._torch)
        if self._on_device is not None:
            torch.cuda.set_rng_state(self._on_device, self._device)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        for buffer, saved in self._buffers:
            buffer.copy_(saved)
