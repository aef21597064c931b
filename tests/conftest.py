"""Fixtures: a test that takes ``backend`` runs on each backend that is here; ``compiled`` needs the extension."""

from __future__ import annotations

import pytest
import torch

import gradacc_fused as gf

AVAILABLE = [name for name, status in gf.backends().items() if status.available]
COMPILED = "cpu" in AVAILABLE


@pytest.fixture(params=AVAILABLE)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def ops(backend: str):
    """The four ops of a backend, called as the schema says."""
    from gradacc_fused.backends import registry

    return registry.get(backend)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(1234)


@pytest.fixture(autouse=True)
def no_forced_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADACC_FUSED_BACKEND", raising=False)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not COMPILED:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("compiled")])
        items[:] = [item for item in items if not item.get_closest_marker("compiled")]


def pytest_report_header(config: pytest.Config) -> str:
    return f"torch {torch.__version__}, backends: {', '.join(AVAILABLE)}"
