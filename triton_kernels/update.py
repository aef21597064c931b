"""update_: the accumulated gradient times the multiplier, clipped by value, into parameters and state, in one launch.

Bytes per element (AdamW, bf16 parameter): reads the gradient, 12 of main param and moments; writes 12 + 2. Step counts,
hyper-parameters and the skip lie on the device. Formulas: torch.optim.AdamW, Adam, SGD; gradacc_fused.Lion. Twin:
csrc/cuda/update.cu with csrc/update_math.h, operation by operation.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..checks import HYPER_COLUMNS
from ._common import (
    ADDRESS,
    SLICE,
    add_micro_batches,
    all_aligned,
    last_program,
    load,
    narrowed,
    offsets_of,
    store,
    widened,
)

# A parameter's row: tagged address of the parameter (0: nothing to update), addresses of main grad, main param,
# exp_avg, exp_avg_sq (0: none), whether the math dtype is float64.
ROW = tl.constexpr(6)
COLUMNS = tl.constexpr(len(HYPER_COLUMNS))
LR, WEIGHT_DECAY, MAXIMIZE, BETA1, BETA2, EPS, MOMENTUM, DAMPENING, NESTEROV = (
    tl.constexpr(HYPER_COLUMNS.index(name))
    for name in (
        "lr", "weight_decay", "maximize", "beta1", "beta2", "eps", "momentum", "dampening", "nesterov",
    )
)  # fmt: skip


@triton.jit
def _whole_power(base, exponent):
    """``base`` to the power of a whole number, by squaring: the same bits on every device."""
    power = tl.full([], 1.0, tl.float64)
    left = exponent.to(tl.int64)
    while left > 0:
        if (left & 1) != 0:
            power = power * base
        base = base * base
        left = left >> 1
    return power


@triton.jit
def _divide(a, b, MATH: tl.constexpr):
    if MATH == tl.float32:
        return tl.div_rn(a, b)
    else:
        return a / b


@triton.jit
def _square_root(x, MATH: tl.constexpr):
    if MATH == tl.float32:
        return tl.sqrt_rn(x)
    else:
        return tl.sqrt(x)


@triton.jit
def _next_step(steps_ptr, hyper_ptr, group_ids_ptr, tensor, touched, RULE: tl.constexpr, BUFFER: tl.constexpr):
    """The step that touched tensors are at once this update is done, in float32."""
    step = tl.load(steps_ptr + tensor, mask=touched, other=0.0)
    if RULE != "sgd":
        step += 1.0
    elif BUFFER:
        group = tl.load(group_ids_ptr + tensor, mask=touched, other=0).to(tl.int64)
        momentum = tl.load(hyper_ptr + group * COLUMNS + MOMENTUM, mask=touched, other=0.0)
        step += (momentum != 0.0).to(tl.float32)
    return step


@triton.jit
def _update_slice(
    start, numel, tensor, row_ptr, hyper, step, addresses_ptr, weights_ptr, m, tensors, multiplier, bound,
    MATH: tl.constexpr, FULL: tl.constexpr, RULE: tl.constexpr, BUFFER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    param, main_grad, main_param = tl.load(row_ptr), tl.load(row_ptr + 1), tl.load(row_ptr + 2)
    exp_avg, exp_avg_sq = tl.load(row_ptr + 3), tl.load(row_ptr + 4)
    lr, weight_decay = tl.load(hyper + LR), tl.load(hyper + WEIGHT_DECAY)
    factor = multiplier.to(MATH) * tl.where(tl.load(hyper + MAXIMIZE) != 0.0, -1.0, 1.0).to(MATH)
    limit = bound.to(MATH)
    l2 = weight_decay != 0.0
    if RULE != "sgd":
        beta1, beta2 = tl.load(hyper + BETA1), tl.load(hyper + BETA2)
        one_minus_beta1, one_minus_beta2 = (1.0 - beta1).to(MATH), (1.0 - beta2).to(MATH)
        decay = (1.0 - lr * weight_decay).to(MATH)
        if RULE != "lion":
            correction2_sqrt = tl.sqrt(1.0 - _whole_power(beta2, step))
            eps = (tl.load(hyper + EPS) * correction2_sqrt).to(MATH)
            step_size = (lr * correction2_sqrt / (1.0 - _whole_power(beta1, step))).to(MATH)
            beta2_math = beta2.to(MATH)
    else:
        momentum = tl.load(hyper + MOMENTUM).to(MATH)
        kept = tl.where(step > 1.0, 1.0 - tl.load(hyper + DAMPENING), 1.0).to(MATH)
        nesterov = tl.load(hyper + NESTEROV) != 0.0
        buffered = momentum != 0.0
    for tile in range(0, SLICE if FULL else numel, BLOCK):
        offsets = offsets_of(start, tile, FULL, BLOCK)
        mask = offsets < start + numel
        grad = tl.zeros([BLOCK], MATH)
        if main_grad != 0:
            grad = load(main_grad, offsets, mask, MATH, FULL)
        if main_param != 0:
            value = load(main_param, offsets, mask, MATH, FULL)
        else:
            value = widened(param, offsets, mask, MATH, FULL)
        grad = add_micro_batches(grad, addresses_ptr, weights_ptr, m, tensors, tensor, offsets, mask, MATH, FULL)
        grad = grad * factor
        grad = tl.where(grad > limit, limit, grad)
        grad = tl.where(grad < -limit, -limit, grad)
        if RULE == "lion":
            first = load(exp_avg, offsets, mask, MATH, FULL)
            towards = grad - first
            direction = tl.fma(tl.full([BLOCK], one_minus_beta1, MATH), towards, first)
            first = tl.fma(tl.full([BLOCK], one_minus_beta2, MATH), towards, first)
            store(exp_avg, offsets, mask, first, MATH, FULL)
            sign = tl.where(direction > 0, 1.0, tl.where(direction < 0, -1.0, 0.0)).to(MATH)
            value = value * decay - lr.to(MATH) * sign
        elif RULE != "sgd":
            if RULE == "adamw":
                value = value * decay
            elif l2:
                grad = tl.fma(tl.full([BLOCK], weight_decay.to(MATH), MATH), value, grad)
            first = load(exp_avg, offsets, mask, MATH, FULL)
            second = load(exp_avg_sq, offsets, mask, MATH, FULL)
            first = tl.fma(tl.full([BLOCK], one_minus_beta1, MATH), grad - first, first)
            second = tl.fma(one_minus_beta2 * grad, grad, beta2_math * second)
            value = value - _divide(step_size * first, _square_root(second, MATH) + eps, MATH)
            store(exp_avg, offsets, mask, first, MATH, FULL)
            store(exp_avg_sq, offsets, mask, second, MATH, FULL)
        else:
            if l2:
                grad = tl.fma(tl.full([BLOCK], weight_decay.to(MATH), MATH), value, grad)
            if BUFFER:
                if buffered:
                    buffer = load(exp_avg, offsets, mask, MATH, FULL)
                    factors = tl.full([BLOCK], momentum, MATH)
                    buffer = tl.fma(factors, buffer, kept * grad)
                    store(exp_avg, offsets, mask, buffer, MATH, FULL)
                    grad = tl.where(nesterov, tl.fma(factors, buffer, grad), buffer)
            value = tl.fma(tl.full([BLOCK], -lr.to(MATH), MATH), grad, value)
        # By a mask: Triton 3.6 does not compile two conditional stores of the same values.
        there = tl.full([BLOCK], main_param != 0, tl.int1)
        pointer = main_param.to(tl.pointer_type(MATH))
        if FULL:
            tl.store(tl.multiple_of(pointer, 16) + offsets, value, mask=there)
        else:
            tl.store(pointer + offsets, value, mask=mask & there)
        narrowed(param, offsets, mask, value, FULL)


@triton.jit(
    do_not_specialize=["n_slices", "m", "tensors"],
    do_not_specialize_on_alignment=[
        "addresses_ptr", "weights_ptr", "hyper_ptr", "group_ids_ptr", "touched_ptr", "steps_ptr", "multiplier_ptr",
        "found_inf_ptr", "bound_ptr",
    ],
)  # fmt: skip
def update_kernel(
    slices_ptr, n_slices, rows_ptr, addresses_ptr, weights_ptr, m, tensors, hyper_ptr, group_ids_ptr, touched_ptr,
    steps_ptr, multiplier_ptr, found_inf_ptr, bound_ptr, counters_ptr, RULE: tl.constexpr, BUFFER: tl.constexpr,
    BLOCK: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """Every slice of every touched tensor; nothing where ``found_inf`` is set or the multiplier is not finite.

    Args:
        slices_ptr: int64 [n_slices, 3]: start, tensor, numel.
        rows_ptr: int64 [tensors, ROW].
        addresses_ptr: int64 [m, tensors].
        weights_ptr: float64 [m].
        hyper_ptr: float64 [groups, COLUMNS].
        bound_ptr: float64, bound of the gradient's elements; inf: none.
        counters_ptr: int32 [2], scratch, 0 between launches; the second counts the programs that are done.
    """
    multiplier = tl.load(multiplier_ptr).to(tl.float64)
    bound = tl.load(bound_ptr)
    if (tl.load(found_inf_ptr) == 0.0) & (tl.abs(multiplier) < float("inf")):
        for s in range(tl.program_id(0), n_slices, tl.num_programs(0)):
            place = slices_ptr + 3 * tl.cast(s, tl.int64)
            start, tensor, numel = tl.load(place), tl.load(place + 1), tl.load(place + 2)
            row_ptr = rows_ptr + ROW * tensor
            touched = tl.load(touched_ptr + tensor) != 0
            if touched:
                hyper = hyper_ptr + tl.load(group_ids_ptr + tensor).to(tl.int64) * COLUMNS
                step = _next_step(steps_ptr, hyper_ptr, group_ids_ptr, tensor, touched, RULE, BUFFER).to(tl.float64)
                arrays = tl.load(row_ptr) & ADDRESS
                for k in range(1, 5):
                    arrays |= tl.load(row_ptr + k)
                if tl.load(row_ptr + 5) != 0:
                    _update_slice(
                        start, numel, tensor, row_ptr, hyper, step, addresses_ptr, weights_ptr, m, tensors, multiplier,
                        bound, tl.float64, False, RULE, BUFFER, BLOCK,
                    )  # fmt: skip
                elif (numel == SLICE) & all_aligned(arrays, addresses_ptr, m, tensors, tensor):
                    _update_slice(
                        start, numel, tensor, row_ptr, hyper, step, addresses_ptr, weights_ptr, m, tensors, multiplier,
                        bound, tl.float32, True, RULE, BUFFER, BLOCK,
                    )  # fmt: skip
                else:
                    _update_slice(
                        start, numel, tensor, row_ptr, hyper, step, addresses_ptr, weights_ptr, m, tensors, multiplier,
                        bound, tl.float32, False, RULE, BUFFER, BLOCK,
                    )  # fmt: skip
        if last_program(counters_ptr + 1):
            for first in range(0, tensors, FOLD):
                tensor = first + tl.arange(0, FOLD)
                known = tensor < tensors
                touched = tl.load(touched_ptr + tensor, mask=known, other=0) != 0
                step = _next_step(steps_ptr, hyper_ptr, group_ids_ptr, tensor, touched, RULE, BUFFER)
                tl.store(steps_ptr + tensor, step, mask=touched)
            tl.atomic_xchg(counters_ptr + 1, 0)
