"""The optimizer's way into the passes by the registered ops: the twin of the compiled hot paths for any backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..collector import Piece
from ..rules import Late, with_late

Tensors = Sequence[torch.Tensor]


class OpsPath:
    """Holds what does not change from window to window and hands the ops their lists.

    Args:
        ops: A backend's ops: ``accumulate_``, ``norm_``, ``clip_``, ``update_``.
        params: The active parameters.
        group_ids: int32, the group of each.
        device: Where they lie.
    """

    def __init__(self, ops: Any, params: Tensors, group_ids: torch.Tensor, device: torch.device) -> None:
        self._ops = ops
        self._params = list(params)
        self._group_ids = group_ids
        self._absent = torch.empty(0, device=device)
        self._main_grads: list[torch.Tensor] = []
        self._state: tuple[Any, ...] = ()
        self._rule = ""

    def set_main_grads(self, main_grads: Tensors) -> None:
        self._main_grads = list(main_grads)

    def set_state(
        self, rule: str, main_params: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, steps: torch.Tensor
    ) -> None:
        """Empty lists where there are none; a main param without elements: the parameter itself is updated."""
        self._rule = rule
        self._state = (list(main_params), list(exp_avgs), list(exp_avg_sqs), steps)

    def _flat(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        return [grad for piece in pieces for grad in piece.tensors(self._absent)]

    def accumulate(
        self, pieces: Sequence[Piece], weights: torch.Tensor, partials: torch.Tensor, found_inf: torch.Tensor,
        overwrite: bool, store: bool, norm_type: float,
    ) -> None:  # fmt: skip
        main_grads = self._main_grads if store or not overwrite else []
        self._ops.accumulate_(
            main_grads, self._flat(pieces), weights, partials, found_inf,
            overwrite=overwrite, store=store, norm_type=norm_type,
        )  # fmt: skip

    def norm(self, partials: torch.Tensor, found_inf: torch.Tensor, norm_type: float) -> None:
        self._ops.norm_(self._main_grads, partials, found_inf, norm_type=norm_type)

    def clip(
        self, partials: torch.Tensor, counts: torch.Tensor, loss_scale: torch.Tensor, total_norm: torch.Tensor,
        clip_coef: torch.Tensor, multiplier: torch.Tensor, weight_sum: torch.Tensor, norm_type: float, max_norm: float,
    ) -> None:  # fmt: skip
        self._ops.clip_(
            partials, counts, loss_scale, total_norm, clip_coef, multiplier, weight_sum,
            norm_type=norm_type, max_norm=max_norm,
        )  # fmt: skip

    def _hyper_rows(self, host: torch.Tensor, late: Late) -> torch.Tensor:
        """The rows with what only the device knows."""
        return with_late(host.to(self._absent.device, copy=True), late) if late else host

    def update(
        self, pieces: Sequence[Piece], weights: torch.Tensor, stored: bool, hyper: torch.Tensor, late: Late,
        touched: torch.Tensor, multiplier: torch.Tensor, found_inf: torch.Tensor, max_grad_value: float,
    ) -> None:  # fmt: skip
        self._ops.update_(
            self._params, *self._state, self._main_grads if stored else [], self._flat(pieces), weights,
            self._hyper_rows(hyper, late), self._group_ids, touched, multiplier, found_inf, rule=self._rule,
            max_grad_value=max_grad_value,
        )  # fmt: skip

    def window_cells(self, wide: bool) -> list[torch.Tensor]:
        """total_norm, clip_coef (float64 where ``wide``), multiplier, weight_sum (float64), found_inf (float32)."""
        norms = torch.float64 if wide else torch.float32
        dtypes = (norms, norms, torch.float64, torch.float64, torch.float32)
        return [torch.empty((), dtype=dtype, device=self._absent.device) for dtype in dtypes]
