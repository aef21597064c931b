"""The published path: an inner optimizer without a fused rule runs its own step on the accumulated gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from .buffers import Cells
from .engine import Engine
from .layout import Layout
from .rules import MAIN_PARAM, adopt_main_param, follow_param, needs_main_param


class Publisher:
    """Publishes main grads, scaled and clipped, as ``.grad``; low-precision parameters step through fp32 main params.

    Args:
        engine: Whose inner optimizer, layout and main grads are used.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._layout: Layout | None = None
        self._followed = False  # whether main params were compared with their parameters since they were taken up
        self._main_params: list[torch.Tensor | None] = []  # of the layout's parameters
        self._known: dict[torch.Tensor, torch.Tensor] = {}  # of all there ever were: freezing loses nothing

    @torch.no_grad()
    def refresh_main_params(self) -> None:
        """One fp32 main param per low-precision parameter, kept over a change of layout, renewed where others wrote."""
        engine = self._engine
        if self._layout is not engine.layout:
            self._main_params = [
                self._main_param_of(param) if needs_main_param(param, engine.options.master_weights) else None
                for param in engine.layout.params
            ]
            self._layout, self._followed = engine.layout, False
        changed: Sequence[int] = engine.collector.changed()
        for k in changed if self._followed else range(len(engine.layout.params)):
            main_param = self._main_params[k]
            if main_param is not None:
                follow_param(main_param, engine.layout.params[k])
        self._followed = True

    def _main_param_of(self, param: torch.Tensor) -> torch.Tensor:
        if param not in self._known:
            fused = self._engine.inner.state.get(param, {}).pop(MAIN_PARAM, None)  # the rule may have been fused before
            self._known[param] = adopt_main_param(fused, param).requires_grad_()
        return self._known[param]

    def saved_main_params(self) -> list[torch.Tensor | None]:
        """The main params that the published path holds, in layout order; none before its first step."""
        if self._layout is None:
            return []
        self.refresh_main_params()
        return self._main_params

    def restore_main_params(self, main_params: Sequence[torch.Tensor | None]) -> None:
        """Take over main params, one entry per active parameter (None: it has none)."""
        if not main_params:
            return
        with torch.no_grad():
            self._layout = None
            self.refresh_main_params()
            for mine, saved in zip(self._main_params, main_params, strict=True):
                if mine is not None and saved is not None:
                    mine.copy_(saved)
            self._followed = False

    @contextmanager
    def stand_ins(self) -> Iterator[None]:
        """Main params stand in for their parameters in the inner optimizer's groups and state."""
        inner = self._engine.inner
        of_param = {
            param: main_param
            for param, main_param in zip(self._engine.layout.params, self._main_params, strict=True)
            if main_param is not None
        }
        of_main = {main_param: param for param, main_param in of_param.items()}
        lists = [group["params"] for group in inner.param_groups]
        for group in inner.param_groups:
            group["params"] = [of_param.get(param, param) for param in group["params"]]
        for param in list(inner.state):
            if param in of_param:
                inner.state[of_param[param]] = inner.state.pop(param)
        try:
            yield
        finally:
            for group, params in zip(inner.param_groups, lists, strict=True):
                group["params"] = params
            for main_param in list(inner.state):
                if main_param in of_main:
                    inner.state[of_main[main_param]] = inner.state.pop(main_param)

    def is_probe(self) -> bool:
        """Whether a step is a call for the state to be made: no state, lr 0 and nothing but zero gradients.

        torch.distributed.checkpoint makes one before it reads a state dict. It neither counts nor fires hooks. Fused
        rules never come here: their state is made when it is read.
        """
        inner = self._engine.inner
        if self._engine.rule is not None or inner.state:
            return False
        if not all("lr" in group and float(group["lr"]) == 0.0 for group in inner.param_groups):
            return False
        grads = [param.grad for group in inner.param_groups for param in group["params"] if param.grad is not None]
        return bool(grads) and not any(bool(grad.any()) for grad in grads)

    def probe(self) -> None:
        """Run the inner optimizer's step on zero gradients, for a caller that wants its state made."""
        self.refresh_main_params()
        for main_param in self._main_params:
            if main_param is not None:
                main_param.grad = torch.zeros_like(main_param)
        with self.stand_ins():
            self._engine.inner.step()
        for main_param in self._main_params:
            if main_param is not None:
                main_param.grad = None

    def step(self, cells: Cells) -> None:
        """Publish what the main grads hold and run the inner optimizer's step. ``.grad`` is left as it was before."""
        engine = self._engine
        params = engine.layout.params
        self.refresh_main_params()
        kept = [param.grad for param in params]
        bound = engine.options.max_value
        try:
            for k, param in enumerate(params):
                param.grad = None
                if not engine.touched.values[k]:
                    continue
                grad = engine.main_grads[k].mul_(cells.multiplier).clamp_(-bound, bound)
                main_param = self._main_params[k]
                target = param if main_param is None else main_param
                target.grad = grad.to(target.dtype, copy=True)  # an optimizer may keep what it is given
            with self.stand_ins():
                engine.inner.step()
        finally:
            # Where the inner step raised midway, what it did to main params shows in the parameters, as in torch.
            for param, stepped in zip(params, self._main_params, strict=True):
                if stepped is not None and stepped.grad is not None:
                    param.copy_(stepped)
                    stepped.grad = None
            for param, before in zip(params, kept, strict=True):
                param.grad = before
            engine.collector.remember()
