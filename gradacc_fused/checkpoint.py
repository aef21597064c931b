"""State dicts: exchangeable with plain torch optimizers for fp32 parameters, exact for low-precision ones.

torch's own ``load_state_dict`` casts every floating state of a bf16 parameter to bf16; ours keeps moments and main
params in the math dtype. A low-precision checkpoint loaded into plain torch is rounded by torch.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from . import open_window
from .layout import math_dtype
from .modes import Counting
from .rules import MAIN_PARAM, SGD, Rule

if TYPE_CHECKING:
    from .optimizer import GradAccumOptimizer


def _without_empty_momentum(state: dict[str, Any], rule: Rule) -> dict[str, Any]:
    """A momentum buffer that was never written is not state: torch would take its zeros for a first gradient."""
    if float(state.get(rule.step_key, 0.0)) > 0:
        return state
    return {key: value for key, value in state.items() if key not in (rule.step_key, rule.exp_avg_key)}


def state_dict(optimizer: GradAccumOptimizer, pack: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The inner optimizer's packed state with the main params in ``state[i]["main_param"]``."""
    packed = pack()
    engine = optimizer._engine
    state = dict(packed["state"])
    if engine.rule is SGD:
        state = {index: _without_empty_momentum(entry, SGD) for index, entry in state.items()}
        state = {index: entry for index, entry in state.items() if entry}
    if engine.rule is None:
        for index, main_param in zip(engine.layout.indices, optimizer._publisher.saved_main_params(), strict=False):
            if main_param is not None:
                state[index] = {**state.get(index, {}), MAIN_PARAM: main_param.detach()}
    packed["state"] = state
    window = optimizer._mode.saved_window("state_dict")
    if window is not None:
        open_window.save(window, packed)
    return packed


def _check_groups(groups: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    ours, theirs = [len(group["params"]) for group in groups], [len(group["params"]) for group in saved]
    if ours != theirs:
        raise ValueError(
            f"load_state_dict: the optimizer has groups of {ours} parameters, the state dict of {theirs}. Build the "
            "optimizer with the groups it was saved with."
        )


def _check_shape(index: Any, param: torch.Tensor, key: str, value: Any) -> None:
    if value.shape != param.shape:
        raise ValueError(
            f"load_state_dict: state[{index}]['{key}'] must have shape {list(param.shape)}, got {list(value.shape)}. "
            "Nothing was loaded."
        )


def _check_entry(index: Any, param: torch.Tensor, entry: dict[str, Any], rule: Rule) -> None:
    """The moments of a fused rule have the parameter's shape and come together."""
    moments = [key for key in (rule.exp_avg_key, rule.exp_avg_sq_key) if key is not None]
    there = [key for key in moments if entry.get(key) is not None]
    for key in there:
        _check_shape(index, param, key, entry[key])
    if there and there != moments:
        raise ValueError(
            f"load_state_dict: state[{index}] must have {' and '.join(moments)}, got {' and '.join(there)} alone. "
            "Nothing was loaded."
        )
    step = entry.get(rule.step_key)
    if isinstance(step, torch.Tensor) and step.numel() != 1:
        raise ValueError(
            f"load_state_dict: state[{index}]['{rule.step_key}'] must have one element, got {list(step.shape)}. "
            "Nothing was loaded."
        )


def _loaded_group(group: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """The saved options, copied, with the parameters (and their names, where only we have them) of the group."""
    loaded = copy.deepcopy({key: value for key, value in saved.items() if key != "params"})
    loaded["params"] = group["params"]
    if "param_names" in group and "param_names" not in loaded:
        loaded["param_names"] = group["param_names"]
    return loaded


def _loaded(key: str, value: Any, param: torch.Tensor) -> Any:
    """A copy of a state value: full-size tensors in the math dtype on the parameter's device."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape == param.shape and value.is_floating_point() and key != "step":
        return value.to(device=param.device, dtype=math_dtype(param.dtype), copy=True)
    return value.clone()


def load_state_dict(optimizer: GradAccumOptimizer, state_dict: dict[str, Any]) -> None:
    """Load a state dict of ours or of the plain torch optimizer.

    Raises:
        ValueError: Its groups do not have the optimizer's numbers of parameters, or a state tensor not its parameter's
            shape. Nothing was changed.
    """
    state_dict = state_dict.copy()
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        replaced = hook(optimizer, state_dict)
        state_dict = state_dict if replaced is None else replaced
    inner, engine = optimizer.inner, optimizer._engine
    state_dict, scalars, sums = open_window.split(state_dict)
    if scalars is not None:
        optimizer._mode.check_restored_window(len(scalars["weights"]))
        for name in open_window.OPTIONS:
            if scalars[name] != getattr(optimizer.options, name):
                raise ValueError(
                    f"load_state_dict: the state dict holds an open window with {name}={scalars[name]!r}, and this "
                    f"optimizer has {getattr(optimizer.options, name)!r}. Nothing was loaded."
                )
    saved_groups = state_dict["param_groups"]
    _check_groups(inner.param_groups, saved_groups)
    engine.prepare()
    param_of = dict(
        zip(
            chain.from_iterable(group["params"] for group in saved_groups),
            chain.from_iterable(group["params"] for group in inner.param_groups),
            strict=True,
        )
    )
    main_params = {
        param_of[index]: entry[MAIN_PARAM]
        for index, entry in state_dict["state"].items()
        if index in param_of and MAIN_PARAM in entry
    }
    for index, param in param_of.items():
        if param in main_params:
            _check_shape(index, param, MAIN_PARAM, main_params[param])
        if index in sums:
            _check_shape(index, param, open_window.SUM, sums[index])
    if engine.rule is None:
        bare = {
            index: {key: value for key, value in entry.items() if key != MAIN_PARAM} if index in param_of else entry
            for index, entry in state_dict["state"].items()
        }
        optimizer._publisher.refresh_main_params()
        with optimizer._publisher.stand_ins():
            inner.load_state_dict({"state": {k: v for k, v in bare.items() if v}, "param_groups": saved_groups})
        optimizer._publisher.restore_main_params(
            [main_params.get(param, param.detach()) for param in engine.layout.params]
        )
    else:
        state: dict[Any, Any] = {
            param_of[index]: {key: _loaded(key, value, param_of[index]) for key, value in entry.items()}
            if index in param_of
            else entry
            for index, entry in state_dict["state"].items()
        }
        for index, param in param_of.items():
            _check_entry(index, param, state.get(param, {}), engine.rule)
        groups = [_loaded_group(group, saved) for group, saved in zip(inner.param_groups, saved_groups, strict=True)]
        inner.__setstate__({"state": _default_dict(state), "param_groups": groups})
        engine.forget_state()
        engine.choose_rule()
    if scalars is not None:
        assert isinstance(optimizer._mode, Counting)  # as check_restored_window requires
        sum_of = {param_of[index]: value for index, value in sums.items()}
        open_window.restore(optimizer._mode.new_window(), engine, scalars, sum_of.get)
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)


def _default_dict(state: dict[Any, Any]) -> dict[Any, Any]:
    made: defaultdict[Any, Any] = defaultdict(dict)
    made.update(state)
    return made
