"""Triton's interpreter made exact: bf16, fma, the order of programs, and a check of every access.

The stock interpreter computes bf16 on raw integers and truncates it, rounds tl.fma twice, always runs programs in
order, and lets a kernel read and write anywhere. Call install() before any kernel runs; TRITON_INTERPRET=1 has to be
set before Triton is imported.
"""

from __future__ import annotations

import random
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter

BF16 = np.dtype(ml_dtypes.bfloat16)
Builder = interpreter.InterpreterBuilder
Handle = interpreter.TensorHandle
_original = {name: getattr(Builder, name) for name in ("cast_impl", "create_fp_to_fp", "create_atomic_rmw")}
_original_dtype = interpreter._get_np_dtype
_original_call = interpreter.GridExecutor.__call__


# -- bf16 ----------------------------------------------------------------------------------------------------------


def _dtype(ty: Any) -> np.dtype:
    scalar = ty.element_ty if isinstance(ty, tl.block_type) else ty
    return BF16 if scalar == tl.bfloat16 else _original_dtype(ty)


def _raw(values: Any) -> np.ndarray:
    """bf16 as the 16-bit integers that the interpreter's C++ side knows."""
    values = np.asarray(values)
    return values.view(np.uint16) if values.dtype == BF16 else values


def _cast(self: Any, source: Any, target: Any) -> Any:
    if tl.bfloat16 in (source.dtype.scalar, target.scalar):
        with np.errstate(all="ignore"):
            return Handle(np.asarray(source.data).astype(_dtype(target.scalar)), target.scalar)
    return _original["cast_impl"](self, source, target)


def _float_to_float(self: Any, source: Any, target: Any, rounding: Any) -> Any:
    if tl.bfloat16 in (source.dtype.scalar, target.scalar):
        assert rounding in (None, interpreter._ir.ROUNDING_MODE.RTNE), "only rounding to nearest even is known here"
        return _cast(self, source, target)
    return _original["create_fp_to_fp"](self, source, target, rounding)


def _load(self: Any, pointers: Any, mask: Any, other: Any, *hints: Any) -> Any:
    _look("load", pointers, mask.data)
    element = pointers.get_element_ty()
    dtype = _dtype(element)
    filled = np.zeros_like(pointers.data, dtype=dtype) if other is None else other.data
    if dtype == BF16:
        values = interpreter._interpreter.load(pointers.data, mask.data, _raw(filled), np.dtype(np.uint16)).view(BF16)
    else:
        values = interpreter._interpreter.load(pointers.data, mask.data, filled, dtype)
    return Handle(values, element)


def _store(self: Any, pointers: Any, value: Any, mask: Any, *hints: Any) -> Any:
    _look("store", pointers, mask.data)
    return interpreter._interpreter.store(pointers.data, _raw(value.data), mask.data)


def _atomic(self: Any, operation: Any, pointer: Any, value: Any, mask: Any, order: Any, scope: Any) -> Any:
    assert np.asarray(value.data).dtype != BF16, "no bf16 atomics here"
    _look("atomic", pointer, mask.data, acquires="RELAXED" not in str(order).upper())
    return _original["create_atomic_rmw"](self, operation, pointer, value, mask, order, scope)


# -- fma -----------------------------------------------------------------------------------------------------------


def _two_sum(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rounded sum and its exact error (Knuth)."""
    total = a + b
    back = total - a
    return total, (a - (total - back)) + (b - back)


def _round_to_odd(high: np.ndarray, error: np.ndarray) -> np.ndarray:
    """high + error, rounded so that a later rounding to nearest is exact (Boldo and Melquiond 2008)."""
    bits = high.view(np.int64)
    inexact = (error != 0) & ((bits & 1) == 0) & np.isfinite(high) & np.isfinite(error)
    away = (error > 0) == (high > 0)
    return np.where(inexact, (bits + np.where(away, 1, -1)).view(np.float64), high)


def _fma32(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    product = x.astype(np.float64) * y.astype(np.float64)  # exact
    return _round_to_odd(*_two_sum(product, z.astype(np.float64))).astype(np.float32)


def _split(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Halves of 26 bits (Veltkamp)."""
    scaled = x * 134217729.0
    high = scaled - (scaled - x)
    return high, x - high


def _fma64(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    product = x * y
    (x_high, x_low), (y_high, y_low) = _split(x), _split(y)
    product_error = ((x_high * y_high - product) + x_high * y_low + x_low * y_high) + x_low * y_low
    high, low = _two_sum(z, product_error)  # product + product_error + z, exactly
    top, rest = _two_sum(product, high)
    exact = top + _round_to_odd(*_two_sum(rest, low))
    return np.where(np.isfinite(exact), exact, product + z)


def _fma(self: Any, x: Any, y: Any, z: Any) -> Any:
    with np.errstate(all="ignore"):
        values = {np.dtype(np.float32): _fma32, np.dtype(np.float64): _fma64}[z.data.dtype](x.data, y.data, z.data)
    return Handle(values, z.dtype.scalar)


# -- every access is looked at ---------------------------------------------------------------------------------------


class Accesses:
    """What a launch may touch, and who has touched it. Raises where a program leaves it, or two of them collide.

    Args:
        tensors: All that is reached through a table of addresses; a launch's arguments are added by themselves.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._ranges: list[tuple[int, int]] = []
        self._sorted: tuple[np.ndarray, np.ndarray] | None = None
        self.forget()
        for tensor in tensors:
            self.allow(tensor)

    def forget(self) -> None:
        """A new launch: what the one before did is done."""
        self._stored: dict[int, Any] = {}
        self._loaded: dict[int, Any] = {}
        self._synchronised: set[Any] = set()

    def allow(self, tensor: torch.Tensor) -> None:
        if tensor.numel() > 0:
            span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            self._ranges.append((tensor.data_ptr(), tensor.data_ptr() + span * tensor.element_size()))
            self._sorted = None

    def look(self, kind: str, pointers: np.ndarray, mask: np.ndarray, size: int, program: Any, acquires: bool) -> None:
        touched = np.ravel(pointers)[np.ravel(np.broadcast_to(mask, np.shape(pointers))).astype(bool)]
        if touched.size == 0:
            return
        if self._sorted is None:
            self._ranges.sort()
            starts, ends = zip(*self._ranges, strict=True)
            self._sorted = np.array(starts, np.uint64), np.maximum.accumulate(np.array(ends, np.uint64))
        starts, ends = self._sorted
        below = np.searchsorted(starts, touched, "right").astype(np.int64) - 1
        outside = (below < 0) | (touched + np.uint64(size) > ends[np.maximum(below, 0)])
        if outside.any():
            raise IndexError(f"{kind} of {int(outside.sum())} element(s) outside every known tensor")
        if (touched % np.uint64(size)).any():
            raise IndexError(f"{kind} not aligned to its element size {size}")
        if kind == "atomic":
            if acquires:
                self._synchronised.add(program)
            return
        mine = self._stored if kind == "store" else self._loaded
        others = (self._stored, self._loaded) if kind == "store" else (self._stored,)
        for address in touched.tolist():
            for seen in others:
                owner = seen.get(address)
                # One that took an acquire may read what others stored before.
                if owner is not None and owner != program and program not in self._synchronised:
                    raise RuntimeError(f"race: {kind} by program {program} of what program {owner} touched")
            mine[address] = program


_accesses: Accesses | None = None


def _look(kind: str, pointers: Any, mask: Any, acquires: bool = False) -> None:
    if _accesses is not None:
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        program = tuple(interpreter.interpreter_builder.grid_idx)
        _accesses.look(kind, pointers.data, np.asarray(mask), size, program, acquires)


def allow(tensor: torch.Tensor) -> None:
    """A tensor that launches reach through a table, made after the check began."""
    if _accesses is not None:
        _accesses.allow(tensor)


@contextmanager
def checked(*tensors: torch.Tensor) -> Iterator[None]:
    """Look at every access of the launches in this context; ``tensors`` are those that tables lead to."""
    global _accesses
    before, _accesses = _accesses, Accesses(tensors)
    try:
        yield
    finally:
        _accesses = before


# -- the order of programs -------------------------------------------------------------------------------------------

_seed: int | None = None


@contextmanager
def shuffled(seed: int) -> Iterator[None]:
    """Programs run in an order drawn from ``seed``."""
    global _seed
    before, _seed = _seed, seed
    try:
        yield
    finally:
        _seed = before


def _call(self: Any, *arguments: Any, **keywords: Any) -> Any:
    if _accesses is not None:
        _accesses.forget()
        for value in (*arguments, *keywords.values()):
            if isinstance(value, torch.Tensor):
                _accesses.allow(value)
    if _seed is None:
        return _original_call(self, *arguments, **keywords)
    generator = random.Random(_seed)

    def drawn(*bounds: int) -> list[int]:
        order = list(range(*bounds))
        generator.shuffle(order)
        return order

    names = {**_original_call.__globals__, "range": drawn}
    call = types.FunctionType(
        _original_call.__code__, names, _original_call.__name__, _original_call.__defaults__, _original_call.__closure__
    )  # fmt: skip
    call.__kwdefaults__ = _original_call.__kwdefaults__
    return call(self, *arguments, **keywords)


def install() -> None:
    interpreter._get_np_dtype = _dtype
    interpreter.GridExecutor.__call__ = _call
    for name, function in {
        "cast_impl": _cast, "create_fp_to_fp": _float_to_float, "create_fma": _fma, "create_atomic_rmw": _atomic,
        "create_masked_load": _load, "create_masked_store": _store,
    }.items():  # fmt: skip
        setattr(Builder, name, function)
