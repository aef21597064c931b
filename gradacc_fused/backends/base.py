"""The contract every backend keeps: four ops with one meaning, a collector, the way in, and host scalars.

A backend is a module with these names. Adding one: write the module, add its row to registry.py, run the suite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Backend(Protocol):
    """What the optimizer calls. Op arguments are those of the schemas in ``_ops.py``, in the same order."""

    __name__: str

    def unavailable_reason(self) -> str | None:
        """None where the backend can run; else a sentence that says what is missing and what to do."""

    def accumulate_(self, *args: Any, **kwargs: Any) -> None: ...

    def norm_(self, *args: Any, **kwargs: Any) -> None: ...

    def clip_(self, *args: Any, **kwargs: Any) -> None: ...

    def update_(self, *args: Any, **kwargs: Any) -> None: ...

    def host_value(self, tensor: torch.Tensor) -> float | None:
        """The value of a one-element tensor if it lies in host memory and can be read without an operator call."""

    def hot_path(self, params: Sequence[torch.Tensor], group_ids: torch.Tensor, device: torch.device) -> Any:
        """The optimizer's own way into the passes: what ops_path.OpsPath does."""

    @property
    def Collector(self) -> Any: ...  # noqa: N802

    @property
    def StateRecord(self) -> Any: ...  # noqa: N802
