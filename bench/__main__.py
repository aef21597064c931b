"""``python -m bench``: measure every path on parameter lists of real models and print one table."""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

import torch

import gradacc_fused as gf

from .harness import MIN_REPEATS, WARM_UP, Neighbours, Row, measure
from .paths import make_grads
from .shapes import PARAMETER_LISTS, elements

QUICK_LISTS, QUICK_KS = ("small", "lora"), (4, 1)
ALL_KS = (1, 4, 8)
QUIET = 0.1  # cores that other processes may use on average
HEADINGS = ("params", "k", "m", "path", "ms", "/ stock", "op calls", "B/element", "GB/s")


def environment() -> dict[str, str | int]:
    """What the numbers depend on."""
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text().splitlines() if cpu_info.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "machine": f"{model or platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "gradacc_fused": gf.__version__,
        "backends": ", ".join(name for name, status in gf.backends().items() if status.available),
    }


def cells(row: Row) -> list[str]:
    """A row as text, in the order of HEADINGS."""
    return [
        row.params, str(row.k), "-" if row.m is None else str(row.m), row.path, f"{row.ms:.2f}", f"{row.ratio:.2f}",
        str(row.op_calls), "-" if row.bytes_per_element is None else str(row.bytes_per_element),
        "-" if row.gb_s is None else f"{row.gb_s:.1f}",
    ]  # fmt: skip


def show(rows: Sequence[Row], where: dict[str, str | int]) -> None:
    """Print the table: with rich where it is installed, else as aligned text."""
    title = "\n".join(f"{name}: {value}" for name, value in where.items())
    texts = [cells(row) for row in rows]
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(HEADINGS, *texts, strict=True)]
        print(title)
        for line in (HEADINGS, *texts):
            print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))
        return
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading in ("params", "path") else "right", no_wrap=True)
    for row, text, following in zip(rows, texts, [*rows[1:], None], strict=True):
        end = following is None or (following.params, following.k) != (row.params, row.k)
        table.add_row(*text, end_section=end)
    print(title)
    Console().print(table)


def write_json(file: Path, rows: Sequence[Row], where: dict[str, str | int]) -> None:
    file.write_text(json.dumps({"environment": where, "rows": [asdict(row) for row in rows]}, indent=2) + "\n")


def write_csv(file: Path, rows: Sequence[Row]) -> None:
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, [field.name for field in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=f"One window of k micro-batches: median over {MIN_REPEATS} or more interleaved repeats after "
        f"{WARM_UP} windows of warm-up. Making the gradients is not measured.",
    )
    parser.add_argument("--quick", action="store_true", help=f"{' and '.join(QUICK_LISTS)} only, with k = 4 and 1")
    parser.add_argument("--params", action="append", choices=list(PARAMETER_LISTS), help="a parameter list; repeatable")
    parser.add_argument("--seconds", type=float, default=1.0, help="repeat for this long per list and k (default 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write environment and rows")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the rows")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Run the benchmark.

    Args:
        arguments: The command line, without the program's name; None: this process's own.

    Returns:
        The rows that were printed.
    """
    options = parse(arguments)
    names = options.params or (QUICK_LISTS if options.quick else list(PARAMETER_LISTS))
    ks = QUICK_KS if options.quick else ALL_KS
    rows: list[Row] = []
    disturbed: list[str] = []
    for name in names:
        shapes = PARAMETER_LISTS[name]()
        print(f"{name}: {len(shapes)} tensors, {elements(shapes):,} elements", flush=True)
        grads = make_grads(shapes, max(ks))
        for k in ks:
            neighbours = Neighbours()
            rows += measure(name, shapes, k, grads, options.seconds)
            cores = neighbours.cores()
            if cores is not None and cores > QUIET:
                disturbed.append(f"{name} k={k} ({cores:.2f})")
    where = environment() | {"disturbed": ", ".join(disturbed) or "no"}
    show(rows, where)
    if disturbed:
        print(f"Other processes used cores during {', '.join(disturbed)}: do not trust these rows, run them again.")
    if options.json:
        write_json(options.json, rows, where)
    if options.csv:
        write_csv(options.csv, rows)
    return rows


if __name__ == "__main__":
    main()
