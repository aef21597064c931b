"""Fixtures: a test that takes ``backend`` runs on each backend that is here; ``compiled`` needs the extension."""

from __future__ import annotations

import time

import pytest
import torch
from harness import cuda_on_cpu, triton_on_cpu

import gradacc_fused as gf
from gradacc_fused.backends import registry

# Last, after a row that serves everything: taken only by those who ask for it by name.
registry.ROWS = (
    *registry.ROWS,
    *(registry.Row(module.NAME, ("cpu",), module.__name__) for module in (cuda_on_cpu, triton_on_cpu)),
)
# Those that serve the tensors of the tests; on a machine with a GPU bench/device_check.py compares the others.
AVAILABLE = [name for name, status in gf.backends().items() if status.available and {"cpu", "*"} & {*status.devices}]
COMPILED = "cpu" in AVAILABLE


@pytest.fixture(params=AVAILABLE)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[name for name in AVAILABLE if not name.endswith("_on_cpu")])
def host_backend(request: pytest.FixtureRequest) -> str:
    """A backend that runs at full speed: for matrices of what the host does, with the same passes in every case."""
    return request.param


@pytest.fixture
def ops(backend: str):
    """The four ops of a backend, called as the schema says."""
    return registry.get(backend)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(1234)


@pytest.fixture(autouse=True)
def no_forced_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADACC_FUSED_BACKEND", raising=False)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time that passes in ``time.sleep`` alone, so that what a stopwatch saw has an exact answer."""
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "perf_counter", lambda: now)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not COMPILED:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("compiled")])
        items[:] = [item for item in items if not item.get_closest_marker("compiled")]


def pytest_report_header(config: pytest.Config) -> str:
    return f"torch {torch.__version__}, backends: {', '.join(AVAILABLE)}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for name in AVAILABLE:
        passed = [r for r in terminalreporter.getreports("passed") if f"[{name}" in r.nodeid or f"-{name}]" in r.nodeid]
        if passed:
            terminalreporter.write_line(f"{name}: {len(passed)} tests of the conformance suite passed")
