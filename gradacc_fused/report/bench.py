"""``gradacc-fused bench``: the passes of a window on somebody's own parameters, beside torch's and the floor."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path as FilePath
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from ..floor import pass_bytes
from .events import Events, count, section
from .machine import environment
from .paths import Fused, Grads, Path, Stock, copies, make_grads, sizes_by_dtype
from .timing import Neighbours, Seconds, Stopwatches, take_turns, timed

COPIED = 32 * 1024 * 1024  # elements of the copy that gives the bandwidth: 128 MB each way
PATHS = ("gradacc_fused", "torch")
STAGES = ("accumulate", "closing", "clip", "update", "window")
OURS = {"accumulate": ("flush_first", "flush"), "closing": ("closing",), "clip": ("clip",), "update": ("update",)}
# What torch's parts are by the floor's formula; its clip measures the norm as well.
TORCH = {"accumulate": ("zero", "copy", "add"), "clip": ("norm", "clip"), "update": ("update", "copy_back")}


@dataclass(frozen=True)
class StageRow:
    """One stage of one path, over a whole window.

    Attributes:
        stage: One of ``STAGES``; "window" is all of them and what lies between.
        path: "gradacc_fused" or "torch".
        op_calls: Operator events.
        tensors: Allocations of tensors' memory.
        bytes: By formula; None where there is none.
        ms: Median.
        gb_s: 1e9 bytes per second.
        floor_bytes: What must be moved.
        floor_launches: How few launches it takes.
        floor_ms: ``floor_bytes`` at the bandwidth of a copy of the same turns.
    """

    stage: str
    path: str
    op_calls: int
    tensors: int
    bytes: int | None
    ms: float
    gb_s: float | None
    floor_bytes: int
    floor_launches: int
    floor_ms: float


@dataclass(frozen=True)
class Report:
    """What a run found: its rows, and what they depend on."""

    rows: list[StageRow]
    where: dict[str, str | int]
    copy_gb_s: float


def measure(params: Sequence[torch.Tensor], k: int, defer: int | str, rule: str, seconds: float) -> Report:
    """Measure windows of k micro-batches: ours, the same pass by pass, torch's, and a copy, in turns.

    Args:
        params: Their shapes, dtypes and values are taken; they are not written.
        k: Micro-batches in a window.
        defer: Of our optimizer.
        rule: A key of ``paths.OPTIMIZERS``.
        seconds: Go on repeating for this long.
    """
    neighbours = Neighbours()
    grads = make_grads(params, k)
    ours = Fused(copies(params), k, rule=rule, m=defer)
    ours.settle(grads)
    stock = Stock(copies(params), k, rule=rule)
    source = torch.ones(COPIED)
    target = torch.zeros_like(source)
    samples = take_turns(
        [
            lambda: _window(ours, grads),
            lambda: _stages(ours, grads),
            lambda: _window(stock, grads),
            timed(lambda: target.copy_(source), "copy"),
        ],
        seconds,
    )
    copy_gb_s = 2 * source.nbytes / statistics.median(samples[3]["copy"]) / 1e9
    with ours.stages():
        events = count(lambda: ours.window(grads, section))
    stock_events = count(lambda: stock.window(grads, section))
    floors = [(ours.floor_of(dtype), size) for dtype, size in sizes_by_dtype(params).items()]
    least = pass_bytes(floors)
    launches = floors[0][0].launches_by_pass()  # the same for each dtype: one launch takes them all
    rows = []
    for stage in STAGES:
        parts = tuple(least) if stage == "window" else OURS[stage]
        floor_bytes, floor_launches = _total(least, parts), _total(launches, parts)
        floor: dict[str, Any] = {
            "floor_bytes": floor_bytes, "floor_launches": floor_launches, "floor_ms": floor_bytes / copy_gb_s / 1e6,
        }  # fmt: skip
        mine = samples[0] if stage == "window" else samples[1]
        ms = _median_ms(mine, ("window",) if stage == "window" else OURS[stage])
        seen = _events(events, ("window",) if stage == "window" else OURS[stage])
        moved = None if ours.floors() is None else floor_bytes
        rows.append(StageRow(stage, "gradacc_fused", *_counts(seen), moved, ms, _gb_s(moved, ms), **floor))
        if stage != "window" and stage not in TORCH:
            continue
        theirs = tuple(TORCH) if stage == "window" else (stage,)
        ms, seen = _median_ms(samples[2], theirs), _events(stock_events, theirs)
        names = tuple(name for part in theirs for name in TORCH[part])
        moved = _total(pass_bytes(stock.floors() or []), names)
        rows.append(StageRow(stage, "torch", *_counts(seen), moved, ms, _gb_s(moved, ms), **floor))
    cores = neighbours.cores()
    where = environment() | {
        "parameters": f"{len(params)} tensors, {sum(param.numel() for param in params):,} elements, "
        + ", ".join(f"{size:,} in {str(dtype)[6:]}" for dtype, size in sizes_by_dtype(params).items()),
        "window": f"k={k}, {rule}, at most {ours.m} micro-batch(es) held (defer={defer!r}), backend {ours.backend}",
        "disturbed": "no" if cores is None or cores <= Neighbours.QUIET else f"yes: others used {cores:.2f} cores",
    }
    return Report(rows, where, copy_gb_s)


def _window(path: Path, grads: Grads) -> Seconds:
    watches = Stopwatches()
    path.window(grads, watches)
    return watches.seconds


def _stages(path: Fused, grads: Grads) -> Seconds:
    with path.stages():
        return _window(path, grads)


def _total(found: Mapping[str, int], names: Sequence[str]) -> int:
    return sum(found.get(name, 0) for name in names)


def _median_ms(samples: Mapping[str, list[float]], parts: Sequence[str]) -> float:
    """Median over the repeats of the parts' sum; 0 where a window has none of them."""
    repeats = list(zip(*(samples[part] for part in parts if part in samples), strict=True))
    return statistics.median(map(sum, repeats)) * 1e3 if repeats else 0.0


def _events(found: Mapping[str, Events], parts: Sequence[str]) -> Events:
    return sum((found[part] for part in parts if part in found), Events())


def _counts(events: Events) -> tuple[int, int]:
    return events.operators, events.tensors


def _gb_s(moved: int | None, ms: float) -> float | None:
    return moved / ms / 1e6 if moved and ms else None


# -- output --------------------------------------------------------------------------------------------------------


def show(report: Report) -> None:
    """Print the table."""
    console = Console(width=max(Console().width, 100))
    for name, value in report.where.items():
        console.print(f"{name}: {value}", highlight=False)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for heading in (
        "stage", "path", "op calls", "tensors", "MB", "ms", "GB/s", "floor MB", "floor ms", "launches",
    ):  # fmt: skip
        table.add_column(heading, justify="left" if heading in ("stage", "path") else "right", no_wrap=True)
    last = ""
    for row in report.rows:
        first, last = row.stage != last, row.stage
        floor = (f"{row.floor_bytes / 1e6:.2f}", f"{row.floor_ms:.3f}", str(row.floor_launches))
        table.add_row(
            row.stage if first else "", "ours" if row.path == "gradacc_fused" else row.path, str(row.op_calls),
            str(row.tensors), "-" if row.bytes is None else f"{row.bytes / 1e6:.2f}", f"{row.ms:.3f}",
            "-" if row.gb_s is None else f"{row.gb_s:.1f}", *(floor if first else ()),
        )  # fmt: skip
    console.print(table)
    ours, torchs = (next(row.ms for row in report.rows if (row.stage, row.path) == ("window", path)) for path in PATHS)
    console.print(
        f"floor ms is at the {report.copy_gb_s:.1f} GB/s of a copy in the same turns. The closing pass takes the norm "
        f"and the non-finite check; torch's norm is in its clip. Window: {torchs / ours:.2f} times as fast as torch's."
    )


def write_csv(file: FilePath, report: Report) -> None:
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, [field.name for field in fields(StageRow)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in report.rows)


def draw(file: FilePath, report: Report) -> None:
    """Bytes against time: every stage of both paths, and the line of the copy's bandwidth."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    most = 0.0
    for path, colour, marker in zip(PATHS, ("tab:blue", "tab:orange"), ("o", "s"), strict=True):
        points = [(row.stage, row.bytes / 1e6, row.ms) for row in report.rows if row.path == path and row.bytes]
        axes.plot([x for _, x, _ in points], [y for _, _, y in points], marker, color=colour, label=path)
        for stage, moved, ms in points:
            axes.annotate(stage, (moved, ms), xytext=(6, 4), textcoords="offset points", color=colour)
            most = max(most, moved)
    axes.axline((0, 0), slope=1 / report.copy_gb_s, color="tab:gray", linestyle="--")
    axes.plot([], [], "--", color="tab:gray", label=f"copy, {report.copy_gb_s:.1f} GB/s")
    axes.set(xlabel="MB moved in a window, by formula", ylabel="ms", title=str(report.where["window"]))
    axes.set_xlim(0, most * 1.15 or 1.0)
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left")
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def run(
    params: Sequence[torch.Tensor], k: int, defer: int | str, rule: str, seconds: float, output: FilePath
) -> Report:
    """Measure, print, and write ``bench.csv`` and ``bench.png`` into ``output``."""
    report = measure(params, k, defer, rule, seconds)
    show(report)
    output.mkdir(parents=True, exist_ok=True)
    write_csv(output / "bench.csv", report)
    draw(output / "bench.png", report)
    print(f"written: {output / 'bench.csv'}, {output / 'bench.png'}")
    return report
