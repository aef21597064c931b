"""A window of counting mode in a state dict: its sums beside the moments, its scalars in the first group.

``state[i]["window_sum"]`` is the weighted sum of what was taken (the main grad), there for parameters that had a
gradient; ``param_groups[0]["window"]`` holds weights and logged values. Plain torch loads both and uses neither.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

import torch

from .micro_batches import MicroBatches
from .results import LossRecord

if TYPE_CHECKING:
    from .engine import Engine

SUM, SCALARS = "window_sum", "window"
OPTIONS = ("weighting", "host_scale")  # what the sums depend on
LISTS = ("weights", "_reductions", "_samples", "_tokens")


def save(window: MicroBatches, packed: dict[str, Any]) -> None:
    """Add an open window to a packed state dict. What it holds is added to the main grads first."""
    window._flush_pending()
    engine = window._engine
    state = dict(packed["state"])
    for k, index in enumerate(engine.layout.indices):
        if engine.touched.values[k]:
            state[index] = {**state.get(index, {}), SUM: engine.main_grads[k].clone()}
    scalars: dict[str, Any] = {name.lstrip("_"): list(getattr(window, name)) for name in LISTS}
    scalars["losses"] = [list(astuple(record)) for record in window._losses]
    scalars |= {name: getattr(window._optimizer.options, name) for name in OPTIONS}
    scalars["unweighted"], scalars["loss_scale"] = window._unweighted, window.loss_scale
    first, *others = packed["param_groups"]
    packed["state"], packed["param_groups"] = state, [{**first, SCALARS: scalars}, *others]


def split(state_dict: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None, dict[Any, torch.Tensor]]:
    """(the state dict without its window, the window's scalars, its sums by the parameter's index)."""
    groups = state_dict["param_groups"]
    if not groups or SCALARS not in groups[0]:
        return state_dict, None, {}
    first = {key: value for key, value in groups[0].items() if key != SCALARS}
    sums = {index: entry[SUM] for index, entry in state_dict["state"].items() if SUM in entry}
    state = {
        index: {key: value for key, value in entry.items() if key != SUM}
        for index, entry in state_dict["state"].items()
    }
    bare = {**state_dict, "state": {k: v for k, v in state.items() if v}, "param_groups": [first, *groups[1:]]}
    return bare, groups[0][SCALARS], sums


@torch.no_grad()
def restore(
    window: MicroBatches, engine: Engine, scalars: dict[str, Any], sum_of: Callable[[torch.Tensor], torch.Tensor | None]
) -> None:
    """Fill a new window with what was saved.

    Args:
        window: Open, with nothing taken.
        engine: Its engine.
        scalars: What ``save`` put into the first group.
        sum_of: The saved sum of a parameter, None where it had no gradient.
    """
    for k, param in enumerate(engine.layout.params):
        saved = sum_of(param)
        engine.touched.values[k] = saved is not None
        if saved is None:
            engine.main_grads[k].zero_()
        else:
            engine.main_grads[k].copy_(saved)
    for name in LISTS:
        setattr(window, name, list(scalars[name.lstrip("_")]))
    window._losses = [LossRecord(*record) for record in scalars["losses"]]
    window._unweighted, window.loss_scale = scalars["unweighted"], scalars["loss_scale"]
    window._stored = True
