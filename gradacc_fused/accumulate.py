"""Stage 1, accumulate: micro-batch gradients into the main grads."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import _ops

_accumulate = _ops.op("accumulate_")


def accumulate_(
    main_grads: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    weights: torch.Tensor,
    *,
    partials: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
    overwrite: bool = False,
    store: bool = True,
    norm_type: float = 2.0,
) -> None:
    """Add m micro-batches into the main grads: ``main_grads[i] += sum_j weights[j] * grads[j*N + i]``.

    One fused multiply-add per micro-batch, in order of j, in fp32 (float64 main grads: in float64). The closing flush
    of a window also takes the norm's partials and ``found_inf``, in the same pass.

    Args:
        main_grads: N tensors, float32 or float64, any dense memory order. Written unless ``store=False``. May be empty
            with ``overwrite=True, store=False``: the sum is then never stored.
        grads: m*N tensors, piece-major, float32, float64, float16 or bfloat16, mixed at will. Read only. An empty
            tensor: this micro-batch did not reach that parameter.
        weights: float64 [m], on the host or on the tensors' device. A weight of 0 leaves its gradients unread.
        partials: float64, at least ``n_partials(main_grads)`` long. Written: per chunk of the list the sum of squares
            (``norm_type=2``) or the largest magnitude (``inf``) of the sums. None: no norm.
        found_inf: one float32 element. Written with ``partials``: 1 if any sum is not finite, else 0.
        overwrite: Start from zero instead of the main grads' values; a parameter that no micro-batch reached becomes 0.
        store: Whether the sums are written back.
        norm_type: 2 or inf.

    Raises:
        TypeError, ValueError: An argument is off; the message names it. Nothing was written.
    """
    empty = weights.new_empty(0)
    partials = empty if partials is None else partials
    found_inf = weights.new_empty(0) if found_inf is None else found_inf
    _accumulate(
        main_grads, grads, weights, partials, found_inf, overwrite=overwrite, store=store, norm_type=norm_type
    )  # fmt: skip
