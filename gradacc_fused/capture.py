"""Captured CUDA graphs: a replay reads the addresses of its capture, so somebody has to see that they still hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from .errors import WindowError

if TYPE_CHECKING:
    from .optimizer import GradAccumOptimizer


class GuardedGraph:
    """A captured graph that is replayed only while what it reads and writes is where it was when it was captured.

    A graph keeps addresses, not tensors: where a gradient was made anew, a replay would read memory that belongs to
    somebody else, and where an optimizer's state was exchanged (``load_state_dict``, ``add_param_group``), it would
    write to what nobody looks at. Looking costs no sync. The optimizer's buffers live as long as this object.

    Args:
        graph: What has a ``replay()``: a ``torch.cuda.CUDAGraph``, right after its capture.
        gradients: Called now and before each replay; yields the gradients that the captured stages read, None where
            there is none. In counting mode ``step()`` clears ``.grad``: give the tensors that were put there, for
            example ``lambda: [grad for piece in static for grad in piece]``.
        optimizer: The GradAccumOptimizer whose step was captured, if one was.

    Raises:
        WindowError: There is no gradient to guard.
    """

    def __init__(
        self,
        graph: Any,
        gradients: Callable[[], Iterable[torch.Tensor | None]],
        optimizer: GradAccumOptimizer | None = None,
    ) -> None:
        self._graph = graph
        self._gradients = gradients
        self._places = self._look()
        self._optimizer = optimizer
        self._memory = self._look_at_memory()
        if not any(self._places):
            raise WindowError(
                "GuardedGraph: gradients must yield the captured gradients, got none. In counting mode step() clears "
                ".grad; yield the static tensors that you put there."
            )

    def _look_at_memory(self) -> tuple[Any, ...]:
        return () if self._optimizer is None else self._optimizer._engine.memory

    def _look(self) -> list[tuple[Any, ...] | None]:
        return [
            None if grad is None else (grad.data_ptr(), grad.dtype, tuple(grad.shape), grad.stride())
            for grad in self._gradients()
        ]

    def replay(self) -> None:
        """Replay the graph.

        Raises:
            WindowError: A gradient has moved, changed its dtype, shape or strides, appeared or gone, or the
                optimizer's state is not the captured one; nothing ran.
        """
        pairs = zip(self._look_at_memory(), self._memory, strict=True)
        if any(then is not None and now is not then for now, then in pairs):
            raise WindowError(
                "replay: the optimizer's state or parameters were exchanged since the capture, and the graph would "
                "write to the old ones. Capture again."
            )
        places = self._look()
        if places != self._places:
            known = self._places + [None] * (len(places) - len(self._places))
            places += [None] * (len(known) - len(places))
            index = next(i for i, (old, new) in enumerate(zip(known, places, strict=True)) if old != new)
            raise WindowError(
                f"replay: gradients[{index}] must lie where it lay at the capture, {_text(known[index])}, got "
                f"{_text(places[index])}. Keep gradients allocated (zero them in place, not set_to_none=True), or "
                "capture again."
            )
        self._graph.replay()


def _text(place: tuple[Any, ...] | None) -> str:
    return "none" if place is None else f"{place[1]} {list(place[2])} at {place[0]:#x}"
