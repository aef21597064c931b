"""What accumulation, clip and update add to forward and backward: the demo's GPT at three sizes, micro-batch 1.

Every path has a copy of the model and the same micro-batches: ``k`` paragraphs of real text, one sequence each. Two
measurements of the same thing stand beside each other:

- ``overhead_ms``: a path's window minus the window that runs forward and backward alone and drops its gradients, in
  pairs of the same round. It has everything, also what holding gradients costs forward and backward, and it is a small
  difference of two large times: its quartiles say how much to believe.
- ``optimizer_ms``: the window without its forwards and backwards, by stopwatch, minus the same of forward and backward
  alone (it drops and frees its gradients there). It is steady, and it sees only what runs outside of them: taking
  gradients, main grads, clip, update.

bf16 parameters are the default. Their matrix products run in fp32, on weights widened in each forward: this is what a
CPU without bf16 instructions can do (native ones took 6 to 20 times as long on an AVX2 machine: ``--compute native``).
Parameters, gradients, and all that is measured here are bf16 either way.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gradacc_fused.demo.model import GPT

from . import plots, study
from .loops import K, Loop, make_loops, make_pieces

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
TITLE = f"One window of {K} micro-batches of one sequence: what is added to forward and backward"
ADDED = (  # fields that say what is added to forward and backward alone, so nothing for that path itself
    "overhead_ms", "overhead_low_ms", "overhead_high_ms", "overhead_to_stock", "optimizer_ms", "optimizer_to_stock",
)  # fmt: skip
COLUMNS = ("size", "parameters", "path", "defer", "window_ms", "outside_ms", *ADDED)


@dataclass(frozen=True)
class Size:
    """A GPT and its text.

    Attributes:
        width: Model width.
        layers: Blocks.
        heads: Attention heads.
        longest: Longest sequence, in tokens; no paragraph is shorter than half of it.
    """

    width: int
    layers: int
    heads: int
    longest: int


SIZES = {"0.25M": Size(64, 4, 4, 256), "1.7M": Size(160, 5, 5, 384), "7.7M": Size(320, 6, 8, 384)}
QUICK_SIZES = ("0.25M", "1.7M")


@dataclass(frozen=True)
class Row:
    """One path at one size; times are of a window of ``k`` micro-batches.

    Attributes:
        size: Name of the size.
        parameters: Elements of all parameters.
        tensors: Number of parameters.
        tokens: Active tokens of the window.
        k: Micro-batches.
        dtype: Of parameters and gradients.
        compute: What the matrix products run in: "float32" or "native".
        path: Name of the path.
        defer: What ours was given; "-" for the others.
        window_ms: Median.
        forward_backward_ms: Median of the path that does nothing else.
        overhead_ms: Median of the paired differences.
        overhead_low_ms: Their first quartile.
        overhead_high_ms: Their third quartile.
        overhead_to_stock: ``overhead_ms`` over that of stock; None where stock's first quartile is not above 0.
        outside_ms: Median of what the stopwatch saw outside forward and backward.
        optimizer_ms: Median of that minus what forward and backward alone has there, in pairs.
        optimizer_to_stock: ``optimizer_ms`` over that of stock.
    """

    size: str
    parameters: int
    tensors: int
    tokens: int
    k: int
    dtype: str
    compute: str
    path: str
    defer: str
    window_ms: float
    forward_backward_ms: float
    overhead_ms: float | None
    overhead_low_ms: float | None
    overhead_high_ms: float | None
    overhead_to_stock: float | None
    outside_ms: float
    optimizer_ms: float | None
    optimizer_to_stock: float | None


# -- measuring -----------------------------------------------------------------------------------------------------


@contextmanager
def timed_backward(watch: study.Stopwatch) -> Iterator[None]:
    """Time every ``torch.autograd.backward``, and with it every ``loss.backward()``, also one inside a window."""
    original = torch.autograd.backward
    torch.autograd.backward = watch.wrap(original)
    try:
        yield
    finally:
        torch.autograd.backward = original


@dataclass(frozen=True)
class Sample:
    """Milliseconds of one window, and of what it did outside forward and backward."""

    window: float
    outside: float


def time_window(loop: Loop) -> Sample:
    loop.model_watch.reset()
    with timed_backward(loop.model_watch):
        start = time.perf_counter()
        loop.window()
        total = time.perf_counter() - start
    seen, expected = loop.model_watch.calls, 2 * len(loop.pieces)
    if seen != expected:
        raise RuntimeError(f"{loop.name}: the stopwatch saw {seen} forwards and backwards of {expected}.")
    return Sample(1e3 * total, 1e3 * (total - loop.model_watch.seconds))


def measure(
    size: str, loops: Sequence[Loop], repeats: int, seconds: float = 0.0, compute: str = "float32"
) -> list[Row]:
    """Measure the loops in turns.

    Args:
        size: What the rows call it.
        loops: The first is forward and backward alone; one is named "stock".
        repeats: Rounds, at least.
        seconds: Go on for so long.
        compute: For the rows.
    """
    taken: list[list[Sample]] = study.take_turns([partial(time_window, loop) for loop in loops], repeats, seconds)
    alone, stock = taken[0], taken[[loop.name for loop in loops].index("stock")]
    rows = []
    for loop, samples in zip(loops, taken, strict=True):
        overhead, optimizer = added(samples, alone)
        stock_overhead, stock_optimizer = added(stock, alone)
        row = Row(
            size=size,
            parameters=sum(param.numel() for param in loop.params),
            tensors=len(loop.params),
            tokens=loop.tokens,
            k=len(loop.pieces),
            dtype=str(loop.params[0].dtype).removeprefix("torch."),
            compute=compute,
            path=loop.name,
            defer=loop.defer,
            window_ms=statistics.median(sample.window for sample in samples),
            forward_backward_ms=statistics.median(sample.window for sample in alone),
            outside_ms=statistics.median(sample.outside for sample in samples),
            overhead_ms=overhead.median,
            overhead_low_ms=overhead.low,
            overhead_high_ms=overhead.high,
            overhead_to_stock=share(overhead, stock_overhead),
            optimizer_ms=optimizer.median,
            optimizer_to_stock=share(optimizer, stock_optimizer),
        )
        rows.append(row if samples is not alone else replace(row, **dict.fromkeys(ADDED)))
    return rows


def added(samples: Sequence[Sample], alone: Sequence[Sample]) -> tuple[study.Spread, study.Spread]:
    """What a path adds to forward and backward alone, of the whole window and of what is outside of them."""
    pairs = list(zip(samples, alone, strict=True))
    return (
        study.Spread.of([mine.window - base.window for mine, base in pairs]),
        study.Spread.of([mine.outside - base.outside for mine, base in pairs]),
    )


def share(mine: study.Spread, stock: study.Spread) -> float | None:
    """Ratio of the medians; None where stock's own is lost in the noise."""
    return mine.median / stock.median if stock.low > 0 else None


def relative_difference(model: GPT, ours: Loop, stock: Loop) -> float:
    """|ours - stock| over |stock - start|: how far apart the two trainings ended, as a share of what they moved."""

    def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([tensor.detach().double().flatten() for tensor in tensors])

    start, mine, theirs = flat(list(model.parameters())), flat(ours.main_params), flat(stock.main_params)
    return float((mine - theirs).norm() / (theirs - start).norm())


# -- program -------------------------------------------------------------------------------------------------------


def draw(rows: Sequence[Row], folder: Path, where: study.Environment) -> list[Path]:
    """One picture per measurement: bars of every path that updates, grouped by size."""
    shown = [row for row in rows if row.overhead_ms is not None]
    sizes = list(dict.fromkeys(row.size for row in shown))
    paths = list(dict.fromkeys(row.path for row in shown))
    first = rows[0]
    what = f"demo GPT, {first.dtype} parameters, K = {first.k} micro-batches of one sequence"

    def by_path(field: str) -> dict[str, list[Any]]:
        return {path: [getattr(row, field) for row in shown if row.path == path] for path in paths}

    lows, highs = by_path("overhead_low_ms"), by_path("overhead_high_ms")
    whiskers = {path: list(zip(lows[path], highs[path], strict=True)) for path in paths}
    machine = study.machine_line(where)
    return [
        plots.bars(
            folder / "end_to_end_overhead.png", f"Overhead over forward/backward alone: {what}", machine,
            "ms per window (quartiles as whiskers)", sizes, by_path("overhead_ms"), whiskers,
        ),
        plots.bars(
            folder / "end_to_end_optimizer.png", f"Outside forward and backward, by stopwatch: {what}", machine,
            "ms per window", sizes, by_path("optimizer_ms"),
        ),
    ]  # fmt: skip


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = study.parser("end_to_end", TITLE)
    parser.add_argument("--size", action="append", choices=list(SIZES), help="a size; repeatable (default: all)")
    parser.add_argument("--seconds", type=float, help="go on for so long per size (default: 20, with --quick 0)")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16", help="of parameters and gradients")
    parser.add_argument("--compute", choices=("float32", "native"), default="float32", help="of the matrix products")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Run the study and return the rows that were printed."""
    options = parse(arguments)
    study.require(plot=options.plot is not None)
    where = study.environment()
    repeats = options.repeats or (study.MIN_REPEATS if options.quick else 11)
    seconds = options.seconds if options.seconds is not None else 0.0 if options.quick else 20.0
    native = options.compute == "native" or options.dtype == "float32"
    rows: list[Row] = []
    differences = {}
    for name in options.size or (QUICK_SIZES if options.quick else SIZES):
        size = SIZES[name]
        torch.manual_seed(0)
        model = GPT(size.width, size.layers, size.heads, size.longest).to(DTYPES[options.dtype])
        loops = make_loops(model, make_pieces(size.longest), native)
        print(f"{name}: {len(loops[0].params)} tensors, {loops[0].tokens} tokens in {K} micro-batches", flush=True)
        rows += measure(name, loops, repeats, seconds, "native" if native else "float32")
        differences[name] = relative_difference(model, loops[1], loops[-1])
        del loops
        study.free_memory()
    study.show(TITLE, rows, COLUMNS, ("size",), where)
    for name, difference in differences.items():
        print(f"{name}: ours and stock ended {difference:.1e} apart, as a share of what they moved")
    study.write(options, rows, where, repeats=repeats, difference_of_trainings=differences)
    if options.plot:
        print(*draw(rows, options.plot, where), sep="\n")
    return rows


if __name__ == "__main__":
    main()
