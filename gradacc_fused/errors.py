"""Exceptions and the one wording of their messages: op, argument (with its index), expected, found, what to do."""

from __future__ import annotations

import torch


class WindowError(RuntimeError):
    """An accumulation window was used in a way that would give a wrong gradient; nothing was applied."""


class DenominatorError(ValueError):
    """Nobody said how much of the logical batch a micro-batch is; the package refuses to guess."""


class NonFiniteError(FloatingPointError):
    """``on_nonfinite="raise"`` met a non-finite gradient; nothing was applied."""


class BackendUnavailableError(RuntimeError):
    """A backend was asked for by name and is not here; the message says why."""


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def item_name(op: str, argument: str, index: int) -> str:
    return f"{op}: {argument}[{index}]"


WEIGHT_CHOICES = (
    "Say how much of the logical batch it is: weight=<active tokens> or weight=<samples>, with reduction='mean' for a "
    "mean loss and reduction='sum' for a sum; weight=1 for every micro-batch gives the mean of means."
)
