"""Attached objects advance once per applied step, whatever the unchanged loop calls after every micro-batch."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


def _unattached(scheduler_class: Any) -> Any:
    return scheduler_class.__new__(scheduler_class)


@cache
def _attached_class(scheduler_class: Any) -> Any:
    """``scheduler_class`` with a ``step`` that leaves the advance to the optimizer; its state_dict stays the same."""

    def step(self: Any, *args: Any, **kwargs: Any) -> None:
        """Does nothing: this scheduler is attached to a GradAccumOptimizer, which advances it per applied step."""

    def reduce(self: Any, protocol: Any) -> Any:
        """Copies and pickles as the class it came from; the optimizer copied with it attaches it again."""
        return _unattached, (scheduler_class,), self.__dict__

    members = {"step": step, "__reduce_ex__": reduce, "__module__": scheduler_class.__module__}
    return type(scheduler_class.__name__, (scheduler_class,), members)


class Attached:
    """The schedulers attached to one optimizer."""

    def __init__(self) -> None:
        self._schedulers: list[tuple[Any, Any]] = []

    @property
    def schedulers(self) -> list[Any]:
        return [scheduler for scheduler, _ in self._schedulers]

    def add(self, scheduler: Any, optimizers: tuple[Any, ...]) -> None:
        """Attach ``scheduler``, which must schedule one of ``optimizers``."""
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise TypeError(
                "attach: ReduceLROnPlateau steps on a metric that the optimizer does not know. Call its step(metric) "
                "yourself, once per evaluation."
            )
        owner = getattr(scheduler, "optimizer", None)
        if not callable(getattr(scheduler, "step", None)) or owner is None:
            raise TypeError(
                f"attach: scheduler must be a torch.optim.lr_scheduler scheduler, got {type(scheduler).__name__}."
            )
        if not any(owner is optimizer for optimizer in optimizers):
            raise ValueError(
                "attach: this scheduler schedules another optimizer. Build it on this one or on its inner one."
            )
        if any(scheduler is known for known in self.schedulers):
            raise ValueError("attach: this scheduler is attached already; it would advance twice per step.")
        self.take_over(scheduler)

    def take_over(self, scheduler: Any) -> None:
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
