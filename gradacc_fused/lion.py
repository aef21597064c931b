"""Lion in plain torch, which has none of its own: the inner optimizer that the fused rule takes over."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

DEFAULTS = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0, "maximize": False}


def _check(group: dict[str, Any]) -> None:
    lr = group["lr"]
    if isinstance(lr, torch.Tensor) and lr.numel() != 1:
        raise ValueError(f"Lion: lr must be a number or a tensor of one element, got shape {list(lr.shape)}.")
    for name in ("lr", "weight_decay"):
        if not group[name] >= 0.0:
            raise ValueError(f"Lion: {name} must be at least 0, got {group[name]}.")
    betas = group["betas"]
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"Lion: betas must be two numbers from 0 to below 1, got {betas}.")


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2).

    With the gradient g (its negative when maximizing) and the momentum m, kept in ``state[param]["exp_avg"]``::

        c = beta1 * m + (1 - beta1) * g
        param = param * (1 - lr * weight_decay) - lr * sign(c)
        m = beta2 * m + (1 - beta2) * g

    Every element moves by lr, so lr wants to be 3 to 10 times smaller, and the decay as much larger, than AdamW's.

    Args:
        params: Parameters or groups, as every torch optimizer takes them; real floating dtypes.
        lr: Learning rate, a float or a tensor of one element.
        betas: The share of the momentum in the direction, and in the momentum that is kept.
        weight_decay: Decoupled: the parameter shrinks by lr * weight_decay.
        maximize: Follow the gradient instead of its negative.

    Raises:
        ValueError: A value is out of its range.
        TypeError: A parameter is complex.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its options are checked like the constructor's."""
        _check({**self.defaults, **param_group})
        given = param_group["params"]
        params = [given] if isinstance(given, torch.Tensor) else list(given)  # may be an iterator
        for index, param in enumerate(params):
            param = param[1] if isinstance(param, tuple) else param  # (name, parameter)
            if isinstance(param, torch.Tensor) and not param.is_floating_point():
                raise TypeError(
                    f"Lion: params[{index}] must be of a real floating dtype, got {param.dtype}: nothing else has "
                    "a sign."
                )
        super().add_param_group({**param_group, "params": params})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # of other implementations
            for name, value in DEFAULTS.items():
                group.setdefault(name, value)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on the parameters that have a ``.grad``; returns what the closure returned.

        Raises:
            RuntimeError: A gradient is sparse; nothing was changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for number, group in enumerate(self.param_groups):
            for index, param in enumerate(group["params"]):
                if param.grad is not None and param.grad.is_sparse:
                    raise RuntimeError(
                        f"Lion: the gradient of param_groups[{number}]['params'][{index}] must be dense, got a sparse "
                        "tensor. Give the embedding sparse=False."
                    )
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                self._step_group(group, params)
        return loss

    def _step_group(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        for param in params:
            state = self.state[param]
            if "exp_avg" not in state:
                state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["step"] = state.get("step", torch.zeros((), dtype=torch.float32)) + 1
        exp_avgs = [self.state[param]["exp_avg"] for param in params]
        grads = [param.grad for param in params if param.grad is not None]
        if group["maximize"]:
            grads = list(torch._foreach_neg(grads))
        lr, (beta1, beta2) = group["lr"], group["betas"]
        lr = lr.reshape(()) if isinstance(lr, torch.Tensor) else lr
        if group["weight_decay"] != 0:
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        directions = torch._foreach_lerp(exp_avgs, grads, 1 - beta1)
        torch._foreach_lerp_(exp_avgs, grads, 1 - beta2)
        torch._foreach_sign_(directions)
        torch._foreach_mul_(directions, -lr)
        torch._foreach_add_(params, directions)
