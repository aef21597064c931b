"""Stage 2, clip: the norm, the clip coefficient and the one multiplier the update applies."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from . import _ops

_norm = _ops.op("norm_")
_clip = _ops.op("clip_")


def norm_(
    main_grads: Sequence[torch.Tensor],
    partials: torch.Tensor,
    found_inf: torch.Tensor,
    *,
    norm_type: float = 2.0,
) -> None:
    """The norm as a stage of its own, for when something reads or reduces the main grads before the update.

    Each element is widened to float64 before it is squared; each chunk has 16 lanes folded in a fixed order, so the
    bits do not depend on threads or instruction set.

    Args:
        main_grads: N tensors, float32 or float64. Read only.
        partials: float64, at least ``n_partials(main_grads)`` long. Written, see ``accumulate_``.
        found_inf: one float32 element. Written: 1 if any element is not finite, else 0.
        norm_type: 2 or inf.

    Raises:
        TypeError, ValueError: An argument is off; the message names it. Nothing was written.
    """
    _norm(main_grads, partials, found_inf, norm_type=norm_type)


def clip_(
    partials: torch.Tensor,
    counts: torch.Tensor,
    loss_scale: torch.Tensor,
    total_norm: torch.Tensor,
    clip_coef: torch.Tensor,
    multiplier: torch.Tensor,
    weight_sum: torch.Tensor,
    *,
    norm_type: float = 2.0,
    max_norm: float = math.inf,
) -> None:
    """Fold partials into the norm and everything that scales the gradient into one multiplier, on the device.

    With ``denominator = sum(counts) * loss_scale``:
    ``total_norm = norm(partials) / |denominator|``,
    ``clip_coef = min(1, max_norm / (total_norm + 1e-6))`` (torch.nn.utils.clip_grad_norm_; 1 where the norm is 0),
    ``multiplier = clip_coef / denominator``. The multiplier is NaN, which makes ``update_`` skip, where the denominator
    is 0 or not finite, and where a norm that is to be clipped is not finite.

    Args:
        partials: float64, from ``accumulate_`` or ``norm_``. Read only.
        counts: float64, what each micro-batch adds to the denominator, on the host or the device. Read only.
        loss_scale: one element, float32 or float64: the factor already on every loss. Read only.
        total_norm: one element, float32 or float64. Written, in unscaled units, before clipping.
        clip_coef: one element. Written.
        multiplier: one element, best float64. Written.
        weight_sum: one element, best float64. Written: sum(counts).
        norm_type: 2 or inf, as it was for the partials.
        max_norm: Clipping threshold; inf: no clipping.

    Raises:
        TypeError, ValueError: An argument is off; the message names it. Nothing was written.
    """
    _clip(
        partials, counts, loss_scale, total_norm, clip_coef, multiplier, weight_sum, norm_type=norm_type,
        max_norm=max_norm,
    )  # fmt: skip
