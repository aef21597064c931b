"""Measure groups of paths that take turns, and make their rows: time, events, bytes by formula, share of the triad."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch

from gradacc_fused.floor import floor, stock
from gradacc_fused.report.events import Events, count, section
from gradacc_fused.report.paths import Fused, Grads, Path, Stock, make_optimizer
from gradacc_fused.report.timing import Neighbours, Run, Seconds, Stopwatches, take_turns, timed

from . import triad
from .paths import Maker, make_params
from .shapes import Shape, elements

SUMS = ("flush_first", "flush", "closing")
FAMILY_BYTES = 7e9  # what paths that take turns may hold together: memory that was never touched can be slow to get


@dataclass(frozen=True)
class Row:
    """One path, or one pass of ours, on one list of parameters.

    Attributes:
        params: Name of the list.
        k: Micro-batches in the window; None where there is no window.
        m: How many of them our path may hold (its ``defer``).
        path: Name of the path or pass.
        ms: Median time of a window or pass, without the making of the gradients.
        ratio: ``stock``'s ms over this one's, both of the same turns: 4.0 is four times faster. None for passes.
        op_calls: Operator events, nested ones counted.
        tensors: Allocations of tensors' memory, as the profiler saw them; see report.events.
        bytes_per_element: What must be moved, by gradacc_fused.floor; None where there is no formula.
        gb_s: 1e9 bytes per second at that count.
        triad_share: ``gb_s`` over the triad's of the same turns. Above 1 where tensors stay in a cache.
    """

    params: str
    k: int | None
    m: int | None
    path: str
    ms: float
    ratio: float | None
    op_calls: int
    tensors: int
    bytes_per_element: float | None
    gb_s: float | None
    triad_share: float | None


@dataclass
class Result:
    """A row and the seconds of each repeat, for pytest-benchmark to take statistics of."""

    row: Row
    samples: list[float]
    neighbours: float | None = None  # cores that other processes used


@dataclass
class Turn:
    """One thing that takes turns with the others of its group."""

    run: Run
    rows: list[Part] = field(default_factory=list)


@dataclass(frozen=True)
class Part:
    """What a turn's times become: a row over the sum of some of its parts; none named: all."""

    path: str
    k: int | None
    m: int | None
    moved: float | None  # bytes per element
    events: Callable[[], Events]
    parts: tuple[str, ...] = ()


def _seconds(samples: Mapping[str, list[float]], parts: Sequence[str]) -> list[float]:
    return [sum(repeat) for repeat in zip(*(samples[part] for part in parts or samples), strict=True)]


def measure(name: str, size: int, turns: Sequence[Turn], seconds: float) -> list[Result]:
    """Let turns and the triad take turns, and make the rows.

    Args:
        name: Of the parameter list.
        size: Its elements.
        turns: What to measure. Those of several rows give each its own.
        seconds: Go on repeating for this long.
    """
    neighbours = Neighbours()
    bandwidth = None if triad.unavailable_reason() else triad.shared()
    runs = [turn.run for turn in turns] + ([bandwidth] if bandwidth else [])
    samples = take_turns(runs, seconds)
    speed = None
    loops: list[list[float]] = []
    if bandwidth:
        loops = sorted(samples.pop().values(), key=statistics.median)  # the better loop first
        speed = bandwidth.moved / statistics.median(loops[0]) / 1e9
    found = []
    for turn, times in zip(turns, samples, strict=True):
        for part in turn.rows:
            repeats = _seconds(times, part.parts)
            median = statistics.median(repeats)
            gb_s = None if part.moved is None else part.moved * size / median / 1e9
            events = part.events()
            share = None if gb_s is None or speed is None else gb_s / speed
            row = Row(
                name, part.k, part.m, part.path, median * 1e3, None, events.operators, events.tensors, part.moved, gb_s,
                share,
            )  # fmt: skip
            found.append(Result(row, repeats))
    if speed is not None:
        row = Row(name, None, None, "triad", statistics.median(loops[0]) * 1e3, None, 0, 0, triad.BYTES, speed, 1.0)
        found.append(Result(row, loops[0]))
    cores = neighbours.cores()
    for result in found:
        result.neighbours = cores
    return found


# -- windows -------------------------------------------------------------------------------------------------------


def window_turn(path: Path, grads: Grads) -> Turn:
    """A path's whole window."""
    size = sum(param.numel() for param in path.params)

    def run() -> Seconds:
        watches = Stopwatches()
        path.window(grads, watches)
        return watches.seconds

    @cache
    def events() -> Events:
        sections = count(lambda: path.window(grads, section))
        return sum((found for part, found in sections.items() if part), Events())

    moved = path.bytes()
    return Turn(run, [Part(path.name, path.k, path.m, None if moved is None else moved / size, events)])


def families(makers: Mapping[str, Maker], size: int) -> list[list[str]]:
    """Names of the paths that share turns: as many as fit in memory beside the stock path, in order."""
    found: list[list[str]] = []
    free = 0.0
    for name, make in makers.items():
        needs = size * getattr(make, "footprint", Path.footprint)
        if not found or needs > free:
            found.append([])
            free = FAMILY_BYTES - size * Stock.footprint
        found[-1].append(name)
        free -= needs
    return found or [[]]


def measure_windows(
    name: str, shapes: Sequence[Shape], k: int, grads: Grads, makers: Mapping[str, Maker], seconds: float
) -> dict[str, Result]:
    """Measure windows of k micro-batches.

    Args:
        name: Of the parameter list.
        shapes: Of the parameters.
        k: Micro-batches in a window.
        grads: Gradients of at least k micro-batches. Read only.
        makers: Paths by name, without ``stock``, which is in every family.
        seconds: Repeat for this long per family.

    Returns:
        Results by name, and "stock", that of the first family.
    """
    found: dict[str, Result] = {}
    stock_turn = window_turn(Stock(make_params(shapes), k), grads[:k])
    for family in families(makers, elements(shapes)):
        gc.collect()  # an optimizer is part of reference cycles: the last paths would still hold their memory
        turns = [stock_turn, *(window_turn(makers[key](make_params(shapes), k), grads[:k]) for key in family)]
        results = measure(name, elements(shapes), turns, seconds)
        stock_ms = results[0].row.ms
        for key, result in zip(["stock", *family], results, strict=False):  # the triad is the last
            result.row = replace(result.row, ratio=stock_ms / result.row.ms)
            found.setdefault(key, result)
        del turns
    return found


# -- passes --------------------------------------------------------------------------------------------------------


def stage_turn(path: Fused, grads: Grads) -> Turn:
    """The passes of real windows of our path, each by itself."""

    def run() -> Seconds:
        watches = Stopwatches()
        with path.stages():
            path.window(grads, watches)
        return watches.each()

    @cache
    def events() -> dict[str, Events]:
        with path.stages():
            return count(lambda: path.window(grads, section))

    assert path.m is not None
    table = floor(path.k, path.m)
    parts = []
    for stage in (*SUMS, "update"):
        moved = None if path.backend == "reference" else table.row(stage).bytes_per_element
        parts.append(Part(stage, path.k, path.m, moved, lambda stage=stage: events()[stage], (stage,)))
    return Turn(run, parts)


def fused_adamw_turn(shapes: Sequence[Shape]) -> Turn:
    """torch's fused AdamW on fp32 parameters of the same sizes: what our update's bandwidth is held against."""
    params = [torch.nn.Parameter(param.detach().float()) for param in make_params(shapes)]
    for param in params:
        param.grad = torch.full_like(param, 0.01)
    optimizer = make_optimizer("adamw", params, 1e-3, fused=True)
    moved = stock(1, torch.float32, torch.float32).row("update").bytes_per_element
    part = Part("torch_fused_adamw", None, None, moved, lambda: count(optimizer.step)[""])
    return Turn(timed(optimizer.step, "step"), [part])


def measure_stages(name: str, shapes: Sequence[Shape], m: int, grads: Grads, seconds: float) -> dict[str, Result]:
    """Measure the passes of our windows beside torch's fused AdamW and the triad, all in the same turns.

    A window of 3 m micro-batches has one of each pass: a first flush, a further one, the closing one and the update.

    Returns:
        Results by name: "flush_first", "flush", "closing", "update", "torch_fused_adamw", "triad". The ``m`` of the
        last two says whose turns they took.
    """
    gc.collect()
    path = Fused(make_params(shapes), 3 * m, m=m)
    turns = [stage_turn(path, [grads[j % len(grads)] for j in range(path.k)]), fused_adamw_turn(shapes)]
    results = measure(name, elements(shapes), turns, seconds)
    for result in results:
        result.row = replace(result.row, m=m)
    return {result.row.path: result for result in results}
