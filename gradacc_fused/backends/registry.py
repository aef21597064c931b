"""Backends are rows of a table: asked for by name they obey or raise with the reason, else the first that can run."""

from __future__ import annotations

import importlib
import logging
import os
from dataclasses import dataclass
from functools import cache
from typing import cast

import torch

from ..errors import BackendUnavailableError
from .base import Backend

VARIABLE = "GRADACC_FUSED_BACKEND"
logger = logging.getLogger("gradacc_fused")


@dataclass(frozen=True)
class Row:
    """One backend: the devices it serves ("*": any) and the module that implements it, or why there is none."""

    name: str
    devices: tuple[str, ...]
    module: str | None
    absent: str = ""


# Documented order: the first row that serves the device and can run is taken.
ROWS = (
    Row("cuda", ("cuda",), f"{__package__}.cuda"),
    Row("triton", ("cuda",), f"{__package__}.triton"),
    Row("cpu", ("cpu",), f"{__package__}.cpu"),
    Row("reference", ("*",), f"{__package__}.reference"),
)


@dataclass(frozen=True)
class BackendStatus:
    """What ``gf.backends()`` says of one backend."""

    name: str
    available: bool
    devices: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: " + ("available" if self.available else f"not available: {self.reason}")


@cache
def _load(name: str) -> tuple[Backend | None, str]:
    """(module, "") or (None, reason)."""
    row = next(row for row in ROWS if row.name == name)
    if row.module is None:
        return None, row.absent
    module = cast(Backend, importlib.import_module(row.module))
    reason = module.unavailable_reason()
    return (module, "") if reason is None else (None, reason)


def backends() -> dict[str, BackendStatus]:
    """Every backend by name: whether it can run here and, where it cannot, the reason."""
    return {row.name: BackendStatus(row.name, *_status(row)) for row in ROWS}


def _status(row: Row) -> tuple[bool, tuple[str, ...], str]:
    module, reason = _load(row.name)
    return module is not None, row.devices, reason


def get(name: str, device: torch.device | None = None) -> Backend:
    """The backend called ``name``.

    Raises:
        ValueError: No such backend; the known ones are listed.
        BackendUnavailableError: It cannot run here, or does not serve ``device``.
    """
    row = next((row for row in ROWS if row.name == name), None)
    if row is None:
        raise ValueError(f"backend must be one of {', '.join(row.name for row in ROWS)}, got {name!r}.")
    module, reason = _load(name)
    if module is None:
        raise BackendUnavailableError(f"backend {name!r} was asked for and cannot run here: {reason}")
    if device is not None and "*" not in row.devices and device.type not in row.devices:
        raise BackendUnavailableError(
            f"backend {name!r} was asked for but the parameters are on {device}; it serves {', '.join(row.devices)}. "
            "Move the parameters, or leave backend unset."
        )
    return module


@cache
def _announce(name: str, device_type: str) -> None:
    logger.info("backend %s chosen for %s", name, device_type)


def choose(device: torch.device, name: str | None = None) -> Backend:
    """The backend for a device: ``name``, else ``GRADACC_FUSED_BACKEND``, else the first row that can run."""
    name = name or os.environ.get(VARIABLE) or None
    if name is not None:
        return get(name, device)
    for row in ROWS:
        if "*" in row.devices or device.type in row.devices:
            module, _ = _load(row.name)
            if module is not None:
                _announce(row.name, device.type)
                return module
    raise BackendUnavailableError(f"no backend serves {device}.")
