"""What a forward leaves behind beside gradients: random-number generators and running statistics."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence

import torch


class SavedState:
    """The random-number generators (torch's on the CPU and on a device, Python's, NumPy's if it is loaded) and buffers.

    Args:
        buffers: (module, name) of each: copied now, put back by ``restore``, the object as well as its values.
        device: Whose generator is saved beside the CPU's.
    """

    def __init__(self, buffers: Sequence[tuple[torch.nn.Module, str]], device: torch.device) -> None:
        self._device = device
        self._torch = torch.get_rng_state()
        self._on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()
        self._buffers = []
        for module, name in buffers:
            buffer = module._buffers[name]
            if buffer is not None:
                self._buffers.append((module, name, buffer, buffer.detach().clone()))

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back as it was."""
        torch.set_rng_state(self._torch)
        if self._on_device is not None:
            torch.cuda.set_rng_state(self._on_device, self._device)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        for module, name, buffer, saved in self._buffers:
            buffer.copy_(saved)
            module._buffers[name] = buffer  # a forward may have assigned another one
