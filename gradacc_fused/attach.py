"""Attached objects advance once per applied step, whatever the unchanged loop calls after every micro-batch."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


@cache
def _attached_class(scheduler_class: Any) -> Any:
    """``scheduler_class`` with a ``step`` that leaves the advance to the optimizer; its state_dict stays the same."""

    def step(self: Any, *args: Any, **kwargs: Any) -> None:
        """Does nothing: this scheduler is attached to a GradAccumOptimizer, which advances it per applied step."""

    return type(scheduler_class.__name__, (scheduler_class,), {"step": step, "__module__": scheduler_class.__module__})


class Attached:
    """The schedulers attached to one optimizer."""

    def __init__(self) -> None:
        self._schedulers: list[tuple[Any, Any]] = []

    def add(self, scheduler: Any) -> None:
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise TypeError(
                "attach: ReduceLROnPlateau steps on a metric that the optimizer does not know. Call its step(metric) "
                "yourself, once per evaluation."
            )
        if not callable(getattr(scheduler, "step", None)) or not hasattr(scheduler, "state_dict"):
            raise TypeError(
                f"attach: scheduler must be a torch.optim.lr_scheduler scheduler, got {type(scheduler).__name__}."
            )
        if any(scheduler is known for known, _ in self._schedulers):
            raise ValueError("attach: this scheduler is attached already; it would advance twice per step.")
        scheduler_class: Any = type(scheduler)
        scheduler.__class__ = _attached_class(scheduler_class)
        self._schedulers.append((scheduler, scheduler_class))

    def advance(self) -> None:
        for scheduler, scheduler_class in self._schedulers:
            scheduler_class.step(scheduler)

    def remove(self) -> None:
        for scheduler, scheduler_class in self._schedulers:
            scheduler.__class__ = scheduler_class
        self._schedulers = []
