"""What cannot be accumulated for."""

from __future__ import annotations

import inspect

import torch


def check_inner(inner: torch.optim.Optimizer) -> None:
    """Refuse optimizers that cannot step on one accumulated, dense gradient."""
    closure = inspect.signature(type(inner).step).parameters.get("closure")
    why = ""
    if isinstance(inner, torch.optim.SparseAdam):
        why = "takes sparse gradients only. Use Adam"
    elif closure is not None and closure.default is closure.empty:
        why = "evaluates the loss itself, through a closure. Use an optimizer that steps on a gradient"
    if why:
        raise TypeError(f"GradAccumOptimizer: {type(inner).__name__} cannot step on an accumulated gradient: it {why}.")
