"""How a window's time grows with elements, with tensors, with k and with threads; ours beside stock torch.

- ``elements``: 10,000 to 500 million in 20 tensors, k = 4, m = 4. Where the paths do not fit into half of the available
  memory together, they are built one after the other, twice each; what does not fit alone is skipped, with the reason.
  At its peak a path of ours keeps 14 bytes per element, 2 per held micro-batch, and 4 for the sum where k > m; stock
  keeps 20; the gradients' source is 2 more for both.
- ``tensors``: 10 to 10,000 with 1,000,000 elements in all, k = 4, also by stage. Our passes ask nothing of a tensor but
  its address. Taking and freeing gradient tensors does grow with their number, whoever does it: it is a line of its own
  ("gradients"), beside the same in a Python loop that does nothing else.
- ``k``: 1 to 16 micro-batches, with m = 1 and m = 4.
- ``threads``: powers of two up to the cores, each in fresh processes that take turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from . import plots, study
from .points import GRADIENTS, PASSES, WINDOW, Kind, Point, Samples, Skipped, ours, stock, taking, time_point

TITLE = "Time of a window, without the making of its gradients"
ROOT = Path(__file__).resolve().parents[1]
K, TENSORS = 4, 20
MS = (4, 1)
ELEMENTS = (10_000, 100_000, 1_000_000, 10_000_000, 100_000_000, 500_000_000)
TENSOR_COUNTS, ELEMENTS_OF_TENSORS = (10, 100, 1_000, 10_000), 1_000_000
QUICK_TENSOR_COUNTS = (10, 1_000)
KS, ELEMENTS_OF_KS = (1, 2, 4, 8, 16), 10_000_000
ELEMENTS_OF_THREADS = (100_000, 1_000_000, 10_000_000)
PROCESSES = 3  # per number of threads
QUICK = 1_000_000  # the most elements of a quick run
CURVES = ("elements", "tensors", "k", "threads")
COLUMNS = (
    "curve", "elements", "tensors", "k", "threads", "path", "stage", "ms", "low_ms", "high_ms", "ns_per_element",
    "to_stock", "to_first",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One stage of one path at one point.

    Attributes:
        curve: "elements", "tensors", "k" or "threads": what changes.
        path: Name of the path.
        elements: In all tensors together.
        tensors: How many there are.
        k: Micro-batches in the window.
        threads: Of torch.
        stage: "window", or a part of it; see points.Ours.
        ms: Median time per window.
        low_ms: First quartile.
        high_ms: Third quartile.
        ns_per_element: ``ms`` in nanoseconds per element.
        to_stock: Over stock's window at the same point.
        to_first: Over the same path's stage at the curve's first point.
        in_turns: Whether the paths took turns; else one was in memory at a time.
    """

    curve: str
    path: str
    elements: int
    tensors: int
    k: int
    threads: int
    stage: str
    ms: float
    low_ms: float
    high_ms: float
    ns_per_element: float
    to_stock: float | None
    to_first: float | None
    in_turns: bool


class Study:
    """Collects the rows of the curves.

    Args:
        repeats: Rounds at each point.
        available: Bytes of memory that may be taken; None: ask the system before each point.
        largest: Most elements at a point.
    """

    def __init__(self, repeats: int, available: int | None = None, largest: int = max(ELEMENTS)) -> None:
        self.repeats = repeats
        self.available = available
        self.largest = largest
        self.rows: list[Row] = []
        self.skipped: list[Skipped] = []

    def elements(self, counts: Sequence[int] = ELEMENTS) -> None:
        for count in counts:
            if count > self.largest:
                for kind in (ours(K, K), stock()):
                    self.skipped.append(Skipped("elements", kind.name, count, f"more than {self.largest:,} elements"))
                continue
            self._point("elements", Point(count, TENSORS, K), [ours(K, K), stock()])

    def tensors(self, counts: Sequence[int] = TENSOR_COUNTS) -> None:
        elements = min(ELEMENTS_OF_TENSORS, self.largest)
        for count in counts:
            self._point("tensors", Point(elements, count, K), [*(ours(m, K) for m in MS), stock(), taking(K)])

    def k(self, counts: Sequence[int] = KS) -> None:
        elements = min(ELEMENTS_OF_KS, self.largest)
        for k in counts:
            self._point("k", Point(elements, TENSORS, k), [*(ours(m, k) for m in MS), stock()])

    def threads(self, counts: Sequence[int] | None = None, processes: int = PROCESSES) -> None:
        points = [Point(count, TENSORS, K) for count in ELEMENTS_OF_THREADS if count <= self.largest]
        counts = thread_counts() if counts is None else counts
        together: dict[tuple[int, Point], Samples] = {}
        for _ in range(processes):
            for threads in counts:
                for point, samples in zip(points, self._in_process(threads, points), strict=True):
                    merged = together.setdefault((threads, point), {path: [] for path in samples})
                    for path, rounds in samples.items():
                        merged[path] += rounds
        for (threads, point), samples in sorted(together.items(), key=lambda item: (item[0][1].elements, item[0][0])):
            self._add("threads", point, samples, threads, in_turns=True)

    def _point(self, curve: str, point: Point, kinds: Sequence[Kind]) -> None:
        where = f"{curve}: {point.elements:,} elements, {point.tensors:,} tensors, k = {point.k}"
        print(where, flush=True)
        available = self.available if self.available is not None else study.available_memory()
        samples, reasons, in_turns = time_point(point, kinds, self.repeats, available)
        for path, reason in reasons.items():
            print(f"  {path} is skipped: {reason}", flush=True)
            self.skipped.append(Skipped(curve, path, point.elements, reason))
        self._add(curve, point, samples, torch.get_num_threads(), in_turns)

    def _in_process(self, threads: int, points: Sequence[Point]) -> list[Samples]:
        """Samples of every point from a process of its own."""
        print(f"threads: {threads}", flush=True)
        order = json.dumps(
            {"threads": threads, "repeats": self.repeats, "points": [dataclasses.astuple(point) for point in points]}
        )
        done = subprocess.run(
            [sys.executable, "-m", "bench.scaling", "--worker", order], cwd=ROOT, capture_output=True, text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        )  # fmt: skip
        if done.returncode != 0:
            raise RuntimeError(f"bench.scaling with {threads} thread(s) failed:\n{done.stderr}")
        return json.loads(done.stdout.splitlines()[-1])

    def _add(self, curve: str, point: Point, samples: Samples, threads: int, in_turns: bool) -> None:
        stock_ms = statistics.median(sample[WINDOW] for sample in samples["stock"]) if "stock" in samples else None
        for path, rounds in samples.items():
            for stage in rounds[0]:
                spread = study.Spread.of([sample[stage] for sample in rounds])
                self.rows.append(
                    Row(
                        curve, path, point.elements, point.tensors, point.k, threads, stage, spread.median, spread.low,
                        spread.high, spread.median * 1e6 / point.elements,
                        spread.median / stock_ms if stock_ms else None,
                        self._to_first(curve, path, point, stage, spread.median), in_turns,
                    )
                )  # fmt: skip

    def _to_first(self, curve: str, path: str, point: Point, stage: str, ms: float) -> float | None:
        same = (
            row.ms
            for row in self.rows
            if (row.curve, row.path, row.stage) == (curve, path, stage)
            and (curve != "threads" or row.elements == point.elements)
        )
        first = next(same, ms)
        return ms / first if first > 0 else None


def thread_counts() -> list[int]:
    """1, 2, 4 ... up to the cores this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return [2**power for power in range(cores.bit_length()) if 2**power <= cores]


def work(order: str) -> None:
    """The process of one thread count: measure the points in ``order`` and print the samples as JSON."""
    said = json.loads(order)
    torch.set_num_threads(said["threads"])
    points = [Point(*numbers) for numbers in said["points"]]
    samples = [time_point(point, [ours(K, K), stock()], said["repeats"], None)[0] for point in points]
    print(json.dumps(samples))


# -- pictures ------------------------------------------------------------------------------------------------------


def draw(rows: Sequence[Row], folder: Path, where: study.Environment) -> list[Path]:
    """One picture per curve that was measured."""
    titles = {
        "elements": (f"elements ({TENSORS} tensors, k = {K})", "elements"),
        "tensors": (f"tensors ({{elements:,}} elements, k = {K}); broken lines: parts of it", "tensors"),
        "k": (f"k ({TENSORS} tensors, {{elements:,}} elements)", "k: micro-batches in the window"),
        "threads": (f"threads ({TENSORS} tensors, k = {K})", "threads"),
    }
    drawn = []
    for curve in dict.fromkeys(row.curve for row in rows):
        mine = [row for row in rows if row.curve == curve]
        series: dict[str, list[tuple[float, float]]] = {}
        for row in mine:
            if row.stage == WINDOW or (curve == "tensors" and row.stage in (PASSES, GRADIENTS)):
                series.setdefault(label(row), []).append((getattr(row, curve), row.ms))
        against, x_label = titles[curve]
        title = f"Time of a window against {against.format(elements=mine[0].elements)}"
        machine = study.machine_line(where, threads=curve != "threads")
        file = folder / f"scaling_{curve}.png"
        drawn.append(plots.curves(file, title, machine, x_label, "ms per window", series, log_x=curve != "threads"))
    return drawn


def label(row: Row) -> str:
    """The line that a row belongs to."""
    if row.curve == "threads":
        return f"{row.path}, {row.elements:,} elements"
    return row.path if row.stage == WINDOW else f"{row.path}: {row.stage}"


# -- program -------------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = study.parser("scaling", TITLE)
    parser.add_argument("--curve", action="append", choices=CURVES, help="a curve; repeatable (default: all)")
    parser.add_argument("--largest", type=int, help="most elements at a point")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Run the study and return its rows."""
    options = parse(arguments)
    if options.worker:
        work(options.worker)
        return []
    study.require(plot=options.plot is not None)
    where = study.environment()
    repeats = options.repeats or (study.MIN_REPEATS if options.quick else 9)
    done = Study(repeats, largest=options.largest or (QUICK if options.quick else max(ELEMENTS)))
    for curve in options.curve or CURVES:
        if curve == "tensors" and options.quick:
            done.tensors(QUICK_TENSOR_COUNTS)
        else:
            getattr(done, curve)()
    shown = [row for row in done.rows if row.stage == WINDOW or row.curve == "tensors"]
    study.show(TITLE, shown, COLUMNS, ("curve", "elements", "tensors", "k", "threads"), where)
    for skipped in done.skipped:
        print(f"skipped: {skipped.curve}, {skipped.elements:,} elements, {skipped.path}: {skipped.reason}")
    study.write(options, done.rows, where, repeats=repeats, skipped=[dataclasses.asdict(s) for s in done.skipped])
    if options.plot:
        print(*draw(done.rows, options.plot, where), sep="\n")
    return done.rows


if __name__ == "__main__":
    main()
