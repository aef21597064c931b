"""The host's walk over the parameters in Python: the twin of csrc/collector.cpp for installs with nothing compiled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch


class Piece:
    """One micro-batch's gradients.

    Attributes:
        present: How many parameters it reached.
        nbytes: Their gradients' bytes.
        exclusive: Whether nobody else can write them. Python cannot know, so here never.
    """

    exclusive = False

    def __init__(self, grads: list[torch.Tensor], present: int) -> None:
        self._grads = grads
        self.present = present
        self.nbytes = sum(grad.nbytes for grad in grads)

    def tensors(self, absent: torch.Tensor) -> list[torch.Tensor]:
        """The gradients; ``absent`` where there is none."""
        return self._grads


class StateRecord:
    """Whether an optimizer's state still holds the objects that were taken up from it, by identity.

    Args:
        state: ``{parameter: {name: value}}``.
    """

    def __init__(self, state: Mapping[torch.Tensor, Any]) -> None:
        self._taken = [(of_param, list(of_param.values())) for of_param in state.values()]

    def holds(self, state: Mapping[torch.Tensor, Any]) -> bool:
        """The same parameters' dicts, with the same values in the same order; added ones do not matter."""
        return len(state) == len(self._taken) and all(
            now is of_param and self._in_order(now.values(), values)
            for now, (of_param, values) in zip(state.values(), self._taken, strict=True)
        )

    @staticmethod
    def _in_order(now: Iterable[Any], values: list[Any]) -> bool:
        remaining = iter(now)
        return all(any(value is wanted for value in remaining) for wanted in values)


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
        self._marked: list[tuple[int, int]] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._in_flight = False

    def collect(
        self, param_lists: Sequence[Sequence[torch.Tensor]], touched: torch.Tensor, clear: bool, held: Sequence[Piece]
    ) -> tuple[Piece | None, int]:
        """Take the gradients of the active parameters. Sparse ones are coalesced and made dense.

        Args:
            param_lists: The parameters that the groups list now.
            touched: uint8, one per active parameter; gets a 1 where a gradient was there.
            clear: Whether ``.grad`` becomes None.
            held: Earlier pieces whose memory must not come back.

        Returns:
            The piece, or None where the groups list other parameters; and the index of the first parameter whose
            gradient lies where one of a held piece does, or -1.
        """
        if not self.matches(param_lists):
            return None, -1
        grads = []
        for k, param in enumerate(self.active_params):
            if param.grad is None:
                grads.append(self.absent)
                continue
            touched[k] = 1
            grad = param.grad if param.grad.layout == torch.strided else param.grad.to_dense()
            # An fp64 gradient of another parameter would be measured and applied in different dtypes.
            narrow = grad.dtype == torch.float64 and param.dtype != torch.float64
            grads.append(grad.to(torch.float32) if narrow else grad)
            if clear:
                param.grad = None
        return Piece(grads, sum(grad is not self.absent for grad in grads)), -1

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

    def mark(self) -> None:
        """Remember the parameters as they are where a window opens."""
        self._marked = [self._see(param) for param in self.active_params]

    def first_written(self) -> int:
        """Index (among all parameters) of the first active one that was written since ``mark``, or -1."""
        indices = (i for i, is_active in enumerate(self.active) if is_active)
        now = zip(indices, self.active_params, self._marked, strict=False)
        return next((i for i, param, seen in now if self._see(param) != seen), -1)

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
