"""What it costs the host to take one micro-batch's gradients: our collection beside a loop in Python.

Parameters have one element each, so bytes do not matter, and gradients are made by ``torch.autograd.backward`` before
each sample, untimed. Ours is ``opt.step()`` of a micro-batch that neither closes its window nor is flushed: everything
the host does for it. All paths keep the gradients until the window's end, where they are freed untimed; Python's own
garbage collector is off meanwhile, which spares the loops the walks over what they hold.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

import gradacc_fused as gf

from . import plots, study
from .paths import make_params
from .points import make_source

TITLE = "Taking the gradients of one micro-batch: host microseconds"
COUNTS, QUICK_COUNTS = (100, 1_000, 10_000), (100, 1_000)
WINDOW = 8  # micro-batches until what is held is freed
OURS = "ours"
COLUMNS = ("parameters", "path", "us", "low_us", "high_us", "first_us", "ns_per_parameter", "ours_is_faster_by")


@dataclass(frozen=True)
class Row:
    """One way to take the gradients of so many parameters.

    Attributes:
        parameters: How many.
        path: Name of the path.
        us: Median of a micro-batch that is not its window's first.
        low_us: First quartile.
        high_us: Third quartile.
        first_us: Median of the window's first: ours opens the window there.
        ns_per_parameter: ``us`` in nanoseconds per parameter.
        ours_is_faster_by: ``us`` over that of ours.
    """

    parameters: int
    path: str
    us: float
    low_us: float
    high_us: float
    first_us: float
    ns_per_parameter: float
    ours_is_faster_by: float


class Taker:
    """A way to take gradients; ``take`` is timed, ``drop`` is not.

    Args:
        params: Of its own.
    """

    name: str

    def __init__(self, params: list[torch.Tensor]) -> None:
        self.params = params
        self.held: list[list[torch.Tensor | None]] = []

    def take(self) -> None:
        """Take the gradients in ``.grad`` and clear it."""
        raise NotImplementedError

    def drop(self) -> None:
        """Free what was taken."""
        self.held.clear()


class Ours(Taker):
    """The optimizer's own, in counting mode, holding every micro-batch of a window that is never closed."""

    name = OURS

    def __init__(self, params: list[torch.Tensor]) -> None:
        super().__init__(params)
        self.optimizer = gf.GradAccumOptimizer(
            torch.optim.AdamW(params), accumulation_steps=WINDOW + 1, weighting="equal", defer=WINDOW + 1
        )
        if self.optimizer.backend != "cpu":
            raise SystemExit(
                f"collector_cost: the backend here is '{self.optimizer.backend}', whose collector is a Python loop and "
                "holds nothing. Build the compiled backend, or see 'gradacc-fused doctor' for why it is not here."
            )

    def take(self) -> None:
        self.optimizer.step()

    def drop(self) -> None:
        self.optimizer.discard()


class PlainLoop(Taker):
    """The shortest loop: read, append, clear."""

    name = "Python loop"

    def take(self) -> None:
        grads = []
        for param in self.params:
            grads.append(param.grad)
            param.grad = None
        self.held.append(grads)


class CheckedLoop(Taker):
    """The loop that a package would ship: a missing gradient, its dtype and layout are looked at, and who took part."""

    name = "Python loop with checks"

    def __init__(self, params: list[torch.Tensor]) -> None:
        super().__init__(params)
        self.touched = [False] * len(params)

    def take(self) -> None:
        grads: list[torch.Tensor | None] = []
        for index, param in enumerate(self.params):
            grad = param.grad
            if grad is None:
                grads.append(None)
                continue
            if grad.layout != torch.strided or grad.dtype != param.dtype:
                grad = grad.to_dense().to(param.dtype)
            self.touched[index] = True
            grads.append(grad)
            param.grad = None
        self.held.append(grads)


TAKERS: tuple[Callable[[list[torch.Tensor]], Taker], ...] = (Ours, PlainLoop, CheckedLoop)


def sampler(taker: Taker, grads: Sequence[torch.Tensor]) -> Callable[[], list[float]]:
    """A callable that runs one window and returns the microseconds of each of its micro-batches."""

    def window() -> list[float]:
        times = []
        for _ in range(WINDOW):
            torch.autograd.backward(taker.params, grads)
            start = time.perf_counter()
            taker.take()
            times.append(1e6 * (time.perf_counter() - start))
        taker.drop()
        return times

    return window


def operator_events(taker: Taker, grads: Sequence[torch.Tensor]) -> int:
    """Events of our operators while a window's micro-batches are taken: 0 says that nothing was flushed."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        sampler(taker, grads)()
    return sum(event.name.startswith("gradacc_fused::") for event in profiler.events())


def measure(count: int, repeats: int) -> list[Row]:
    """Measure every path with ``count`` parameters, in turns."""
    shapes = [(1,)] * count
    grads = make_source(shapes)
    takers = [make(make_params(shapes)) for make in TAKERS]
    events = operator_events(takers[0], grads)
    if events:
        raise RuntimeError(f"collector_cost: {events} operator events in micro-batches that should only be held.")
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        taken: list[list[list[float]]] = study.take_turns([sampler(taker, grads) for taker in takers], repeats)
    finally:
        if was_enabled:
            gc.enable()
    later = [study.Spread.of([us for window in windows for us in window[1:]]) for windows in taken]
    rows = []
    for taker, windows, spread in zip(takers, taken, later, strict=True):
        first = statistics.median(window[0] for window in windows)
        rows.append(
            Row(
                count, taker.name, spread.median, spread.low, spread.high, first, 1e3 * spread.median / count,
                spread.median / later[0].median,
            )
        )  # fmt: skip
    return rows


def draw(rows: Sequence[Row], folder: Path, where: study.Environment) -> Path:
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        series.setdefault(row.path, []).append((row.parameters, row.us))
    return plots.curves(
        folder / "collector_cost.png", TITLE, study.machine_line(where), "parameters of one element",
        "microseconds per micro-batch", series,
    )  # fmt: skip


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    return study.parser("collector_cost", TITLE).parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Run the study and return the rows that were printed."""
    options = parse(arguments)
    study.require(plot=options.plot is not None)
    where = study.environment()
    repeats = options.repeats or (study.MIN_REPEATS if options.quick else 15)
    rows: list[Row] = []
    for count in QUICK_COUNTS if options.quick else COUNTS:
        rows += measure(count, repeats)
        study.free_memory()
    study.show(TITLE, rows, COLUMNS, ("parameters",), where)
    study.write(options, rows, where, repeats=repeats)
    if options.plot:
        print(draw(rows, options.plot, where))
    return rows


if __name__ == "__main__":
    main()
