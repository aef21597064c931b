"""The host's walk over the parameters in Python: the twin of csrc/collector.cpp for installs with nothing compiled."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Collector:
    """Reads and clears ``.grad``, watches for parameters that changed and for a backward that did not finish.

    Args:
        params: The parameters of all groups, in order.
        active: Which of them belong to the layout.
        absent: The empty tensor that stands for a missing gradient.
    """

    def __init__(self, params: Sequence[torch.Tensor], active: Sequence[bool], absent: torch.Tensor) -> None:
        self.params = list(params)
        self.active = list(active)
        self.absent = absent
        self.active_params = [param for param, is_active in zip(params, active, strict=True) if is_active]
        self._described = [(param.shape, param.dtype) for param in params]
        self._seen: list[tuple[int, int]] = []
        self._seen_grads: list[tuple[int, int]] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._in_flight = False

    def collect(self, touched: torch.Tensor, clear: bool) -> tuple[list[torch.Tensor], int, bool]:
        """Gradients of the active parameters, how many are there, and whether nobody else can write them.

        The last is never known in Python. Sparse gradients are coalesced and made dense.
        """
        grads = []
        present = 0
        for k, param in enumerate(self.active_params):
            if param.grad is None:
                grads.append(self.absent)
                continue
            touched[k] = 1
            present += 1
            grad = param.grad if param.grad.layout == torch.strided else param.grad.to_dense()
            # An fp64 gradient of another parameter would be measured and applied in different dtypes.
            narrow = grad.dtype == torch.float64 and param.dtype != torch.float64
            grads.append(grad.to(torch.float32) if narrow else grad)
            if clear:
                param.grad = None
        return grads, present, False

    def first_with_grad(self) -> int:
        """Index (among all parameters) of the first active parameter whose .grad is set, or -1."""
        having = (i for i, param in enumerate(self.params) if self.active[i] and param.grad is not None)
        return next(having, -1)

    def remember_grads(self) -> None:
        """Remember the gradients as they are, for ``grads_unchanged``."""
        self._seen_grads = [self._see(param.grad) for param in self.active_params]

    def grads_unchanged(self) -> bool:
        """Whether they are the same tensors since, not written and not cleared."""
        return [self._see(param.grad) for param in self.active_params] == self._seen_grads

    def clear_grads(self) -> None:
        for param in self.params:
            param.grad = None

    def matches(self, param_lists: Sequence[Sequence[torch.Tensor]]) -> bool:
        now = [param for params in param_lists for param in params]
        return len(now) == len(self.params) and all(
            param is known
            and param.requires_grad == is_active
            and (param.shape, param.dtype) == described
            and param.device == self.absent.device
            for param, known, is_active, described in zip(
                now, self.params, self.active, self._described, strict=True
            )
        )  # fmt: skip

    @staticmethod
    def _see(tensor: torch.Tensor | None) -> tuple[int, int]:
        if tensor is None:
            return (0, 0)
        address = tensor.data_ptr() if tensor.layout == torch.strided else id(tensor)
        return (0 if tensor.is_inference() else tensor._version, address)

    def remember(self) -> None:
        self._seen = [self._see(param) for param in self.active_params]

    def changed(self) -> list[int]:
        return [
            k for k, (param, seen) in enumerate(zip(self.active_params, self._seen, strict=False))
            if self._see(param) != seen
        ]  # fmt: skip

    def watch_backward(self) -> None:
        self.unwatch_backward()
        self._handles = [
            param.register_hook(self._about_to_accumulate) for param in self.active_params if param.is_leaf
        ]

    def _about_to_accumulate(self, grad: torch.Tensor) -> None:
        if not self._in_flight:
            self._in_flight = True
            torch.autograd.Variable._execution_engine.queue_callback(self.reset_backward)

    def unwatch_backward(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def unfinished_backward(self) -> bool:
        return self._in_flight

    def reset_backward(self) -> None:
        self._in_flight = False
