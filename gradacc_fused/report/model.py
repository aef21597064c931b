"""``--model module:callable`` to parameters."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable

import torch

from .paths import copies


class ModelError(ValueError):
    """A model cannot be had from what was given; the message says what to write instead."""


def load(spec: str) -> torch.nn.Module | Iterable[torch.Tensor]:
    """Call what ``module:callable`` names; the current directory is on the path.

    Raises:
        ModelError: No colon, no such module, no such name in it, or it cannot be called.
    """
    module_name, colon, name = spec.partition(":")
    if not colon or not module_name or not name:
        raise ModelError(
            f"--model must be module:callable, got {spec!r}. For 'my_model.py' with 'def make()': my_model:make."
        )
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        target: object = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        where = f"{folder} and the Python path" if error.name == module_name else f"what {module_name!r} imports"
        raise ModelError(f"--model {spec}: there is no module {error.name!r} in {where}.") from error
    for part in name.split("."):
        if not hasattr(target, part):
            raise ModelError(f"--model {spec}: module {module_name!r} has no {name!r}.")
        target = getattr(target, part)
    if not callable(target):
        raise ModelError(f"--model {spec}: {name!r} is of type {type(target).__name__} and cannot be called.")
    return target()


def dtype_of(name: str) -> torch.dtype | None:
    """A dtype by its name; None for "as-is"."""
    return None if name == "as-is" else getattr(torch, name)


def defer_of(text: str) -> int | str:
    """``--defer``: "auto" or a positive number.

    Raises:
        ModelError: It is neither.
    """
    if text == "auto":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise ModelError(f"--defer must be auto or a positive number, got {text!r}.")
    return int(text)


def parameters(made: object, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Copies of the parameters that require a gradient, in ``dtype`` where it is given.

    Args:
        made: A module, or an iterable of parameters.
        dtype: None: as they are.

    Raises:
        ModelError: It is neither, none requires a gradient, or one is not on the CPU.
    """
    if isinstance(made, torch.nn.Module):
        found = list(made.parameters())
    elif isinstance(made, Iterable) and not isinstance(made, torch.Tensor):
        found = list(made)
    else:
        raise ModelError(
            f"the callable must return a torch.nn.Module or an iterable of parameters, got {type(made).__name__}."
        )
    for index, param in enumerate(found):
        if not isinstance(param, torch.Tensor):
            raise ModelError(f"the callable must return parameters; item {index} is of type {type(param).__name__}.")
    active = [param for param in found if param.requires_grad and param.numel() > 0]
    if not active:
        raise ModelError(f"the model has no parameter that requires a gradient ({len(found)} parameters in all).")
    for index, param in enumerate(active):
        if param.device.type != "cpu":
            raise ModelError(
                f"parameter {index} is on {param.device}; times are measured on the CPU. Make the model there."
            )
    return copies(active, dtype)
