"""BatchNorm, whose statistics are those of a micro-batch: found, warned about, exchanged, its buffers listed."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from .modules import buffers_of, named_modules_of

MOST_GROUPS = 32  # as Wu and He, Group Normalization (2018), use by default


def training_batch_norms(params: Sequence[torch.Tensor]) -> list[str]:
    """Names of BatchNorm modules in train mode inside the models that own ``params``."""
    return [name for name, module in named_modules_of(params) if isinstance(module, _BatchNorm) and module.training]


def running_statistics(params: Sequence[torch.Tensor]) -> list[tuple[nn.Module, str]]:
    """(module, name) of the buffers of the batch and instance norms inside the models that own ``params``."""
    norms = {id(module): module for _, module in named_modules_of(params) if isinstance(module, _NormBase)}
    return buffers_of(norms.values())


def warn_about_batch_norm(params: Sequence[torch.Tensor]) -> None:
    """Warn once, naming the modules, that BatchNorm's statistics are those of each micro-batch."""
    names = training_batch_norms(params)
    if names:
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        warnings.warn(
            f"BatchNorm in train mode with more than one micro-batch: {shown}. Its statistics are those of each "
            "micro-batch, not of the logical batch, so splitting changes the training. Use GroupNorm or LayerNorm "
            "(gf.convert_batch_norm exchanges them), put these modules in eval() to freeze their statistics, or make "
            "the micro-batches larger.",
            stacklevel=5,
        )


def convert_batch_norm(
    model: nn.Module, to: str = "group", *, num_groups: int | None = None, process_group: object = None
) -> nn.Module:
    """Exchange every BatchNorm of a model; weights and biases stay the same parameters, running statistics are dropped.

    Args:
        model: Changed in place.
        to: "group": GroupNorm, whose statistics are of one sample: a batch may be split anyhow (Wu and He, Group
            Normalization, 2018). "sync": SyncBatchNorm, which gathers statistics over *ranks*: those of the pieces that
            run at the same time, so splitting in time still changes them.
        num_groups: For "group", of every module; None: the largest divisor of its channels up to 32 that leaves two
            channels or more per group.
        process_group: For "sync".

    Returns:
        The model; another module where ``model`` itself is a BatchNorm.

    Raises:
        ValueError: No such kind; groups that do not divide a module's channels (named).
    """
    if to == "sync":
        return nn.SyncBatchNorm.convert_sync_batchnorm(model, process_group)
    if to != "group":
        raise ValueError(f"convert_batch_norm: to must be 'group' or 'sync', got {to!r}.")
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    made = {id(module): _group_norm(name, module, num_groups) for name, module in found}  # before anything is exchanged
    if id(model) in made:
        return made[id(model)]
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if id(child) in made:
                parent._modules[name] = made[id(child)]
    return model


def _group_norm(name: str, module: _BatchNorm, num_groups: int | None) -> nn.GroupNorm:
    channels = module.num_features
    if channels < 2:
        raise ValueError(
            f"convert_batch_norm: {name or 'the model'!r} must have two channels or more for a group to have "
            f"statistics, got {channels}. Leave it, or run a lazy module once first."
        )
    if num_groups is not None and num_groups < 1:
        raise ValueError(f"convert_batch_norm: num_groups must be at least 1, got {num_groups}.")
    groups = num_groups or max(
        (count for count in range(1, min(MOST_GROUPS, channels // 2) + 1) if channels % count == 0), default=1
    )
    if channels % groups:
        raise ValueError(
            f"convert_batch_norm: num_groups must divide the {channels} channels of {name or 'the model'!r}, got "
            f"{groups}."
        )
    made = nn.GroupNorm(groups, channels, eps=module.eps, affine=module.affine)
    made.train(module.training)
    if module.affine:
        made.weight, made.bias = module.weight, module.bias
    return made
