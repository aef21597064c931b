"""clip_: partials -> total_norm, clip_coef and the one multiplier that the update applies. One program.

Formula: torch.nn.utils.clip_grad_norm_, on the gradient divided by the sum of the weights times the loss scale. Twin:
csrc/cuda/clip.cu with csrc/norm_math.h.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._common import fold, larger


@triton.jit(
    do_not_specialize=["n_partials", "n_counts"],
    do_not_specialize_on_alignment=[
        "counts_ptr", "loss_scale_ptr", "total_norm_ptr", "clip_coef_ptr", "multiplier_ptr", "weight_sum_ptr",
        "max_norm_ptr",
    ],
)  # fmt: skip
def clip_kernel(
    partials_ptr, n_partials, counts_ptr, n_counts, loss_scale_ptr, total_norm_ptr, clip_coef_ptr, multiplier_ptr,
    weight_sum_ptr, max_norm_ptr, INF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All scalars are one element, float32 or float64, on the device; max_norm: float64, inf for none."""
    folded = tl.zeros([BLOCK], tl.float64)
    for first in range(0, n_partials, BLOCK):
        place = first + tl.arange(0, BLOCK)
        part = tl.load(partials_ptr + place, mask=place < n_partials, other=0.0)
        folded = larger(folded, part) if INF else folded + part
    whole = fold(folded, INF)
    count = tl.zeros([], tl.float64)
    for j in range(n_counts):
        count += tl.load(counts_ptr + j)
    denominator = count * tl.load(loss_scale_ptr).to(tl.float64)
    max_norm = tl.load(max_norm_ptr)
    size = whole if INF else tl.sqrt(whole)
    norm = tl.where(denominator == 0.0, 0.0, size / tl.where(denominator == 0.0, 1.0, tl.abs(denominator)))
    wanted = max_norm / (norm + 1e-6)
    coefficient = tl.where((norm > 0.0) & (wanted < 1.0), wanted, 1.0)
    factor = coefficient / denominator
    finite = float("inf")
    norm_usable = (tl.abs(max_norm) == finite) | (tl.abs(norm) < finite)
    # The update's math may be fp32: a factor beyond it would not be finite there.
    factor_usable = (tl.abs(denominator) < finite) & (tl.abs(factor.to(tl.float32)) < finite)
    multiplier = tl.where(norm_usable & factor_usable, factor, float("nan"))
    tl.store(total_norm_ptr, norm.to(total_norm_ptr.dtype.element_ty))
    tl.store(clip_coef_ptr, coefficient.to(clip_coef_ptr.dtype.element_ty))
    tl.store(multiplier_ptr, multiplier.to(multiplier_ptr.dtype.element_ty))
    tl.store(weight_sum_ptr, count.to(weight_sum_ptr.dtype.element_ty))
