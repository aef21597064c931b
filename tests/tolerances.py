"""Tolerances, each with its reason. Nothing else in the suite spells a bound for rounding."""

from __future__ import annotations

import torch

EPS = {torch.float32: 2.0**-23, torch.float64: 2.0**-52, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def accumulate_bound(magnitudes: torch.Tensor, roundings: int, dtype: torch.dtype) -> torch.Tensor:
    """Error of a sum done in ``dtype``: half a unit of the running sum's size per rounding (here: a whole one).

    Args:
        magnitudes: Sum of the absolute values of the terms.
        roundings: How often the sum was rounded; the reference rounds the product too.
    """
    return magnitudes * EPS[dtype] * roundings + 1e-45


# total_norm: fp64 inside, one rounding to fp32; the reference's partials are numpy-free torch sums in fp64.
NORM = {"rtol": 2e-7, "atol": 0.0}
# Three updates against float64: about ten roundings each of terms up to 16 in size (2^-23 * 16 * 2 absolute);
# division and square root amplify none of them. A wrong order of operations is off by lr * decay * lr, over 1e-3.
UPDATE = {torch.float32: {"rtol": 3e-6, "atol": 4e-6}, torch.float64: {"rtol": 1e-13, "atol": 1e-14}}
# A sum of terms is unsure of its sign where it is this small a part of the terms' absolute values: about ten roundings
# of half a unit.
UNSURE = {torch.float32: 10 * 2.0**-24, torch.float64: 10 * 2.0**-53}
# Twenty updates from the same fp32 gradients, beside torch's own fp32 optimizer.
TRAJECTORY = {"rtol": 2e-5, "atol": 2e-6}
# Low-precision write-back: half a unit in the last place of the stored dtype around the exact value.
STORED = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
