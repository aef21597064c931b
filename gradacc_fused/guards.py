"""What cannot be accumulated for, and warnings about what makes a split batch train a different model."""

from __future__ import annotations

import gc
import inspect
import warnings
from collections.abc import Sequence

import torch
from torch.nn.modules.batchnorm import _BatchNorm


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


def training_batch_norms(params: Sequence[torch.Tensor]) -> list[str]:
    """Names of BatchNorm modules in train mode inside the models that own ``params``.

    The optimizer knows parameters, not modules, so the modules are looked up among the living objects: one walk over
    the heap, once per optimizer.
    """
    ours = {id(param) for param in params}
    modules = [candidate for candidate in gc.get_objects() if issubclass(type(candidate), torch.nn.Module)]
    parents: dict[int, list[torch.nn.Module]] = {}
    for module in modules:
        for child in module.__dict__.get("_modules", {}).values():
            if child is not None:
                parents.setdefault(id(child), []).append(module)
    roots: dict[int, torch.nn.Module] = {}
    seen: set[int] = set()
    reached = [
        module
        for module in modules
        if any(id(param) in ours for param in module.__dict__.get("_parameters", {}).values())
    ]
    while reached:
        module = reached.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        above = parents.get(id(module), [])
        reached.extend(above)
        if not above:
            roots[id(module)] = module
    names = []
    for root in roots.values():
        for name, module in root.named_modules():
            if isinstance(module, _BatchNorm) and module.training:
                names.append(f"{type(root).__name__}.{name}" if name else type(root).__name__)
    return names


def warn_about_batch_norm(params: Sequence[torch.Tensor]) -> None:
    """Warn once, naming the modules, that BatchNorm's statistics are those of each micro-batch."""
    names = training_batch_norms(params)
    if names:
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        warnings.warn(
            f"BatchNorm in train mode with more than one micro-batch: {shown}. Its statistics are those of each "
            "micro-batch, not of the logical batch, so splitting changes the training. Use GroupNorm or LayerNorm, put "
            "these modules in eval() to freeze their statistics, or make the micro-batches larger.",
            stacklevel=5,
        )
