"""Argument checks of the ops in Python: what the reference and the fakes run. csrc/checks.h words the same in C++."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .errors import dtype_name, item_name
from .layout import GRADIENT_DTYPES, math_dtype, n_partials

HYPER_COLUMNS = ("lr", "weight_decay", "maximize", "beta1", "beta2", "eps", "momentum", "dampening", "nesterov")
RULES = ("adamw", "adam", "sgd", "lion")
Tensors = Sequence[torch.Tensor]


def shape_text(tensor: torch.Tensor) -> str:
    return str(list(tensor.shape))


def check_cells(op: str, argument: str, tensor: torch.Tensor, dtype: torch.dtype, numel: int) -> None:
    if tensor.dtype != dtype:
        raise TypeError(f"{op}: {argument} must be {dtype_name(dtype)}, got {dtype_name(tensor.dtype)}.")
    if tensor.numel() < numel or not tensor.is_contiguous():
        raise ValueError(f"{op}: {argument} must be contiguous with at least {numel} elements, got {tensor.numel()}.")


def check_cell(op: str, argument: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{op}: {argument} must be float32 or float64, got {dtype_name(tensor.dtype)}.")
    if tensor.numel() != 1:
        raise ValueError(f"{op}: {argument} must have one element, got {tensor.numel()}.")


def check_norm_type(op: str, norm_type: float) -> None:
    if norm_type not in (2.0, math.inf):
        raise ValueError(f"{op}: norm_type must be 2 or inf, got {norm_type:g}.")


def check_length(op: str, argument: str, length: int, count: int, optional: bool) -> None:
    if length != count and not (optional and length == 0):
        none = ", or none" if optional else ""
        raise ValueError(f"{op}: {argument} must have {count} tensors, one per parameter{none}, got {length}.")


def check_shape(op: str, argument: str, index: int, tensor: torch.Tensor, like: torch.Tensor) -> None:
    if tensor.shape != like.shape:
        raise ValueError(
            f"{item_name(op, argument, index)} must have shape {shape_text(like)}, got {shape_text(tensor)}. "
            "Give an empty tensor where there is none."
        )


def check_math_dtype(op: str, argument: str, index: int, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        raise TypeError(
            f"{item_name(op, argument, index)} must be {dtype_name(dtype)}, got {dtype_name(tensor.dtype)}. The math "
            "dtype is float64 for float64 parameters, float32 for all others."
        )


def check_device(op: str, argument: str, index: int, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(
            f"{item_name(op, argument, index)} must be on {device}, got {tensor.device}. All tensors of one call live "
            "on one device."
        )


def check_gradient(op: str, index: int, grad: torch.Tensor) -> None:
    if grad.layout != torch.strided:
        raise ValueError(
            f"{item_name(op, 'grads', index)} must be dense, got a sparse tensor. Call .to_dense() on it first."
        )
    if grad.dtype not in GRADIENT_DTYPES:
        raise TypeError(
            f"{item_name(op, 'grads', index)} must be float32, float64, float16 or bfloat16, got "
            f"{dtype_name(grad.dtype)}."
        )


def check_gradient_arguments(
    op: str, main_grads: Tensors, grads: Tensors, weights: torch.Tensor, read_main_grads: bool, like: Tensors | None
) -> int:
    """Check what accumulate_ and update_ share; returns the number of parameters."""
    if weights.dtype != torch.float64:
        raise TypeError(f"{op}: weights must be float64, got {dtype_name(weights.dtype)}.")
    if weights.dim() != 1 or not weights.is_contiguous():
        raise ValueError(
            f"{op}: weights must be a contiguous 1-d tensor with one weight per micro-batch, got shape "
            f"{shape_text(weights)} on {weights.device}."
        )
    m = weights.numel()
    listed = len(grads) // m if not main_grads and m > 0 else len(main_grads)
    count = listed if like is None else len(like)
    check_length(op, "main_grads", len(main_grads), count, optional=not read_main_grads)
    if len(grads) != m * count:
        raise ValueError(
            f"{op}: grads must have {m * count} tensors ({m} micro-batches of {count} parameters, piece-major), got "
            f"{len(grads)}."
        )
    device: torch.device | None = None
    for i in range(count):
        present = [grads[j * count + i] for j in range(m) if grads[j * count + i].numel() > 0]
        shape = like[i] if like is not None else main_grads[i] if main_grads else present[0] if present else None
        if shape is None:
            continue
        device = device or shape.device
        check_device(op, "params" if like is not None else "main_grads" if main_grads else "grads", i, shape, device)
        if main_grads:
            check_device(op, "main_grads", i, main_grads[i], device)
            check_shape(op, "main_grads", i, main_grads[i], shape)
            if like is not None:
                check_math_dtype(op, "main_grads", i, main_grads[i], math_dtype(shape.dtype))
            elif main_grads[i].dtype not in (torch.float32, torch.float64):
                raise TypeError(
                    f"{item_name(op, 'main_grads', i)} must be float32 or float64, got "
                    f"{dtype_name(main_grads[i].dtype)}. Allocate it in the math dtype."
                )
        for j in range(m):
            grad = grads[j * count + i]
            if grad.numel() == 0 or shape.numel() == 0:
                continue
            check_gradient(op, j * count + i, grad)
            check_device(op, "grads", j * count + i, grad, device)
            check_shape(op, "grads", j * count + i, grad, shape)
    return count


def check_accumulate(
    op: str,
    main_grads: Tensors,
    grads: Tensors,
    weights: torch.Tensor,
    partials: torch.Tensor,
    found_inf: torch.Tensor,
    overwrite: bool,
    store: bool,
    norm_type: float,
) -> int:
    count = check_gradient_arguments(op, main_grads, grads, weights, not overwrite, None)
    if store and not main_grads and count:
        raise ValueError(f"{op}: store=True needs main_grads to write to, got none. Pass them, or store=False.")
    check_norm_type(op, norm_type)
    if partials.numel() > 0:
        tensors = main_grads or [
            next((g for g in grads[i::count] if g.numel() > 0), grads[i]) for i in range(count if grads else 0)
        ]
        check_cells(op, "partials", partials, torch.float64, n_partials(tensors) if tensors else 0)
        check_cell(op, "found_inf", found_inf)
    return count


def check_norm(main_grads: Tensors, partials: torch.Tensor, found_inf: torch.Tensor, norm_type: float) -> None:
    if partials.numel() == 0:
        raise ValueError(
            "norm_: partials must have one element per chunk, got none. Allocate n_partials(main_grads) of them."
        )
    no_weights = torch.empty(0, dtype=torch.float64)
    check_accumulate("norm_", main_grads, [], no_weights, partials, found_inf, False, False, norm_type)


def check_clip(
    partials: torch.Tensor,
    counts: torch.Tensor,
    cells: dict[str, torch.Tensor],
    norm_type: float,
    max_norm: float,
) -> None:
    check_norm_type("clip_", norm_type)
    if not max_norm > 0.0:
        raise ValueError(f"clip_: max_norm must be positive (inf: no clipping), got {max_norm:g}.")
    check_cells("clip_", "partials", partials, torch.float64, 0)
    check_cells("clip_", "counts", counts, torch.float64, 0)
    for name, cell in cells.items():
        check_cell("clip_", name, cell)


def check_group_ids(group_ids: torch.Tensor, hyper: torch.Tensor) -> None:
    """The rows exist; reads values."""
    for index, group in enumerate(group_ids.tolist()):
        if not 0 <= group < hyper.shape[0]:
            raise ValueError(
                f"{item_name('update_', 'group_ids', index)} must name a row of hyper ({hyper.shape[0]} rows), got "
                f"{group}."
            )


def check_update(
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
    rule: str,
    max_grad_value: float,
) -> None:
    if rule not in RULES:
        raise ValueError(f"update_: rule must be adamw, adam, sgd or lion, got '{rule}'.")
    count = len(params)
    check_length("update_", "main_params", len(main_params), count, optional=True)
    check_length("update_", "exp_avgs", len(exp_avgs), count, optional=rule == "sgd")
    check_length("update_", "exp_avg_sqs", len(exp_avg_sqs), count if rule in ("adamw", "adam") else 0, optional=False)
    check_cells("update_", "steps", steps, torch.float32, count)
    check_cells("update_", "group_ids", group_ids, torch.int32, count)
    check_cells("update_", "touched", touched, torch.uint8, count)
    check_cells("update_", "hyper", hyper, torch.float64, 0)
    if hyper.dim() != 2 or hyper.shape[1] != len(HYPER_COLUMNS):
        raise ValueError(
            f"update_: hyper must have shape [groups, {len(HYPER_COLUMNS)}], got {shape_text(hyper)}. Build it with "
            "hyper_rows()."
        )
    if not max_grad_value > 0.0:
        raise ValueError(f"update_: max_grad_value must be positive (inf: none), got {max_grad_value:g}.")
    check_cell("update_", "multiplier", multiplier)
    check_cell("update_", "found_inf", found_inf)
    check_gradient_arguments("update_", main_grads, grads, weights, bool(main_grads), params)
    for i, param in enumerate(params):
        if param.dtype not in GRADIENT_DTYPES:
            raise TypeError(
                f"{item_name('update_', 'params', i)} must be float32, float64, float16 or bfloat16, got "
                f"{dtype_name(param.dtype)}."
            )
        for name, tensors in (("main_params", main_params), ("exp_avgs", exp_avgs), ("exp_avg_sqs", exp_avg_sqs)):
            if not tensors or (name == "main_params" and tensors[i].numel() == 0):
                continue
            check_device("update_", name, i, tensors[i], param.device)
            check_shape("update_", name, i, tensors[i], param)
            check_math_dtype("update_", name, i, tensors[i], math_dtype(param.dtype))
