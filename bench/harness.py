"""The protocol: warm up, interleave the paths, take medians, count operator events, count bytes by formula."""

from __future__ import annotations

import gc
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath

from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from .paths import Fused, Grads, Path, all_paths
from .shapes import Shape, elements

WARM_UP = 2  # windows: the first makes the state, the second finds every page mapped
MIN_REPEATS = 5
MAX_REPEATS = 100
OPERATORS = ("aten::", "gradacc_fused::")
SECTION = "bench: micro-step"


@dataclass(frozen=True)
class Row:
    """One path on one list of parameters.

    Attributes:
        params: Name of the list.
        k: Micro-batches in the window.
        m: How many of them our path may hold (its ``defer``).
        path: Name of the path.
        ms: Median time of a window, without the making of the gradients.
        ratio: ``ms`` over that of ``stock``; below 1 is faster.
        op_calls: Operator events in a window, nested ones counted.
        bytes_per_element: What our compiled path moves, by formula.
        gb_s: 1e9 bytes per second at that count.
    """

    params: str
    k: int
    m: int | None
    path: str
    ms: float
    ratio: float
    op_calls: int
    bytes_per_element: int | None
    gb_s: float | None


class Neighbours:
    """How many cores other processes keep busy while this object lives, by Linux's own accounts.

    A thread that waits for its core holds up every parallel operator by milliseconds: with one of two cores taken, a
    path of many small operators measured a hundred times slower.
    """

    def __init__(self) -> None:
        self._since, self._others = time.perf_counter(), self._read()

    @staticmethod
    def _read() -> float | None:
        accounts = FilePath("/proc/stat")
        if not accounts.exists():
            return None
        ticks = [int(number) for number in accounts.read_text().splitlines()[0].split()[1:9]]
        busy = sum(ticks) - ticks[3] - ticks[4]  # all but idle and waiting for a disk
        return busy / os.sysconf("SC_CLK_TCK") - time.process_time()

    def cores(self) -> float | None:
        """Cores on average; None where the system does not say."""
        others = self._read()
        if others is None or self._others is None:
            return None
        return max(0.0, others - self._others) / (time.perf_counter() - self._since)


class Stopwatch:
    """Adds up the time spent in its context."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._start = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.seconds += time.perf_counter() - self._start


def time_window(path: Path, grads: Grads) -> float:
    """Seconds of one window, without the making of the gradients."""
    watch = Stopwatch()
    path.window(grads, lambda: watch)
    return watch.seconds


def count_operator_calls(path: Path, grads: Grads) -> int:
    """Operator events of one window; autograd's own and annotations are not counted."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        path.window(grads, lambda: record_function(SECTION))
    return sum(event.name.startswith(OPERATORS) and _in_section(event) for event in profiler.events())


def _in_section(event: FunctionEvent | None) -> bool:
    while event is not None and event.name != SECTION:
        event = event.cpu_parent
    return event is not None


def window_bytes(k: int, m: int) -> int:
    """Bytes per element of a window: bf16 gradients and parameters, fp32 main grads, main params and moments.

    A pass over j held gradients reads 2j, and reads and writes the fp32 sum at 4 each; the first finds no sum to read.
    The closing pass only measures, so nothing is written, and the update reads the same again.
    """
    flushes = -(-k // m) - 1
    held = k - flushes * m
    flushed = flushes * (2 * m + 8) - (4 if flushes else 0)
    closing = 2 * held + (4 if flushes else 0)
    update = closing + 3 * 8 + 2  # main param and two moments read and written, the parameter written
    return flushed + closing + update


def time_paths(paths: Sequence[Path], grads: Grads, seconds: float) -> list[list[float]]:
    """Seconds of every repeat of each path.

    The paths take turns, so that a slow moment of the machine hits all alike. Their order changes, so that none always
    finds the caches as the same other one left them.
    """
    for path in paths:
        for _ in range(WARM_UP):
            path.window(grads)
    times: list[list[float]] = [[] for _ in paths]
    order = list(range(len(paths)))
    shuffle = random.Random(0).shuffle
    end = time.perf_counter() + seconds
    for repeat in range(MAX_REPEATS):
        if repeat >= MIN_REPEATS and time.perf_counter() > end:
            break
        shuffle(order)
        for index in order:
            times[index].append(time_window(paths[index], grads))
    return times


def measure(name: str, shapes: Sequence[Shape], k: int, grads: Grads, seconds: float) -> list[Row]:
    """Measure every path on one list of parameters.

    Args:
        name: What the rows call it.
        shapes: Of the parameters.
        k: Micro-batches in a window.
        grads: Gradients of at least k micro-batches. Read only.
        seconds: Go on repeating for this long, within MIN_REPEATS and MAX_REPEATS.
    """
    gc.collect()  # an optimizer is part of reference cycles: the paths of the last list would still hold their memory
    grads = grads[:k]
    paths = all_paths(shapes, k)
    medians = [statistics.median(times) for times in time_paths(paths, grads, seconds)]
    stock = next(median for path, median in zip(paths, medians, strict=True) if path.name == "stock")
    rows = []
    for path, median in zip(paths, medians, strict=True):
        known = isinstance(path, Fused) and path.backend == "cpu"  # the reference moves more than the formula says
        moved = window_bytes(k, path.m) if known else None
        speed = moved * elements(shapes) / median / 1e9 if moved is not None else None
        calls = count_operator_calls(path, grads)
        rows.append(Row(name, k, path.m, path.name, median * 1e3, median / stock, calls, moved, speed))
    return rows
