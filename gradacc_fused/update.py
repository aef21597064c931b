"""Stage 3, update: the accumulated gradient into parameters and optimizer state."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from . import _ops

_update = _ops.op("update_")


def update_(
    params: Sequence[torch.Tensor],
    main_params: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    steps: torch.Tensor,
    main_grads: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    weights: torch.Tensor,
    hyper: torch.Tensor,
    group_ids: torch.Tensor,
    touched: torch.Tensor,
    multiplier: torch.Tensor,
    found_inf: torch.Tensor,
    *,
    rule: str,
    max_grad_value: float = math.inf,
) -> None:
    """One pass: gather the gradient, times the multiplier, clipped by value, into moments, main params and params.

    The gradient of parameter i is ``main_grads[i]`` (or zero) plus ``weights[j] * grads[j*N + i]`` in order of j: what
    ``accumulate_`` would have stored, bit for bit. Formulas: torch.optim.AdamW, Adam, SGD; ``Lion``. Where
    ``found_inf`` is set or the multiplier is not finite, nothing is written.

    Args:
        params: N parameters, float32, float64, float16 or bfloat16. Written.
        main_params: N float32 copies of low-precision parameters, an empty tensor for a parameter without one; or none
            at all. Written.
        exp_avgs: N first moments in the math dtype; for sgd the momentum buffers, or none. Written.
        exp_avg_sqs: N second moments in the math dtype; for sgd and lion none. Written.
        steps: float32 [N], effective steps made (sgd: updates of the momentum buffer). Written: plus 1 where applied.
        main_grads: N accumulated gradients in the math dtype, or none where nothing was stored. Read only.
        grads: m*N gradients not stored yet, piece-major; empty tensor: absent. Read only.
        weights: float64 [m].
        hyper: float64 [groups, 9], see ``hyper_rows``. Read only.
        group_ids: int32 [N], the row of each parameter.
        touched: uint8 [N]; 0: the parameter had no gradient in this window and is left alone, state and step too.
        multiplier: one element, from ``clip_``.
        found_inf: one element, from ``accumulate_`` or ``norm_``.
        rule: "adamw", "adam", "sgd" or "lion".
        max_grad_value: Clip by value, in true units, after the multiplier (torch.nn.utils.clip_grad_value_).

    Raises:
        TypeError, ValueError: An argument is off; the message names it. Nothing was written.
    """
    with torch.no_grad():
        _update(
            params, main_params, exp_avgs, exp_avg_sqs, steps, main_grads, grads, weights, hyper, group_ids, touched,
            multiplier, found_inf, rule=rule, max_grad_value=max_grad_value,
        )  # fmt: skip
