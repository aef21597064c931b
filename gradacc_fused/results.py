"""StepResult: what a boundary did, as lazy device scalars. Reading one is the only host sync."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

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
        weight_sum: Sum of the weights: the denominator of the logical batch.
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
    host_scale: float = field(repr=False, default=1.0)

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
        """Loss over the logical batch (float64): mean losses times their weights, or the sums; None if not given."""
        if len(self.losses) != self.micro_batches or not self.losses:
            return None
        value = total([record.summed() for record in self.losses])
        return torch.as_tensor(value, dtype=torch.float64) / self.host_scale

    @property
    def loss_mean(self) -> torch.Tensor | None:
        """``loss_sum / weight_sum``: what the whole batch's loss is."""
        loss_sum = self.loss_sum
        return None if loss_sum is None else loss_sum / self.weight_sum.to(loss_sum.device)
