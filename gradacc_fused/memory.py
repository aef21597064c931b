"""Deferral within a memory budget, and what the optimizer's memory is spent on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .layout import Layout


class Deferral:
    """Decides when held gradients are added to the main grads.

    The micro-batch in hand is held in any case: only at the next one is it known not to be the last. ``"auto"`` may
    take ``defer_bytes`` beyond that one and the main grads, and no more:

    * a window whose length is known (counting mode) and whose gradients fit in place of the main grads plus the budget
      is held as a whole: then the main grads are never allocated;
    * any other window holds what fits the budget beside one micro-batch.

    Args:
        defer: How many micro-batches are held, or "auto".
        defer_bytes: The budget of "auto"; None: as many bytes as the main grads have.
    """

    def __init__(self, defer: int | str, defer_bytes: int | None) -> None:
        self._defer = defer
        self._defer_bytes = defer_bytes
        self.peak_held = 0  # bytes of gradients held at once
        self.peak = 0  # those and the main grads

    def budget(self, layout: Layout) -> int:
        """Bytes that "auto" may add to what ``defer=1`` takes."""
        return layout.main_grad_bytes if self._defer_bytes is None else self._defer_bytes

    def most(self, layout: Layout) -> int:
        """Bytes of gradients that a window may hold beside one micro-batch's and the main grads."""
        if self._defer == "auto":
            return self.budget(layout)
        return (int(self._defer) - 1) * sum(param.nbytes for param in layout.params)

    def micro_batches(self, layout: Layout, piece_bytes: int, expected: int | None, stored: bool) -> int:
        """How many micro-batches of ``piece_bytes`` a window holds before it adds them to the main grads.

        Args:
            layout: Of the parameters.
            piece_bytes: Of one micro-batch's gradients.
            expected: Micro-batches in the window, where that is known.
            stored: Whether the main grads are in use already.
        """
        if self._defer != "auto":
            return int(self._defer)
        budget = self.budget(layout)
        if piece_bytes == 0:
            return 1
        in_place = budget + layout.main_grad_bytes
        if expected is not None and not stored and (expected - 1) * piece_bytes <= in_place:
            return expected
        return 1 + budget // piece_bytes

    def note(self, held: Sequence[Any], layout: Layout, main_grads: bool) -> None:
        """Keep the peaks."""
        now = sum(piece.nbytes for piece in held)
        self.peak_held = max(self.peak_held, now)
        self.peak = max(self.peak, now + (layout.main_grad_bytes if main_grads else 0))


@dataclass(frozen=True)
class MemoryReport:
    """Bytes that the optimizer keeps beside parameters and their ``.grad``; ``str()`` is a table.

    Attributes:
        elements: Elements of the active parameters.
        main_grads: The fp32 (fp64) accumulation buffers; 0 as long as no window needed them.
        held_grads: Gradients that the open window holds now.
        peak_held_grads: The most it ever held.
        main_params: fp32 main params of low-precision parameters.
        state: Moments, momentum buffers and step counts.
        tables: Partials of the norm and per-parameter rows.
        peak_window: The most that main grads and held gradients took together.
        defer_bytes: What ``defer="auto"`` may take beyond one micro-batch's gradients and the main grads.
    """

    elements: int
    main_grads: int
    held_grads: int
    peak_held_grads: int
    main_params: int
    state: int
    tables: int
    peak_window: int
    defer_bytes: int

    @property
    def total(self) -> int:
        """All that is kept now."""
        return self.main_grads + self.held_grads + self.main_params + self.state + self.tables

    @property
    def peak(self) -> int:
        """The most that was kept at once, state and main params as they are now."""
        return self.peak_window + self.main_params + self.state + self.tables

    def __str__(self) -> str:
        rows = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "elements"}
        rows |= {"total": self.total, "peak": self.peak}
        lines = [f"{self.elements:,} elements"]
        for name, value in rows.items():
            each = f"{value / self.elements:8.2f} B/element" if self.elements else ""
            lines.append(f"{name:16} {value:>16,} B {each}".rstrip())
        return "\n".join(lines)


def state_bytes(state: Any) -> tuple[int, int]:
    """(main params, everything else) of a rule's state."""
    if state is None:
        return 0, 0
    moments = sum(tensor.nbytes for tensor in (*state.exp_avgs, *state.exp_avg_sqs, state.steps))
    return sum(tensor.nbytes for tensor in state.main_params), moments


def elements(layout: Layout) -> int:
    return sum(param.numel() for param in layout.params)


def table_bytes(layout: Layout, partials: torch.Tensor) -> int:
    """Partials, and per parameter a group id (4) and a touched flag (1)."""
    return partials.nbytes + 5 * len(layout.params)
