"""Step hooks fire once per real step, whatever the unchanged loop calls after every micro-batch."""

from __future__ import annotations

from itertools import chain
from typing import Any

from torch.optim import optimizer as torch_optimizer

GLOBAL: dict[str, dict[int, Any]] = {
    "pre": torch_optimizer._global_optimizer_pre_hooks,
    "post": torch_optimizer._global_optimizer_post_hooks,
}


def fire(optimizer: Any, when: str, published: bool) -> None:
    """Fire global hooks, the wrapper's and the inner optimizer's.

    Args:
        optimizer: The wrapper.
        when: "pre" or "post".
        published: Whether the inner optimizer's own step runs, which fires the global hooks and its own.
    """
    name = f"_optimizer_step_{when}_hooks"
    for hook in chain(() if published else GLOBAL[when].values(), getattr(optimizer, name).values()):
        hook(optimizer, (optimizer,), {})
    if not published:
        for hook in getattr(optimizer.inner, name).values():
            hook(optimizer.inner, (optimizer.inner,), {})
