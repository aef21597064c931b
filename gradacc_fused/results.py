"""StepResult: what a boundary did, as lazy device scalars. Reading one is the only host sync."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Scalar = float | torch.Tensor


@dataclass
class LossRecord:
    """One micro-batch's loss as it was given, with what it counts for."""

    loss: Scalar
    weight: Scalar
    reduction: str

    def summed(self) -> float | torch.Tensor:
        """The micro-batch's share of loss_sum; a weight of 0 leaves the loss unread."""
        factor = self.weight if self.reduction == "mean" else 1.0
        if isinstance(self.loss, torch.Tensor) or isinstance(self.weight, torch.Tensor):
            loss = torch.as_tensor(self.loss, dtype=torch.float64)
            weight = torch.as_tensor(self.weight, dtype=torch.float64, device=loss.device)
            return torch.where(weight != 0, loss * factor, 0.0)
        return self.loss * factor if self.weight != 0 else 0.0


def total(values: list[Scalar]) -> Scalar | None:
    """The sum of what was given for every micro-batch; None if it was not given for any."""
    if not values:
        return None
    result = values[0]
    for value in values[1:]:
        result = result + value
    return result


@dataclass
class StepResult:
    """What one real step did. Tensors are 0-dim and on the parameters' device; reading one syncs with the device.

    Attributes:
        total_norm: Norm over all main grads in unscaled units, before clipping.
        clip_coef: ``min(1, max_norm / (total_norm + 1e-6))``.
        found_inf: 1 if a gradient that counts was not finite, else 0.
        multiplier: The one factor the update applied; NaN where nothing could be applied.
        weight_sum: Sum of the weights: the denominator of the logical batch. In a window with a plan the planned one,
            of the first term where they differ.
        lr: Learning rate of each group that the step used.
        micro_batches: Micro-batches in the window.
        samples: Samples in the window, where they were given, else None.
        tokens: Tokens in the window, where they were given, else None.
    """

    total_norm: torch.Tensor
    clip_coef: torch.Tensor
    found_inf: torch.Tensor
    multiplier: torch.Tensor
    weight_sum: torch.Tensor
    lr: tuple[Scalar, ...]
    micro_batches: int
    samples: Scalar | None
    tokens: Scalar | None
    losses: list[LossRecord] = field(repr=False)
    scale: float = field(repr=False, default=1.0)  # already on every loss: host_scale times the loss scale
    unit: float = field(repr=False, default=1.0)  # power of two already divided out of every loss
    term_losses: Mapping[str, Sequence[LossRecord]] = field(repr=False, default_factory=dict)
    batch: Any = field(repr=False, default=None)  # the declared terms, batch.denominators.LogicalBatch
    weights: Sequence[Scalar] = field(repr=False, default_factory=list)
    reductions: Sequence[str] = field(repr=False, default_factory=list)

    @property
    def skipped(self) -> bool:
        """Whether the step changed nothing: a non-finite gradient, or no weight at all. Syncs."""
        return bool(self.found_inf != 0) or not math.isfinite(float(self.multiplier))

    @property
    def effective_batch_size(self) -> Scalar | None:
        """Samples of the logical batch, where they were given: micro-batch size times steps, summed as it was."""
        return self.samples

    @property
    def loss_sum(self) -> torch.Tensor | None:
        """Loss over the logical batch (float64): mean losses times their weights, or the sums.

        None if it was not given, or its terms have different denominators (``terms`` has each).
        """
        mixed = self.batch is not None and len(set(self.batch.totals.values())) > 1
        return None if mixed else self._loss_sum()

    @property
    def loss_mean(self) -> torch.Tensor | None:
        """The whole batch's loss: ``loss_sum / weight_sum``, or the sum of the terms, each divided as declared."""
        loss_sum = self._loss_sum()
        return None if loss_sum is None else loss_sum / self.weight_sum.to(loss_sum.device)

    def _loss_sum(self) -> torch.Tensor | None:
        if len(self.losses) != self.micro_batches or not self.losses:
            return None
        value = total([record.summed() for record in self.losses])
        return torch.as_tensor(value, dtype=torch.float64) * (self.unit / self.scale)

    @property
    def terms(self) -> dict[str, torch.Tensor]:
        """Each declared loss term over the logical batch (float64), divided as declared, before its coefficient."""
        found = {}
        for name, records in self.term_losses.items():
            summed = torch.as_tensor(total([record.summed() for record in records]), dtype=torch.float64)
            known = self.batch.totals.get(name)
            divisor = self.weight_sum.to(summed.device) if known is None else known
            found[name] = summed * 0.0 if known == 0.0 else summed / divisor / self.scale
        return found
