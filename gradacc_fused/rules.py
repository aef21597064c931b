"""Which inner optimizers have a fused rule, their hyper-parameter rows, and their state as lists of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .buffers import HostArray, state_like
from .checks import HYPER_COLUMNS
from .layout import Layout, math_dtype
from .lion import Lion

HostValue = Callable[[torch.Tensor], float | None]
MAIN_PARAM = "main_param"


@dataclass(frozen=True)
class Rule:
    """A fused update rule and the names torch gives its state."""

    name: str
    step_key: str
    exp_avg_key: str
    exp_avg_sq_key: str | None


ADAMW = Rule("adamw", "step", "exp_avg", "exp_avg_sq")
ADAM = Rule("adam", "step", "exp_avg", "exp_avg_sq")
# torch's SGD keeps no step; ours counts the updates of the momentum buffer, 0 meaning that it holds nothing yet.
SGD = Rule("sgd", "momentum_steps", "momentum_buffer", None)
LION = Rule("lion", "step", "exp_avg", None)


def rule_for(inner: torch.optim.Optimizer) -> Rule | None:
    """The fused rule of an optimizer, or None: then its own ``step`` runs on the published gradient.

    Only the classes themselves count (a subclass may have changed the rule), with options the kernels know.
    """
    groups = inner.param_groups
    if any(group.get("amsgrad") or group.get("differentiable") for group in groups):
        return None
    if type(inner) in (torch.optim.Adam, torch.optim.AdamW):
        decoupled = {bool(group.get("decoupled_weight_decay", False)) for group in groups}
        return None if len(decoupled) != 1 else (ADAMW if decoupled.pop() else ADAM)
    if type(inner) is Lion:
        return LION
    return SGD if type(inner) is torch.optim.SGD else None


def _row(group: dict[str, Any]) -> list[Any]:
    betas = group.get("betas", (0.0, 0.0))
    values = {
        "lr": group["lr"],
        "weight_decay": group.get("weight_decay", 0.0),
        "maximize": group.get("maximize", False),
        "beta1": betas[0],
        "beta2": betas[1],
        "eps": group.get("eps", 0.0),
        "momentum": group.get("momentum", 0.0),
        "dampening": group.get("dampening", 0.0),
        "nesterov": group.get("nesterov", False),
    }
    return [values[column] for column in HYPER_COLUMNS]


Late = list[tuple[int, int, torch.Tensor]]  # (row, column, value) of hyper-parameters that only a device knows


def fill_hyper(
    hyper: HostArray, param_groups: Sequence[dict[str, Any]], host_value: HostValue
) -> tuple[torch.Tensor, Late]:
    """Write the groups' rows into ``hyper``; values that cannot be read on the host are 0 there and listed beside."""
    on_device: Late = []
    row: list[float] = []
    for number, group in enumerate(param_groups):
        for column, value in enumerate(_row(group)):
            if isinstance(value, torch.Tensor):
                known = host_value(value)
                if known is None:
                    on_device.append((number, column, value))
                value = 0.0 if known is None else known
            row.append(float(value))
    return hyper.fill(row), on_device


def with_late(rows: torch.Tensor, late: Late) -> torch.Tensor:
    """Write the listed values into ``rows``; no sync where these lie on the values' device."""
    for number, column, value in late:
        rows[number, column].copy_(value.detach().reshape(()))
    return rows


def hyper_rows(param_groups: Sequence[dict[str, Any]]) -> torch.Tensor:
    """Hyper-parameter rows for ``update_``: float64 [groups, 9], columns as in ``HYPER_COLUMNS``.

    Args:
        param_groups: Groups of a torch optimizer (``lr``, ``betas``, ``weight_decay``, ...); missing keys count as 0.
    """
    hyper = HostArray(len(param_groups) * len(HYPER_COLUMNS), torch.float64, (len(param_groups), len(HYPER_COLUMNS)))
    return with_late(*fill_hyper(hyper, param_groups, lambda tensor: None)).clone()


def adopt(value: Any, param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """State that is there already, in the math dtype and the parameter's memory order; zeros where there is none.

    Raises:
        ValueError: It has another shape than the parameter.
    """
    if value is None:
        return state_like(param, dtype)
    if not isinstance(value, torch.Tensor) or value.shape != param.shape:
        got = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise ValueError(
            f"optimizer state of a parameter of shape {list(param.shape)} must have that shape, got {got}."
        )
    like = state_like(param, dtype)
    if value.dtype == dtype and value.device == param.device and value.stride() == like.stride():
        return value
    return like.copy_(value)


def adopt_main_param(value: Any, param: torch.Tensor) -> torch.Tensor:
    """The fp32 main param of a low-precision parameter: the one that is there, else a copy of the parameter."""
    if value is not None:
        return adopt(value, param, torch.float32)
    return state_like(param, torch.float32).copy_(param.detach())


def follow_param(main_param: torch.Tensor, param: torch.Tensor) -> None:
    """Take over the elements of a parameter that somebody else wrote: those that are not the main param rounded."""
    ours = main_param.to(param.dtype) == param
    main_param.copy_(torch.where(ours, main_param, param.to(main_param.dtype)))


def needs_main_param(param: torch.Tensor, master_weights: bool) -> bool:
    return master_weights and param.dtype in (torch.float16, torch.bfloat16)


class RuleState:
    """State of a fused rule as the lists that ``update_`` takes; the tensors live in ``inner.state[param]``.

    Attributes:
        main_params, exp_avgs, exp_avg_sqs: One entry per active parameter, or no entries at all.
        steps: float32 [N]; ``state[param]["step"]`` is a view of it.
    """

    def __init__(
        self, inner: torch.optim.Optimizer, layout: Layout, rule: Rule, master_weights: bool, record: Any
    ) -> None:
        self.followed = False  # whether the main params were compared with their parameters since they were taken up
        self.steps = torch.zeros(len(layout.params), dtype=torch.float32, device=layout.device)
        self.main_params: list[torch.Tensor] = []
        self.exp_avgs: list[torch.Tensor] = []
        self.exp_avg_sqs: list[torch.Tensor] = []
        self.with_momentum = rule is not SGD or any(group.get("momentum") for group in inner.param_groups)
        wants_main = [needs_main_param(param, master_weights) for param in layout.params]
        for k, param in enumerate(layout.params):
            state = inner.state[param]
            dtype = math_dtype(param.dtype)
            if self.with_momentum:
                self._adopt_step(state, k, rule)
                self.exp_avgs.append(adopt(state.get(rule.exp_avg_key), param, dtype))
                state[rule.exp_avg_key] = self.exp_avgs[-1]
            if rule.exp_avg_sq_key is not None:
                self.exp_avg_sqs.append(adopt(state.get(rule.exp_avg_sq_key), param, dtype))
                state[rule.exp_avg_sq_key] = self.exp_avg_sqs[-1]
            if wants_main[k]:
                state[MAIN_PARAM] = adopt_main_param(state.get(MAIN_PARAM), param)
            if any(wants_main):
                self.main_params.append(state[MAIN_PARAM] if wants_main[k] else param.new_empty(0, dtype=torch.float32))
        self.entries = len(inner.state)
        self._record = record(inner.state)

    def is_in(self, inner: torch.optim.Optimizer) -> bool:
        """Whether ``inner.state`` still holds these tensors: nobody cleared it or put others in their place."""
        return self._record.holds(inner.state)

    def _adopt_step(self, state: dict[str, Any], k: int, rule: Rule) -> None:
        step = state.get(rule.step_key)
        if step is None and state.get(rule.exp_avg_key) is not None:
            step = 1.0  # a momentum buffer written by torch's SGD
        if step is not None:
            self.steps[k] = torch.as_tensor(step, dtype=torch.float32).reshape(())
        state[rule.step_key] = self.steps[k]
