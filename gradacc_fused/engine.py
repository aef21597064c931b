"""The engine: everything static about one parameter set, and the device passes of a window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import memory
from .backends import registry
from .backends.base import Backend
from .backends.reference import gathered_gradient
from .buffers import Cells, HostArray, WeightArrays, allocate_main_grads
from .checks import HYPER_COLUMNS
from .layout import Layout, build_layout, math_dtype
from .memory import Deferral, MemoryReport
from .options import Options
from .results import Scalar
from .rules import Rule, RuleState, fill_hyper, follow_param, rule_for

Piece = Any  # collector.Piece or its compiled twin: one micro-batch's gradients


class Engine:
    """Layout, collector, backend, main grads and rule state of an inner optimizer; rebuilt only when parameters change.

    Args:
        inner: The optimizer whose groups and state are used.
        options: The checked options.
    """

    layout: Layout
    backend: Backend

    def __init__(self, inner: torch.optim.Optimizer, options: Options) -> None:
        self.inner = inner
        self.options = options
        self.collector: Any = None
        self.path: Any = None
        self.rule: Rule | None = None
        self._weights = WeightArrays()
        self._counts = WeightArrays()
        self._scale = HostArray(1, torch.float64)
        self._deferral = Deferral(options.defer, options.defer_bytes)
        self._main_grads: list[torch.Tensor] | None = None
        self._state: RuleState | None = None
        self._watching = False
        self.unfinished_before = False

    # -- static part ---------------------------------------------------------------------------------------------

    def matches(self) -> bool:
        """Whether the layout still describes the inner optimizer's parameters."""
        return self.collector is not None and self.collector.matches(self._param_lists())

    def _param_lists(self) -> list[Any]:
        return [group["params"] for group in self.inner.param_groups]

    def collect(self, clear: bool, held: Sequence[Piece]) -> tuple[Piece | None, int]:
        """Take the gradients in ``.grad``; see ``collector.Collector.collect``."""
        return self.collector.collect(self._param_lists(), self.touched.tensor, clear, held)

    def prepare(self) -> None:
        """Rebuild the layout if the parameters changed. Only between windows."""
        if not self.matches():
            self.rebuild()
        self.choose_rule()

    def choose_rule(self) -> None:
        """Take the rule that the groups' options ask for now; state is taken up anew where it changed."""
        rule = rule_for(self.inner)
        if rule is not self.rule:
            self.rule, self._state = rule, None

    def rebuild(self) -> None:
        groups = self.inner.param_groups
        layout = build_layout(groups)
        backend = registry.choose(layout.device, self.options.backend)
        active = [False] * len(layout.all_params)
        for index in layout.indices:
            active[index] = True
        unfinished = self.collector is not None and self.collector.unfinished_backward()
        self.close()
        self.layout, self.backend = layout, backend
        self.absent = torch.empty(0, device=layout.device)
        self.no_cells = torch.empty(0, dtype=torch.float64, device=layout.device)
        self.collector = backend.Collector(list(layout.all_params), active, self.absent)
        self.touched = HostArray(len(layout.params), torch.uint8)
        self.partials = torch.empty(layout.n_partials, dtype=torch.float64, device=layout.device)
        self._hyper = HostArray(
            len(groups) * len(HYPER_COLUMNS), torch.float64, (len(groups), len(HYPER_COLUMNS))
        )  # fmt: skip
        self._group_ids = HostArray(len(layout.params), torch.int32)
        self._group_ids.fill(layout.group_ids)
        self.path = backend.hot_path(list(layout.params), self._group_ids.tensor, layout.device)
        self._main_grads = None
        self._state = None
        self.unfinished_before = unfinished
        if self._watching:
            self.collector.watch_backward()

    def unfinished_backward(self) -> bool:
        """Whether a backward began writing gradients and did not end; a rebuilt layout does not forget it."""
        return self.unfinished_before or self.collector.unfinished_backward()

    def clear_grads(self) -> None:
        """Set every ``.grad`` to None, and with it forget an unfinished backward."""
        self.collector.clear_grads()
        self.forget_unfinished_backward()

    def forget_unfinished_backward(self) -> None:
        self.unfinished_before = False
        self.collector.reset_backward()

    def watch_backward(self) -> None:
        """From now on know of a backward that began and did not end."""
        self._watching = True
        if self.collector is not None:
            self.collector.watch_backward()

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        if self.collector is not None:
            self.collector.unwatch_backward()

    def forget_state(self) -> None:
        """The inner optimizer's state was replaced: take it up anew before it is next used."""
        self._state = None

    @property
    def main_grads(self) -> list[torch.Tensor]:
        if self._main_grads is None:
            self._main_grads = allocate_main_grads(self.layout)
            self.path.set_main_grads(self._main_grads)
        return self._main_grads

    def may_hold(self, held: Sequence[Piece], expected: int | None, stored: bool) -> bool:
        """Whether a window that holds these pieces may hold one more."""
        if not held:
            return True
        stored = stored or self._main_grads is not None
        return len(held) < self._deferral.micro_batches(self.layout, held[-1].nbytes, expected, stored)

    def note_held(self, held: Sequence[Piece]) -> None:
        """Keep the peaks of the memory report."""
        self._deferral.note(held, self.layout, self._main_grads is not None)

    def bytes_to_come(self) -> int:
        """What windows will take beside one micro-batch's gradients and has not been allocated yet."""
        main_grads = self.layout.main_grad_bytes if self._main_grads is None else 0
        return main_grads + self._deferral.most(self.layout)

    def memory_report(self, held: Sequence[Piece]) -> MemoryReport:
        main_params, state = memory.state_bytes(self._state)
        return MemoryReport(
            elements=memory.elements(self.layout),
            main_grads=0 if self._main_grads is None else self.layout.main_grad_bytes,
            held_grads=sum(piece.nbytes for piece in held),
            peak_held_grads=self._deferral.peak_held,
            main_params=main_params,
            state=state,
            tables=memory.table_bytes(self.layout, self.partials),
            peak_window=self._deferral.peak,
            defer_bytes=self._deferral.budget(self.layout) if self.options.defer == "auto" else 0,
        )

    @property
    def state(self) -> RuleState:
        """State of the fused rule, made or taken up from the inner optimizer at first use."""
        state = self._state
        if state is not None and not state.is_in(self.inner):
            state = None
        late_momentum = (
            state is not None
            and not state.with_momentum
            and any(group.get("momentum") for group in self.inner.param_groups)
        )
        if state is None or late_momentum:
            assert self.rule is not None
            with torch.no_grad():
                state = RuleState(
                    self.inner, self.layout, self.rule, self.options.master_weights, self.backend.StateRecord
                )  # fmt: skip
            self.path.set_state(self.rule.name, state.main_params, state.exp_avgs, state.exp_avg_sqs, state.steps)
            self._state = state
        return state

    @property
    def memory(self) -> tuple[Any, ...]:
        """What the passes of a window read and write besides parameters and gradients; other objects once exchanged."""
        return self.path, self.partials, self._main_grads, self._state

    @property
    def has_state(self) -> bool:
        """Whether state was made, by numbers alone: what somebody exchanged is found before it is next used."""
        listed = sum(len(group["params"]) for group in self.inner.param_groups)
        known = self._state is not None and len(self.inner.state) == self._state.entries
        return known and listed == len(self.layout.all_params)

    # -- host values ---------------------------------------------------------------------------------------------

    def host_value(self, tensor: torch.Tensor) -> float | None:
        return self.backend.host_value(tensor)

    def read_flag(self, tensor: torch.Tensor) -> float | None:
        """A device scalar if reading it costs no sync: on the host; None elsewhere."""
        if tensor.device.type != "cpu":
            return None
        known = self.backend.host_value(tensor)
        return float(tensor) if known is None else known

    def learning_rates(self) -> tuple[Scalar, ...]:
        rates: list[Scalar] = []
        for group in self.inner.param_groups:
            lr = group.get("lr", 0.0)  # an optimizer of its own kind may have none
            if isinstance(lr, torch.Tensor):
                known = self.backend.host_value(lr)
                lr = lr.detach().clone() if known is None else known
            rates.append(lr)
        return tuple(rates)

    def nonfinite_params(self, pieces: Sequence[Piece], factors: Sequence[Scalar], stored: bool) -> list[int]:
        """Indices of the parameters whose accumulated gradient is not finite. Syncs."""
        weights = self._weights.tensor(factors)
        grads = [piece.tensors(self.absent) for piece in pieces]
        bad = []
        for k, index in enumerate(self.layout.indices):
            main_grad = self.main_grads[k] if stored else None
            dtype = math_dtype(self.layout.params[k].dtype)
            grad = gathered_gradient(main_grad, [tensors[k] for tensors in grads], weights, dtype)
            if grad is not None and not bool(torch.isfinite(grad).all()):
                bad.append(index)
        return bad

    # -- passes --------------------------------------------------------------------------------------------------

    def flush(self, pieces: Sequence[Piece], factors: Sequence[Scalar], overwrite: bool) -> None:
        """Add pieces to the main grads; no norm."""
        _ = self.main_grads
        self.path.accumulate(
            pieces, self._weights.tensor(factors), self.no_cells, self.no_cells,
            overwrite=overwrite, store=True, norm_type=2.0,
        )  # fmt: skip

    def measure(self, pieces: Sequence[Piece], factors: Sequence[Scalar], stored: bool, store: bool) -> Cells:
        """The norm's partials and found_inf over the stored sum plus ``pieces``.

        Args:
            pieces: Gradients not in the main grads yet; with ``store`` they are added to them in the same pass.
            factors: Their weights.
            stored: Whether the main grads hold earlier micro-batches of this window.
            store: Whether the main grads are needed afterwards.
        """
        cells = Cells(*self.path.window_cells(torch.float64 in self.layout.sizes))
        norm_type = float(self.options.norm_type)
        if stored or store:
            _ = self.main_grads
        if not pieces:
            self.path.norm(self.partials, cells.found_inf, norm_type=norm_type)
            return cells
        self.path.accumulate(
            pieces, self._weights.tensor(factors), self.partials, cells.found_inf,
            overwrite=not stored, store=store, norm_type=norm_type,
        )  # fmt: skip
        return cells

    def clip(self, cells: Cells, counts: Sequence[Scalar], loss_scale: float) -> None:
        """Fill the cells: total_norm, clip_coef, multiplier, weight_sum."""
        if not any(isinstance(count, torch.Tensor) for count in counts):
            counts = [sum(float(count) for count in counts)]
        self.path.clip(
            self.partials, self._counts.tensor(counts), self._scale.fill([self.options.host_scale * loss_scale]),
            cells.total_norm, cells.clip_coef, cells.multiplier, cells.weight_sum,
            norm_type=float(self.options.norm_type), max_norm=self.options.max_norm,
        )  # fmt: skip

    def update(self, cells: Cells, pieces: Sequence[Piece], factors: Sequence[Scalar], stored: bool) -> None:
        """Run the fused rule on the stored sum plus ``pieces``."""
        state = self.state
        if state.main_params:
            everything = range(len(self.layout.params))
            for k in self.collector.changed() if state.followed else everything:
                if state.main_params[k].numel() > 0:
                    follow_param(state.main_params[k], self.layout.params[k])
            state.followed = True
        hyper, late = fill_hyper(self._hyper, self.inner.param_groups, self.backend.host_value)
        self.path.update(
            pieces, self._weights.tensor(factors), stored, hyper, late, self.touched.tensor,
            cells.multiplier, cells.found_inf, max_grad_value=self.options.max_value,
        )  # fmt: skip
        if state.main_params:
            self.collector.remember()
