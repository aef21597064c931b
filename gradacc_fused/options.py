"""The options of GradAccumOptimizer, checked once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real

WEIGHTINGS = ("equal", "given")


@dataclass(frozen=True)
class Options:
    """See GradAccumOptimizer for what each one means."""

    accumulation_steps: int | None = None
    weighting: str | None = None
    host_scale: float = 1.0
    max_grad_norm: float | None = None
    norm_type: float = 2.0
    max_grad_value: float | None = None
    master_weights: bool = True
    defer: int | str = "auto"
    defer_bytes: int | None = None
    on_nonfinite: str = "skip"
    backend: str | None = None

    def __post_init__(self) -> None:
        steps = self.accumulation_steps
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, Integral) or steps < 1):
            raise ValueError(f"GradAccumOptimizer: accumulation_steps must be a positive int or None, got {steps!r}.")
        if self.weighting is not None and self.weighting not in WEIGHTINGS:
            raise ValueError(f"GradAccumOptimizer: weighting must be 'equal' or 'given', got {self.weighting!r}.")
        if steps is not None and steps > 1 and self.weighting is None:
            raise ValueError(
                f"GradAccumOptimizer: accumulation_steps={steps} needs weighting, and nobody can guess it. 'equal': "
                "the mean of micro-batch means (right when all micro-batches are the same size); 'given': pass "
                "step(weight=<samples or active tokens of the micro-batch>), its loss being a mean."
            )
        if steps is None and self.weighting is not None:
            raise ValueError(
                f"GradAccumOptimizer: weighting={self.weighting!r} needs accumulation_steps. Without it every step() "
                "is a boundary; weigh micro-batches in opt.window() or opt.backward()."
            )
        self._check_positive("host_scale", self.host_scale)
        if math.isinf(self.host_scale):
            raise ValueError("GradAccumOptimizer: host_scale must be a positive finite number, got inf.")
        for name in ("max_grad_norm", "max_grad_value"):
            value = getattr(self, name)
            if value is not None:
                self._check_positive(name, value)
        if self.norm_type not in (2, 2.0, math.inf):
            raise ValueError(f"GradAccumOptimizer: norm_type must be 2 or inf, got {self.norm_type!r}.")
        if self.on_nonfinite not in ("skip", "raise"):
            raise ValueError(f"GradAccumOptimizer: on_nonfinite must be 'skip' or 'raise', got {self.on_nonfinite!r}.")
        if self.defer != "auto" and (
            isinstance(self.defer, bool) or not isinstance(self.defer, Integral) or self.defer < 1
        ):
            raise ValueError(f"GradAccumOptimizer: defer must be a positive int or 'auto', got {self.defer!r}.")
        if self.defer_bytes is not None:
            if isinstance(self.defer_bytes, bool) or not isinstance(self.defer_bytes, Integral) or self.defer_bytes < 0:
                raise ValueError(f"GradAccumOptimizer: defer_bytes must be an int >= 0, got {self.defer_bytes!r}.")
            if self.defer != "auto":
                raise ValueError(
                    f"GradAccumOptimizer: defer_bytes is the budget of defer='auto', but defer is {self.defer!r}."
                )

    @staticmethod
    def _check_positive(name: str, value: float) -> None:
        if isinstance(value, bool) or not isinstance(value, Real) or not value > 0:
            raise ValueError(f"GradAccumOptimizer: {name} must be a positive number, got {value!r}.")

    @property
    def max_norm(self) -> float:
        return math.inf if self.max_grad_norm is None else float(self.max_grad_norm)

    @property
    def max_value(self) -> float:
        return math.inf if self.max_grad_value is None else float(self.max_grad_value)
