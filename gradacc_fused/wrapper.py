"""A torch.optim.Optimizer around another one: groups, state and defaults are the inner optimizer's own."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch


class Wrapper(torch.optim.Optimizer):
    """Base of an optimizer that has no groups or state of its own."""

    inner: torch.optim.Optimizer

    def _wrap(self, inner: torch.optim.Optimizer) -> None:
        # The base initialiser makes its hook tables and fills groups and state of its own: those of a stand-in, because
        # handed the inner's groups it would find every parameter "in more than one parameter group".
        self.inner = SimpleNamespace(param_groups=[], state=defaultdict(dict), defaults={})  # type: ignore[assignment]
        super().__init__([torch.empty(0)], {})
        self.inner = inner

    def _before_state_is_read(self) -> None:
        """The inner optimizer's state is about to be read."""

    def _after_state_was_replaced(self) -> None:
        """The inner optimizer has another state."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's groups."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """The inner optimizer's state, made before it is first read."""
        if isinstance(self.inner, torch.optim.Optimizer):
            self._before_state_is_read()
        return self.inner.state

    @state.setter
    def state(self, state: defaultdict[torch.Tensor, Any]) -> None:
        self.inner.state = state
        self._after_state_was_replaced()

    @property
    def defaults(self) -> dict[str, Any]:
        """The inner optimizer's defaults."""
        return self.inner.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.inner.defaults = defaults
