"""Compiled extensions: one that is not here is told, and never keeps the package from being imported."""

from __future__ import annotations

import importlib
from typing import Any

from .. import checks, layout


def load(name: str) -> tuple[Any, ImportError | None]:
    """The extension ``gradacc_fused.<name>``, or None with the reason."""
    try:
        return importlib.import_module(f"gradacc_fused.{name}"), None
    except ImportError as error:
        return None, error


def is_of_this_version(extension: Any) -> bool:
    """Whether it was compiled with the numbers that the Python files have."""
    return bool(layout.CHUNK == extension.CHUNK and len(checks.HYPER_COLUMNS) == extension.HYPER_COLUMNS)
