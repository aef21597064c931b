"""The reference backend: plain PyTorch, any device, nothing compiled. The fallback, the oracle, the bench baseline.

Branch-free and without a host sync. Computes in the math dtype, or in float64 throughout with ``math=torch.float64``
(then main grads and state are float64 tensors too). torch has no portable fused multiply-add, so it is within one
unit in the last place per operation of the compiled backends.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import torch

from .. import _ops, checks
from ..collector import Collector, StateRecord
from ..layout import CHUNK, math_dtype
from .ops_path import OpsPath

__all__ = [
    "Collector", "StateRecord", "accumulate_", "clip_", "host_value", "hot_path", "norm_", "unavailable_reason",
    "update_",
]  # fmt: skip

Tensors = Sequence[torch.Tensor]
COLUMN = {name: number for number, name in enumerate(checks.HYPER_COLUMNS)}


def unavailable_reason() -> str | None:
    return None


def host_value(tensor: torch.Tensor) -> float | None:
    """The value of a scalar if it can be had without an operator call: never, here."""
    return None


def hot_path(params: Tensors, group_ids: torch.Tensor, device: torch.device) -> OpsPath:
    """The optimizer's way into these ops."""
    return OpsPath(sys.modules[__name__], params, group_ids, device)


def _memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as a 1-d tensor in the order they lie in memory."""
    dims = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(dims).reshape(-1)


def gathered_gradient(
    main_grad: torch.Tensor | None, pieces: Tensors, weights: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor | None:
    """main_grad (or zero) plus the weighted pieces, in order; a weight of 0 selects nothing, not 0 * x."""
    total = None if main_grad is None else main_grad.to(dtype)
    for j, piece in enumerate(pieces):
        if piece.numel() == 0:
            continue
        if total is None:
            total = torch.zeros_like(piece, dtype=dtype)
        weight = weights[j].to(device=piece.device)
        total = torch.where(weight != 0, total + piece.to(dtype) * weight.to(dtype), total)
    return total


def _fill_partials(totals: Sequence[torch.Tensor | None], partials: torch.Tensor, norm_type: float) -> None:
    values = []
    for total in totals:
        if total is None or total.numel() == 0:
            continue
        for chunk in _memory_order(total.to(torch.float64)).split(CHUNK):
            values.append(chunk.square().sum() if norm_type == 2.0 else chunk.abs().amax())
    partials.zero_()
    if values:
        partials[: len(values)].copy_(torch.stack(values))


def _fill_found_inf(totals: Sequence[torch.Tensor | None], found_inf: torch.Tensor) -> None:
    found_inf.zero_()
    for total in totals:
        if total is not None and total.numel() > 0:
            found_inf.copy_(torch.maximum(found_inf, (~torch.isfinite(total)).any().to(found_inf.dtype)))


def accumulate_(
    main_grads: Tensors,
    grads: Tensors,
    weights: torch.Tensor,
    partials: torch.Tensor,
    found_inf: torch.Tensor,
    *,
    overwrite: bool,
    store: bool,
    norm_type: float,
    math: torch.dtype | None = None,
) -> None:
    """See gradacc_fused.accumulate.accumulate_."""
    count = checks.check_accumulate(
        "accumulate_", main_grads, grads, weights, partials, found_inf, overwrite, store, norm_type
    )  # fmt: skip
    _accumulate(main_grads, grads, weights, partials, found_inf, overwrite, store, norm_type, count, math)


def _accumulate(main_grads, grads, weights, partials, found_inf, overwrite, store, norm_type, count, math):
    totals = []
    for i in range(count):
        pieces = grads[i::count]
        dtype = math or math_dtype((main_grads[i] if main_grads else _first_present(pieces)).dtype)
        total = gathered_gradient(None if overwrite else main_grads[i], pieces, weights, dtype)
        if total is None and main_grads:
            total = torch.zeros_like(main_grads[i])
        if store and total is not None:
            main_grads[i].copy_(total)
        totals.append(total)
    if partials.numel() > 0:
        _fill_partials(totals, partials, norm_type)
        _fill_found_inf(totals, found_inf)


def _first_present(pieces: Tensors) -> torch.Tensor:
    return next((piece for piece in pieces if piece.numel() > 0), pieces[0])


def norm_(main_grads: Tensors, partials: torch.Tensor, found_inf: torch.Tensor, *, norm_type: float) -> None:
    """See gradacc_fused.clip.norm_."""
    checks.check_norm(main_grads, partials, found_inf, norm_type)
    no_weights = torch.empty(0, dtype=torch.float64)
    _accumulate(main_grads, [], no_weights, partials, found_inf, False, False, norm_type, len(main_grads), None)


def clip_(
    partials: torch.Tensor,
    counts: torch.Tensor,
    loss_scale: torch.Tensor,
    total_norm: torch.Tensor,
    clip_coef: torch.Tensor,
    multiplier: torch.Tensor,
    weight_sum: torch.Tensor,
    *,
    norm_type: float,
    max_norm: float,
) -> None:
    """See gradacc_fused.clip.clip_."""
    cells = {
        "loss_scale": loss_scale, "total_norm": total_norm, "clip_coef": clip_coef, "multiplier": multiplier,
        "weight_sum": weight_sum,
    }  # fmt: skip
    checks.check_clip(partials, counts, cells, norm_type, max_norm)
    device = partials.device
    total = counts.to(device).sum()
    denominator = total * loss_scale.to(device=device, dtype=torch.float64).reshape(())
    zero = denominator == 0
    folded = partials.sum().sqrt() if norm_type == 2.0 else partials.amax() if partials.numel() else partials.sum()
    norm = torch.where(zero, 0.0, folded / denominator.abs())
    clips = math.isfinite(max_norm)
    coefficient = (
        torch.where(norm > 0, (max_norm / (norm + 1e-6)).clamp(max=1.0), 1.0) if clips else torch.ones_like(norm)
    )
    factor = coefficient / denominator
    # The update's math may be fp32: a factor beyond it would not be finite there.
    usable = torch.isfinite(denominator) & torch.isfinite(factor.to(torch.float32))
    if clips:
        usable = usable & torch.isfinite(norm)
    total_norm.copy_(norm.reshape(total_norm.shape))
    clip_coef.copy_(coefficient.reshape(clip_coef.shape))
    multiplier.copy_(torch.where(usable, factor, math.nan).reshape(multiplier.shape))
    weight_sum.copy_(total.reshape(weight_sum.shape))


def update_(
    params: Tensors,
    main_params: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    steps: torch.Tensor,
    main_grads: Tensors,
    grads: Tensors,
    weights: torch.Tensor,
    hyper: torch.Tensor,
    group_ids: torch.Tensor,
    touched: torch.Tensor,
    multiplier: torch.Tensor,
    found_inf: torch.Tensor,
    *,
    rule: str,
    max_grad_value: float,
    math: torch.dtype | None = None,
) -> None:
    """See gradacc_fused.update.update_. Written branch by branch from the formulas of torch.optim's documentation."""
    checks.check_update(
        params, main_params, exp_avgs, exp_avg_sqs, steps, main_grads, grads, weights, hyper, group_ids, touched,
        multiplier, found_inf, rule, max_grad_value,
    )  # fmt: skip
    count = len(params)
    if count == 0:
        return
    device = params[0].device
    if device.type == "cpu":  # elsewhere it would cost a sync
        checks.check_group_ids(group_ids[:count], hyper)
    factor = multiplier.to(device).reshape(())
    applied = (touched[:count].to(device) != 0) & (found_inf.to(device).reshape(()) == 0) & torch.isfinite(factor)
    rows = hyper.to(device)[group_ids[:count].to(device).long()]
    counted = applied & (rows[:, COLUMN["momentum"]] != 0) & bool(exp_avgs) if rule == "sgd" else applied
    steps[:count].add_(counted.to(steps.dtype))
    for i, param in enumerate(params):
        dtype = math or math_dtype(param.dtype)
        main_param = main_params[i] if main_params and main_params[i].numel() > 0 else param
        gathered = gathered_gradient(main_grads[i] if main_grads else None, grads[i::count], weights, dtype)
        grad = torch.zeros_like(param, dtype=dtype) if gathered is None else gathered
        grad = (grad * factor.to(dtype)).clamp(-max_grad_value, max_grad_value)
        row = {name: rows[i, column] for name, column in COLUMN.items()}
        old = main_param.to(dtype)
        if rule == "lion":
            new, state = _lion(old, grad, exp_avgs[i], row)
        elif rule == "sgd":
            buffer = exp_avgs[i] if exp_avgs else None
            new, state = _sgd(old, grad, buffer, row, steps[i])
        else:
            new, state = _adam(old, grad, exp_avgs[i], exp_avg_sqs[i], row, steps[i], rule == "adamw")
        new = torch.where(applied[i], new, old)
        for target, value in state:
            target.copy_(torch.where(applied[i], value, target))
        if main_param is not param:
            main_param.copy_(new)
        param.copy_(torch.where(applied[i], new.to(param.dtype), param))


State = list[tuple[torch.Tensor, torch.Tensor]]


def _decayed(grad: torch.Tensor, param: torch.Tensor, weight_decay: torch.Tensor) -> torch.Tensor:
    """L2 decay; without one the parameter is not read: 0 * inf would be NaN."""
    return torch.where(weight_decay != 0, grad + weight_decay * param, grad)


def _adam(param, grad, exp_avg, exp_avg_sq, row, step, decoupled):
    dtype = param.dtype
    step = step.to(torch.float64)
    grad = torch.where(row["maximize"] != 0, -grad, grad)
    if decoupled:
        param = param * (1 - row["lr"] * row["weight_decay"]).to(dtype)
    else:
        grad = _decayed(grad, param, row["weight_decay"].to(dtype))
    new_exp_avg = exp_avg + (1 - row["beta1"]).to(dtype) * (grad - exp_avg)
    new_exp_avg_sq = row["beta2"].to(dtype) * exp_avg_sq + (1 - row["beta2"]).to(dtype) * grad * grad
    step_size = (row["lr"] / (1 - row["beta1"] ** step)).to(dtype)
    bias_correction2_sqrt = (1 - row["beta2"] ** step).sqrt().to(dtype)
    denominator = new_exp_avg_sq.sqrt() / bias_correction2_sqrt + row["eps"].to(dtype)
    return param - step_size * new_exp_avg / denominator, [(exp_avg, new_exp_avg), (exp_avg_sq, new_exp_avg_sq)]


def _lion(param, grad, exp_avg, row):
    dtype = param.dtype
    grad = torch.where(row["maximize"] != 0, -grad, grad)
    direction = exp_avg + (1 - row["beta1"]).to(dtype) * (grad - exp_avg)
    new_exp_avg = exp_avg + (1 - row["beta2"]).to(dtype) * (grad - exp_avg)
    param = param * (1 - row["lr"] * row["weight_decay"]).to(dtype)
    return param - row["lr"].to(dtype) * direction.sign(), [(exp_avg, new_exp_avg)]


def _sgd(param, grad, buffer, row, step):
    dtype = param.dtype
    grad = _decayed(torch.where(row["maximize"] != 0, -grad, grad), param, row["weight_decay"].to(dtype))
    state: State = []
    if buffer is not None:
        momentum = row["momentum"].to(dtype)
        kept = torch.where(step > 1, 1 - row["dampening"], torch.ones_like(row["dampening"])).to(dtype)
        new_buffer = momentum * buffer + kept * grad
        direction = torch.where(row["nesterov"] != 0, grad + momentum * new_buffer, new_buffer)
        grad = torch.where(momentum != 0, direction, grad)
        state.append((buffer, torch.where(momentum != 0, new_buffer, buffer)))
    return param - row["lr"].to(dtype) * grad, state


for _function in (accumulate_, norm_, clip_, update_):
    _ops.register_reference(_function.__name__, _function)
