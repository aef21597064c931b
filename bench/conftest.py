"""pytest-benchmark underneath: a group of paths is measured in turns, and each path's benchmark replays its samples.

pytest-benchmark alone would run one path after the other, and memory bandwidth drifts in between. So the first
benchmark of a group measures all of it, and each hands its path's real samples over by a timer that replays them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import pytest

from gradacc_fused.report.paths import make_grads

from . import peers, triad
from .harness import Result, measure_stages, measure_windows
from .paths import MS, TORCH, Maker, make_params, ours
from .shapes import PARAMETER_LISTS, elements

QUICK_LISTS, QUICK_KS = ("small", "lora", "gpt2"), (4, 1)
ALL_KS = (1, 4, 8)
QUICK_PATHS, QUICK_ELEMENTS = ("stock_copy", "plain"), 50_000_000  # beside ours and stock, on lists larger than that
SECONDS = 2.0
OTHERS = TORCH | peers.PEERS


class Replay:
    """A timer for pytest-benchmark whose every second reading is one sample later."""

    __name__ = "replayed samples"

    def __init__(self) -> None:
        self._readings: list[float] = []

    def load(self, samples: Sequence[float]) -> None:
        self._readings = [reading for sample in reversed(samples) for reading in (sample, 0.0)]

    def __call__(self) -> float:
        return self._readings.pop()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("bench", "gradacc_fused benchmarks")
    group.addoption("--quick", action="store_true", help=f"{', '.join(QUICK_LISTS)} only, with k = 4 and 1")
    group.addoption("--params", action="append", choices=list(PARAMETER_LISTS), help="a parameter list; repeatable")
    group.addoption("--k", action="append", type=int, help="micro-batches in a window; repeatable")
    group.addoption("--seconds", type=float, default=SECONDS, help=f"repeat for this long per group ({SECONDS})")


def lists_of(config: pytest.Config) -> list[str]:
    return config.getoption("params") or list(QUICK_LISTS if config.getoption("quick") else PARAMETER_LISTS)


def ks_of(config: pytest.Config) -> list[int]:
    return config.getoption("k") or list(QUICK_KS if config.getoption("quick") else ALL_KS)


class Measurements:
    """Measures each group once, when its first benchmark asks; of its paths those that were not deselected."""

    def __init__(self, config: pytest.Config, items: Sequence[pytest.Item]) -> None:
        wanted = [
            item.callspec.params for item in items if isinstance(item, pytest.Function) and "path" in item.fixturenames
        ]
        self._wanted = {(each["params"], each["k"], each["path"]) for each in wanted}
        self._seconds = config.getoption("seconds")
        self._pieces = max(*ks_of(config), 4)
        self._say: Callable[[str], None] = _teller(config)
        self._windows: dict[tuple[str, int], dict[str, Result]] = {}
        self._stages: dict[tuple[str, int], dict[str, Result]] = {}
        self._grads: tuple[str, Any] = ("", None)

    def _grads_of(self, params: str) -> Any:
        if self._grads[0] != params:
            self._grads = ("", None)  # free the last list's first
            self._grads = (params, make_grads(make_params(PARAMETER_LISTS[params]()), self._pieces))
        return self._grads[1]

    def windows(self, params: str, k: int) -> dict[str, Result]:
        """Results of every path with k micro-batches, by name."""
        if (params, k) not in self._windows:
            shapes = PARAMETER_LISTS[params]()
            self._say(f"{params}: {len(shapes)} tensors, {elements(shapes):,} elements; windows of {k}")
            possible: dict[str, Maker] = ours(k) | {key: make for key, (make, why) in OTHERS.items() if why() is None}
            makers = {key: make for key, make in possible.items() if (params, k, key) in self._wanted}
            self._windows[params, k] = measure_windows(
                params, shapes, k, self._grads_of(params), makers, self._seconds
            )  # fmt: skip
        return self._windows[params, k]

    def stages(self, params: str, m: int) -> dict[str, Result]:
        """Results of every pass with so many micro-batches held, of torch's fused AdamW and of the triad, by name."""
        if (params, m) not in self._stages:
            self._say(f"{params}: passes over {m} micro-batch(es)")
            shapes = PARAMETER_LISTS[params]()
            self._stages[params, m] = measure_stages(params, shapes, m, self._grads_of(params), self._seconds)
        return self._stages[params, m]


def _teller(config: pytest.Config) -> Callable[[str], None]:
    """Prints a line of progress past pytest's capture of output."""
    manager = config.pluginmanager.get_plugin("capturemanager")

    def say(text: str) -> None:
        with manager.global_and_fixture_disabled() if manager else nullcontext():
            print(text, flush=True)

    return say


@pytest.fixture(scope="session")
def measurements(request: pytest.FixtureRequest) -> Measurements:
    return Measurements(request.config, request.session.items)


@pytest.fixture
def replay(benchmark: Any, request: pytest.FixtureRequest) -> Callable[[Result], None]:
    """Hand a result's samples to pytest-benchmark, and its row to the report."""

    def hand_over(result: Result) -> None:
        timer = request.node.get_closest_marker("benchmark").kwargs["timer"]
        timer.load(result.samples)
        benchmark.extra_info.update(asdict(result.row), neighbours=result.neighbours)
        benchmark.pedantic(lambda: None, rounds=len(result.samples), iterations=1)

    return hand_over


def _case(group: str, name: str, *values: Any, why: str | None = None) -> Any:
    marks = [pytest.mark.benchmark(timer=Replay(), group=group)]
    skips = [pytest.mark.skip(reason=f"{values[-1]}: {why}")] if why else []
    return pytest.param(*values, id=name, marks=[*marks, *skips])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    lists, ks = lists_of(metafunc.config), ks_of(metafunc.config)
    quick = metafunc.config.getoption("quick")
    if "path" in metafunc.fixturenames:
        windows = [
            _case(f"{params} k={k}", f"{params}-k{k}-{path}", params, k, path, why=_why_not(path, params, quick))
            for params in lists
            for k in ks
            for path in (*ours(k), "stock", *OTHERS)
        ]
        metafunc.parametrize(("params", "k", "path"), windows)
    elif "stage" in metafunc.fixturenames:
        passes = [
            _case(f"{params} passes, m={m}", f"{params}-m{m}-{stage}", params, m, stage, why=_why_not(stage, params))
            for params in lists
            for m in MS
            for stage in metafunc.module.PASSES
        ]
        metafunc.parametrize(("params", "m", "stage"), passes)


def _why_not(name: str, params: str, quick: bool = False) -> str | None:
    """Why something is not measured here; None where it is."""
    if name == "triad":
        return triad.unavailable_reason()
    if name not in OTHERS:
        return None
    if quick and name not in QUICK_PATHS and elements(PARAMETER_LISTS[params]()) > QUICK_ELEMENTS:
        return f"not in a --quick run on a list as large as {params}"
    return OTHERS[name][1]()
