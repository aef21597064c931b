"""accumulate_: m micro-batches into the main grads in one launch, with the closing norm where it is asked for.

Bytes per element: reads m gradients and (unless overwriting) the main grad, writes the main grad (if stored).
Deterministic: each element and each partial has one writer, sums have a fixed order. Twin: csrc/cuda/accumulate.cu.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._common import (
    CHUNK,
    SLICE,
    add_micro_batches,
    all_aligned,
    exponent_full,
    larger,
    last_program,
    load,
    offsets_of,
    store,
)  # fmt: skip

ROW = tl.constexpr(2)  # main grad's address (0: none), whether the math dtype is float64


@triton.jit
def _accumulate_slice(
    start, numel, tensor, main_grad, addresses_ptr, weights_ptr, m, tensors, MATH: tl.constexpr, FULL: tl.constexpr,
    READ: tl.constexpr, STORE: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Returns the slice's part of the norm, and whether an element of its sum is not finite."""
    BITS: tl.constexpr = tl.int64 if MATH == tl.float64 else tl.int32
    squares = tl.zeros([BLOCK], tl.float64)
    largest = tl.zeros([BLOCK], BITS)
    for tile in range(0, SLICE if FULL else numel, BLOCK):
        offsets = offsets_of(start, tile, FULL, BLOCK)
        mask = offsets < start + numel
        total = tl.zeros([BLOCK], MATH)
        if READ:
            if main_grad != 0:
                total = load(main_grad, offsets, mask, MATH, FULL)
        total = add_micro_batches(total, addresses_ptr, weights_ptr, m, tensors, tensor, offsets, mask, MATH, FULL)
        if STORE:
            if main_grad != 0:
                store(main_grad, offsets, mask, total, MATH, FULL)
        if NORM == 2:
            wide = total.to(tl.float64)
            squares += wide * wide
        # Magnitudes are ordered as their bits are, infinity and then NaN above all others. In fp64 the square of a
        # finite one may be infinite.
        if (NORM == 1) | ((NORM == 2) & (MATH == tl.float64)):
            largest = tl.maximum(largest, tl.abs(total).to(BITS, bitcast=True))
    if NORM == 1:
        folded = tl.max(largest, axis=0).to(MATH, bitcast=True).to(tl.float64)
        return folded, exponent_full(folded).to(tl.int32)
    elif MATH == tl.float64:
        bad = exponent_full(tl.max(largest, axis=0).to(MATH, bitcast=True))
        return tl.sum(squares, axis=0), bad.to(tl.int32)
    else:
        folded = tl.sum(squares, axis=0)
        return folded, exponent_full(folded).to(tl.int32)


@triton.jit
def _finish(
    of_slices_ptr, first_of_chunk_ptr, chunks, partials_ptr, n_partials, NORM: tl.constexpr, FOLD: tl.constexpr
):  # fmt: skip
    """Fold the slices of each chunk into its partial, in order."""
    for first_chunk in range(0, n_partials, FOLD):
        chunk = first_chunk + tl.arange(0, FOLD)
        known = chunk < chunks
        first = tl.load(first_of_chunk_ptr + chunk, mask=known, other=0)
        end = tl.load(first_of_chunk_ptr + chunk + 1, mask=known, other=0)
        partial = tl.zeros([FOLD], tl.float64)
        for k in range(0, CHUNK // SLICE):
            part = tl.load(of_slices_ptr + first + k, mask=first + k < end, other=0.0, cache_modifier=".cg")
            if NORM == 2:
                partial += part
            else:
                partial = larger(partial, part)
        tl.store(partials_ptr + chunk, partial, mask=chunk < n_partials)


@triton.jit(
    do_not_specialize=["n_slices", "m", "tensors", "chunks", "n_partials"],
    do_not_specialize_on_alignment=["addresses_ptr", "weights_ptr", "found_inf_ptr"],  # parts of tables and of cells
)
def accumulate_kernel(
    slices_ptr, n_slices, rows_ptr, addresses_ptr, weights_ptr, m, tensors, of_slices_ptr, first_of_chunk_ptr, chunks,
    partials_ptr, n_partials, found_inf_ptr, counters_ptr, READ: tl.constexpr, STORE: tl.constexpr, NORM: tl.constexpr,
    BLOCK: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """The sum of every slice, and with ``NORM`` (2; 1: of the largest element) the partials and found_inf.

    Args:
        slices_ptr: int64 [n_slices, 3]: start, tensor, numel.
        rows_ptr: int64 [tensors, ROW].
        addresses_ptr: int64 [m, tensors].
        weights_ptr: float64 [m].
        of_slices_ptr: float64 [n_slices], scratch.
        first_of_chunk_ptr: int64 [chunks + 1]: the first slice of each chunk.
        counters_ptr: int32 [2], scratch, 0 between launches: non-finite elements seen; programs done.
    """
    nonfinite = 0
    for s in range(tl.program_id(0), n_slices, tl.num_programs(0)):
        place = slices_ptr + 3 * tl.cast(s, tl.int64)
        start, tensor, numel = tl.load(place), tl.load(place + 1), tl.load(place + 2)
        main_grad = tl.load(rows_ptr + ROW * tensor)
        if tl.load(rows_ptr + ROW * tensor + 1) != 0:
            folded, bad = _accumulate_slice(
                start, numel, tensor, main_grad, addresses_ptr, weights_ptr, m, tensors, tl.float64, False, READ, STORE,
                NORM, BLOCK,
            )  # fmt: skip
        elif (numel == SLICE) & all_aligned(main_grad, addresses_ptr, m, tensors, tensor):
            folded, bad = _accumulate_slice(
                start, numel, tensor, main_grad, addresses_ptr, weights_ptr, m, tensors, tl.float32, True, READ, STORE,
                NORM, BLOCK,
            )  # fmt: skip
        else:
            folded, bad = _accumulate_slice(
                start, numel, tensor, main_grad, addresses_ptr, weights_ptr, m, tensors, tl.float32, False, READ, STORE,
                NORM, BLOCK,
            )  # fmt: skip
        nonfinite |= bad
        if NORM != 0:
            tl.store(of_slices_ptr + s, folded)
    if NORM != 0:
        if nonfinite != 0:
            tl.atomic_or(counters_ptr, 1)
        if last_program(counters_ptr + 1):
            _finish(of_slices_ptr, first_of_chunk_ptr, chunks, partials_ptr, n_partials, NORM, FOLD)
            found = tl.atomic_xchg(counters_ptr, 0) != 0
            tl.store(found_inf_ptr, found.to(found_inf_ptr.dtype.element_ty))
            tl.atomic_xchg(counters_ptr + 1, 0)
