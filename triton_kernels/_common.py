"""What the kernels share: tables of addresses, loads by an address's dtype, and the sum of the micro-batches.

Addresses are int64 with the gradient's dtype in the two highest bits, which no address uses; 0: there is none. A slice
is the unit of work: rows (start, tensor, numel) of a static table, walked over by a grid that stays. A pointer out of a
table has no known alignment, so a whole slice of aligned arrays has a path of its own (``FULL``): its accesses are
vectors.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..layout import CHUNK as _CHUNK

SLICE = tl.constexpr(8192)
CHUNK = tl.constexpr(_CHUNK)
DTYPE_SHIFT = tl.constexpr(62)
FLOAT64 = tl.constexpr(1)
FLOAT16 = tl.constexpr(2)
BFLOAT16 = tl.constexpr(3)
ADDRESS = tl.constexpr((1 << 62) - 1)
ALIGNED = tl.constexpr(15)


@triton.jit
def offsets_of(start, tile, FULL: tl.constexpr, BLOCK: tl.constexpr):
    """int64 offsets of a tile's elements. A whole slice starts at a multiple of its size."""
    first = start + tile
    if FULL:
        first = tl.multiple_of(first, BLOCK)
    return first + tl.arange(0, BLOCK)


@triton.jit
def load(address, offsets, mask, ELEMENT: tl.constexpr, FULL: tl.constexpr):
    """Elements of the array at ``address``; 0 where masked."""
    pointer = address.to(tl.pointer_type(ELEMENT))
    if FULL:
        return tl.load(tl.multiple_of(pointer, 16) + offsets)
    else:
        return tl.load(pointer + offsets, mask=mask, other=0.0)


@triton.jit
def store(address, offsets, mask, values, ELEMENT: tl.constexpr, FULL: tl.constexpr):
    pointer = address.to(tl.pointer_type(ELEMENT))
    if FULL:
        tl.store(tl.multiple_of(pointer, 16) + offsets, values.to(ELEMENT))
    else:
        tl.store(pointer + offsets, values.to(ELEMENT), mask=mask)


@triton.jit
def widened(tagged, offsets, mask, MATH: tl.constexpr, FULL: tl.constexpr):
    """Elements of an array of any of the four dtypes, in the math dtype."""
    address = tagged & ADDRESS
    dtype = (tagged >> DTYPE_SHIFT) & 3
    if dtype == BFLOAT16:
        values = load(address, offsets, mask, tl.bfloat16, FULL).to(MATH)
    elif dtype == FLOAT16:
        values = load(address, offsets, mask, tl.float16, FULL).to(MATH)
    elif dtype == FLOAT64:
        values = load(address, offsets, mask, tl.float64, FULL).to(MATH)
    else:
        values = load(address, offsets, mask, tl.float32, FULL).to(MATH)
    return values


@triton.jit
def narrowed(tagged, offsets, mask, values, FULL: tl.constexpr):
    """Store values in an array of any of the four dtypes, rounded to nearest even."""
    address = tagged & ADDRESS
    dtype = (tagged >> DTYPE_SHIFT) & 3
    if dtype == BFLOAT16:
        store(address, offsets, mask, values, tl.bfloat16, FULL)
    elif dtype == FLOAT16:
        store(address, offsets, mask, values, tl.float16, FULL)
    elif dtype == FLOAT64:
        store(address, offsets, mask, values, tl.float64, FULL)
    else:
        store(address, offsets, mask, values, tl.float32, FULL)


@triton.jit
def add_micro_batches(
    total, addresses_ptr, weights_ptr, m, tensors, tensor, offsets, mask, MATH: tl.constexpr, FULL: tl.constexpr
):
    """``fma(weight, gradient, total)`` for each micro-batch that reached the tensor, in order."""
    place = addresses_ptr + tensor
    for j in range(m):
        tagged = tl.load(place)
        if tagged != 0:
            weight = tl.load(weights_ptr + j).to(MATH)
            total = tl.fma(widened(tagged, offsets, mask, MATH, FULL), tl.full(total.shape, weight, MATH), total)
        place += tensors
    return total


@triton.jit
def all_aligned(addresses, addresses_ptr, m, tensors, tensor):
    """Whether all of a tensor's arrays are aligned to 16 bytes; ``addresses``: those beside the gradients, or-ed."""
    place = addresses_ptr + tensor
    for _ in range(m):
        addresses |= tl.load(place)
        place += tensors
    return (addresses & ALIGNED) == 0


@triton.jit
def exponent_full(values):
    """Whether a value is infinite or NaN."""
    return (values != values) | (tl.abs(values) == float("inf"))


@triton.jit
def larger(a, b):
    """The larger of two fp64 magnitudes. They are ordered as their bits are, a NaN above all others."""
    bits = tl.maximum(a.to(tl.int64, bitcast=True), b.to(tl.int64, bitcast=True))
    return bits.to(tl.float64, bitcast=True)


@triton.jit
def fold(values, INF: tl.constexpr):
    """The parts of a norm (fp64) in one: their sum, or the largest, NaN where one is."""
    if INF:
        return tl.max(values.to(tl.int64, bitcast=True), axis=0).to(tl.float64, bitcast=True)
    else:
        return tl.sum(values, axis=0)


@triton.jit
def last_program(done_ptr):
    """Whether all other programs of the launch have come here; what they stored before can be read then."""
    tl.debug_barrier()
    return tl.atomic_add(done_ptr, 1, sem="acq_rel") == tl.num_programs(0) - 1
