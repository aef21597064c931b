"""The Triton backend: the checks of the reference, then one launch per op."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from .. import checks, collector
from ..layout import dense_strides, math_dtype
from . import cpu
from .device_path import DevicePath

Tensors = Sequence[torch.Tensor]
_compiled = cpu.unavailable_reason() is None
Collector: Any = cpu.Collector if _compiled else collector.Collector
StateRecord: Any = cpu.StateRecord if _compiled else collector.StateRecord
PER_PROCESSOR = 8  # programs of the grid that stays
FOLD = 128


def blocks(hip: bool) -> tuple[int, int]:
    """Elements of a tile, in accumulate and in update: 8 and 4 for each thread of 4 warps, more spill.

    The update has more arrays. 4 elements of fp32 are a 128-bit access.
    """
    threads = 4 * (64 if hip else 32)
    return 8 * threads, 4 * threads


def options(hip: bool) -> dict[str, Any]:
    """Of a launch. Left to itself, ptxas spills registers for one more block of some of the kernels (sm_100)."""
    return {"num_warps": 4, "enable_fp_fusion": False} | ({} if hip else {"maxnreg": 144})


OPTIONS = options(torch.version.hip is not None)
BLOCK, UPDATE_BLOCK = blocks(torch.version.hip is not None)


def unavailable_reason() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed. Install a CUDA or ROCm build of torch, which brings it."
    if not torch.cuda.is_available():
        return "there is no usable GPU: torch.cuda.is_available() is False. Check the driver with nvidia-smi."
    try:
        importlib.import_module("gradacc_fused.triton_kernels.update")
    except Exception as error:  # a Triton that is broken or too old says so in many ways
        return f"the installed Triton does not take the kernels ({type(error).__name__}: {error}). 3.6 and 3.8 do."
    return None


def host_value(tensor: torch.Tensor) -> float | None:
    """The value of a scalar in host memory; None for other devices."""
    if tensor.device.type != "cpu":
        return None
    return cpu.host_value(tensor) if _compiled else float(tensor)


def hot_path(params: Tensors, group_ids: torch.Tensor, device: torch.device) -> DevicePath:
    """The optimizer's way into these ops."""
    return DevicePath(sys.modules[__name__], params, group_ids, device)


# -- arguments -----------------------------------------------------------------------------------------------------


def _guard(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def programs(device: torch.device, slices: int) -> int:
    """How many programs walk over the slices."""
    if device.type != "cuda":
        return 1
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(slices, PER_PROCESSOR * processors))


def _on(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.device == device else tensor.to(device, non_blocking=True)


@dataclass
class _Sources:
    """Gradients as a launch reads them: int64 [m, tensors] and float64 [m], on the device."""

    addresses: torch.Tensor
    weights: torch.Tensor
    m: int


def _sources(tables: Any, grads: Tensors, weights: torch.Tensor, strides: Sequence[Any], dense: Any) -> _Sources:
    from ..triton_kernels._tables import bits_of, tagged

    m, count = weights.numel(), len(strides)
    on_host = weights.device.type == "cpu"
    values = weights.tolist() if on_host else [1.0] * m
    stream = torch.cuda.current_stream() if any(grad.is_cuda for grad in grads) else None
    words: list[int] = []
    for k, grad in enumerate(grads):
        counts = grad.numel() > 0 and strides[k % count] is not None and values[k // count] != 0.0
        if counts and stream is not None:
            grad.record_stream(stream)
        words.append(tagged(dense.read(grad, strides[k % count])) if counts else 0)
    # In tables of their own: weights change where addresses do not.
    return _Sources(tables.of(tuple(words)), tables.of(bits_of(values)).view(torch.float64) if on_host else weights, m)


def _device_of(*lists: Tensors) -> torch.device:
    return next((tensor.device for tensors in lists for tensor in tensors if tensor.numel() > 0), torch.device("cpu"))


# -- ops -----------------------------------------------------------------------------------------------------------


def accumulate_(
    main_grads: Tensors, grads: Tensors, weights: torch.Tensor, partials: torch.Tensor, found_inf: torch.Tensor, *,
    overwrite: bool, store: bool, norm_type: float,
) -> None:  # fmt: skip
    """See gradacc_fused.accumulate.accumulate_."""
    count = checks.check_accumulate(
        "accumulate_", main_grads, grads, weights, partials, found_inf, overwrite, store, norm_type
    )  # fmt: skip
    _accumulate(main_grads, grads, weights, partials, found_inf, overwrite, store, norm_type, count)


def norm_(main_grads: Tensors, partials: torch.Tensor, found_inf: torch.Tensor, *, norm_type: float) -> None:
    """See gradacc_fused.clip.norm_."""
    checks.check_norm(main_grads, partials, found_inf, norm_type)
    no_weights = torch.empty(0, dtype=torch.float64)
    _accumulate(main_grads, [], no_weights, partials, found_inf, False, False, norm_type, len(main_grads))


def _accumulate(
    main_grads: Tensors, grads: Tensors, weights: torch.Tensor, partials: torch.Tensor, found_inf: torch.Tensor,
    overwrite: bool, store: bool, norm_type: float, count: int,
) -> None:  # fmt: skip
    from ..triton_kernels._order import DenseTensors, bump_versions
    from ..triton_kernels._tables import current, slices_of
    from ..triton_kernels.accumulate import accumulate_kernel

    with_norm = partials.numel() > 0
    device = partials.device if with_norm else _device_of(main_grads, grads)
    likes = [
        main_grads[i] if main_grads else next((grad for grad in grads[i::count] if grad.numel() > 0), None)
        for i in range(count)
    ]  # fmt: skip
    numels = tuple(0 if like is None else like.numel() for like in likes)
    slices = slices_of(numels)
    if not with_norm and (slices.count == 0 or not store):
        return
    strides = [None if like is None or like.numel() == 0 else dense_strides(like) for like in likes]
    dense = DenseTensors()
    rows: list[int] = []
    for i, like in enumerate(likes):
        order = strides[i] if main_grads and (store or not overwrite) else None
        hand_out = dense.write if store else dense.read
        rows.append(0 if order is None else hand_out(main_grads[i], order).data_ptr())
        rows.append(int(like is not None and like.dtype == torch.float64))
    with _guard(device):
        tables = current(device)
        sources = _sources(tables, grads, weights, strides, dense)
        counters, of_slices = tables.scratch(slices.count)
        norm = 0 if not with_norm else 2 if norm_type == 2.0 else 1
        accumulate_kernel[(programs(device, slices.count),)](
            tables.of(slices.words), slices.count, tables.of(tuple(rows)), sources.addresses, sources.weights,
            sources.m, count, of_slices, tables.of(slices.first_of_chunk), slices.chunks, partials, partials.numel(),
            found_inf, counters, READ=not overwrite, STORE=store, NORM=norm, BLOCK=BLOCK, FOLD=FOLD,
            **OPTIONS,
        )  # fmt: skip
    dense.finish()
    if with_norm:
        bump_versions([partials, found_inf])


def clip_(
    partials: torch.Tensor, counts: torch.Tensor, loss_scale: torch.Tensor, total_norm: torch.Tensor,
    clip_coef: torch.Tensor, multiplier: torch.Tensor, weight_sum: torch.Tensor, *, norm_type: float, max_norm: float,
) -> None:  # fmt: skip
    """See gradacc_fused.clip.clip_."""
    from ..triton_kernels._order import bump_versions
    from ..triton_kernels._tables import bits_of, current
    from ..triton_kernels.clip import clip_kernel

    written = {"total_norm": total_norm, "clip_coef": clip_coef, "multiplier": multiplier, "weight_sum": weight_sum}
    checks.check_clip(partials, counts, {"loss_scale": loss_scale} | written, norm_type, max_norm)
    device = partials.device
    for name, cell in written.items():
        checks.check_device("clip_", name, 0, cell, device)
    with _guard(device):
        limit = current(device).of(bits_of([max_norm])).view(torch.float64)
        clip_kernel[(1,)](
            partials, partials.numel(), _on(device, counts), counts.numel(), _on(device, loss_scale), total_norm,
            clip_coef, multiplier, weight_sum, limit, INF=norm_type != 2.0, BLOCK=1024, **OPTIONS,
        )  # fmt: skip
    bump_versions(list(written.values()))


def update_(
    params: Tensors, main_params: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, steps: torch.Tensor,
    main_grads: Tensors, grads: Tensors, weights: torch.Tensor, hyper: torch.Tensor, group_ids: torch.Tensor,
    touched: torch.Tensor, multiplier: torch.Tensor, found_inf: torch.Tensor, *, rule: str, max_grad_value: float,
) -> None:  # fmt: skip
    """See gradacc_fused.update.update_."""
    checks.check_update(
        params, main_params, exp_avgs, exp_avg_sqs, steps, main_grads, grads, weights, hyper, group_ids, touched,
        multiplier, found_inf, rule, max_grad_value,
    )  # fmt: skip
    count = len(params)
    if group_ids.device.type == "cpu":
        checks.check_group_ids(group_ids[:count], hyper)
    if count == 0:
        return
    from ..triton_kernels._order import DenseTensors, bump_versions
    from ..triton_kernels._tables import bits_of, current, slices_of, tagged
    from ..triton_kernels.update import update_kernel

    device = params[0].device
    slices = slices_of(tuple(param.numel() for param in params))
    strides = [dense_strides(param) if param.numel() > 0 else None for param in params]
    dense = DenseTensors()
    rows: list[int] = []
    for i, (param, order) in enumerate(zip(params, strides, strict=True)):
        if order is None:
            rows += [0] * 6
            continue
        rows.append(tagged(dense.write(param, order)))
        rows.append(dense.read(main_grads[i], order).data_ptr() if main_grads else 0)
        for state in (main_params, exp_avgs, exp_avg_sqs):
            there = state and state[i].numel() > 0
            rows.append(dense.write(state[i], order).data_ptr() if there else 0)
        rows.append(int(math_dtype(param.dtype) == torch.float64))
    with _guard(device):
        tables = current(device)
        sources = _sources(tables, grads, weights, strides, dense)
        counters, _ = tables.scratch(0)
        bound = tables.of(bits_of([max_grad_value])).view(torch.float64)
        update_kernel[(programs(device, slices.count),)](
            tables.of(slices.words), slices.count, tables.of(tuple(rows)), sources.addresses, sources.weights,
            sources.m, count, _on(device, hyper), _on(device, group_ids), _on(device, touched), steps, multiplier,
            found_inf, bound, counters, RULE=rule, BUFFER=bool(exp_avgs),
            BLOCK=UPDATE_BLOCK, FOLD=FOLD, **OPTIONS,
        )  # fmt: skip
    dense.finish()
    bump_versions([steps])
