"""What planning a logical batch costs the host, beside the least a loader does: sort by length, cut every n samples."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import gradacc_fused as gf

from . import plots, study

TITLE = "Planning a logical batch: host milliseconds"
COUNTS, QUICK_COUNTS = (100, 1_000, 10_000), (100, 1_000)
LONGEST, MAX_SAMPLES, MAX_TOKENS = 2048, 64, 16384
COLUMNS = ("samples", "layout", "strategy", "max_shapes", "pieces", "ms", "low_ms", "high_ms", "to_sort")


@dataclass(frozen=True)
class Row:
    """One way to plan.

    Attributes:
        samples: In the logical batch, of 1 to 2,048 tokens.
        layout: Of the limits (64 samples, 16,384 tokens).
        strategy: "in_order" or "balanced".
        max_shapes: Bound on distinct shapes; 0: none.
        pieces: That came out, for 8 ranks.
        ms: Median.
        low_ms: First quartile.
        high_ms: Third quartile.
        to_sort: ``ms`` over sorting and cutting every 64 samples.
    """

    samples: int
    layout: str
    strategy: str
    max_shapes: int
    pieces: int
    ms: float
    low_ms: float
    high_ms: float
    to_sort: float


def lengths_of(samples: int) -> list[int]:
    draw = random.Random(0)
    return [draw.randint(1, LONGEST) for _ in range(samples)]


def planned(lengths: Sequence[int], layout: str, strategy: str, max_shapes: int) -> gf.Plan:
    return gf.plan_batch(
        lengths, limits=gf.Limits(max_samples=MAX_SAMPLES, max_tokens=MAX_TOKENS, layout=layout),
        counts={"active_tokens": lengths}, strategy=strategy, max_shapes=max_shapes or None, world_size=8,
    )  # fmt: skip


def sort_and_cut(lengths: Sequence[int]) -> list[list[int]]:
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    return [order[start : start + MAX_SAMPLES] for start in range(0, len(order), MAX_SAMPLES)]


def timed(run: Callable[[], object]) -> Callable[[], float]:
    def sample() -> float:
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3

    return sample


def measure(samples: int, repeats: int) -> list[Row]:
    """All ways and the sort, in turns."""
    lengths = lengths_of(samples)
    ways = [
        (layout, strategy, shapes)
        for layout in ("padded", "packed")
        for strategy in ("in_order", "balanced")
        for shapes in (0, 4)
    ]
    runs = [timed(lambda way=way: planned(lengths, *way)) for way in ways]  # type: ignore[misc]
    *taken, sort = study.take_turns([*runs, timed(lambda: sort_and_cut(lengths))], repeats)
    base = study.Spread.of(sort).median
    rows = []
    for way, samples_ms in zip(ways, taken, strict=True):
        spread = study.Spread.of(samples_ms)
        pieces = len(planned(lengths, *way).pieces)
        rows.append(Row(samples, *way, pieces, spread.median, spread.low, spread.high, spread.median / base))
    return rows


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Run the study and return the rows that were printed."""
    options = study.parser("plan_cost", TITLE).parse_args(arguments)
    study.require(plot=options.plot is not None)
    where = study.environment()
    repeats = options.repeats or (study.MIN_REPEATS if options.quick else 30)
    rows = [row for count in (QUICK_COUNTS if options.quick else COUNTS) for row in measure(count, repeats)]
    study.show(TITLE, rows, COLUMNS, ("samples",), where)
    study.write(options, rows, where, repeats=repeats)
    if options.plot:
        series: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            name = f"{row.layout}, {row.strategy}" + (f", {row.max_shapes} shapes" if row.max_shapes else "")
            series.setdefault(name, []).append((row.samples, row.ms))
        path, machine = options.plot / "plan_cost.png", study.machine_line(where)
        print(plots.curves(path, TITLE, machine, "samples in the logical batch", "milliseconds", series))
    return rows


if __name__ == "__main__":
    main()
