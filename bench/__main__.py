"""``python -m bench``: run the benchmarks under pytest-benchmark and print one table of their rows."""

from __future__ import annotations

import argparse
import csv
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from gradacc_fused.report.machine import environment
from gradacc_fused.report.timing import Neighbours

from .harness import Row

HEADINGS = (
    "params", "k", "m", "path", "ms", "x stock", "op calls", "tensors", "B/element", "GB/s", "of triad",
)  # fmt: skip
HERE = Path(__file__).parent
STEMS = ("window", "accumulate", "update", "triad")  # in the order of the table


def _text(value: float | None, form: str = "") -> str:
    return "-" if value is None else format(value, form)


def cells(row: Row) -> list[str]:
    """A row as text, in the order of HEADINGS."""
    return [
        row.params, _text(row.k), _text(row.m), row.path, f"{row.ms:.2f}", _text(row.ratio, ".2f"), str(row.op_calls),
        str(row.tensors), _text(row.bytes_per_element, "g"), _text(row.gb_s, ".1f"), _text(row.triad_share, ".2f"),
    ]  # fmt: skip


def _section(row: Row) -> tuple[str, int | None]:
    return row.params, row.m if row.ratio is None else row.k


def show(rows: Sequence[Row], where: dict[str, str | int]) -> None:
    """Print the table."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading in ("params", "path") else "right", no_wrap=True)
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        end = following is None or _section(following) != _section(row)
        table.add_row(*cells(row), end_section=end)
    print("\n".join(f"{name}: {value}" for name, value in where.items()))
    Console(width=None if sys.stdout.isatty() else 130).print(table)


def rows_of(report: dict[str, Any]) -> tuple[list[Row], list[str]]:
    """(rows, groups that other processes disturbed) of pytest-benchmark's JSON."""
    names = [field.name for field in fields(Row)]
    rows, disturbed = [], []
    for benchmark in report["benchmarks"]:
        row = {name: benchmark["extra_info"][name] for name in names}
        rows.append(Row(**row | {"ms": benchmark["stats"]["median"] * 1e3}))
        cores = benchmark["extra_info"]["neighbours"]
        if cores is not None and cores > Neighbours.QUIET:
            disturbed.append(f"{benchmark['group']} ({cores:.2f})")
    order = list(dict.fromkeys((row.params, row.m) for row in rows))
    rows.sort(key=lambda row: (row.ratio is None, 0 if row.ratio else order.index((row.params, row.m))))  # stable
    return rows, list(dict.fromkeys(disturbed))


def write_json(file: Path, rows: Sequence[Row], where: dict[str, str | int]) -> None:
    file.write_text(json.dumps({"environment": where, "rows": [asdict(row) for row in rows]}, indent=2) + "\n")


def write_csv(file: Path, rows: Sequence[Row]) -> None:
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, [field.name for field in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """(options, pytest's command line)."""
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Windows and passes on parameter lists of real models, in turns; medians. Making the gradients is "
        "not measured.",
        epilog="Everything else goes to pytest: --benchmark-autosave, --benchmark-compare, -k and so on.",
    )
    parser.add_argument("--quick", action="store_true", help="small, lora and gpt2 only, with k = 4 and 1")
    parser.add_argument("--params", action="append", metavar="LIST", help="small, lora, gpt2 or resnet50; repeatable")
    parser.add_argument("--k", action="append", type=int, help="micro-batches in a window; repeatable (1, 4, 8)")
    parser.add_argument("--seconds", type=float, help="repeat for this long per group of paths (default 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write environment and rows")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the rows")
    options, others = parser.parse_known_args(arguments)
    forwarded = [f"--params={name}" for name in options.params or []] + [f"--k={k}" for k in options.k or []]
    forwarded += ["--quick"] if options.quick else []
    forwarded += [] if options.seconds is None else [f"--seconds={options.seconds}"]
    return options, forwarded + others


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks.

    Args:
        arguments: The command line, without the program's name; None: this process's own.

    Returns:
        pytest's exit status.
    """
    try:
        import pytest
        import pytest_benchmark  # noqa: F401
        import rich  # noqa: F401
    except ImportError as error:
        raise SystemExit(f"the benchmarks need {error.name}. Run: pip install 'gradacc_fused[bench]'") from error
    options, others = parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        status = pytest.main(
            [
                *(str(HERE / f"bench_{stem}.py") for stem in STEMS),
                f"--rootdir={HERE.parent}",
                *("-q", "-rs", "-p", "no:cacheprovider", "--benchmark-quiet", f"--benchmark-json={report}"),
                *others,
            ]
        )
        if not report.exists() or not report.stat().st_size:
            return int(status)
        rows, disturbed = rows_of(json.loads(report.read_text()))
    where = environment() | {"disturbed": ", ".join(disturbed) or "no"}
    show(rows, where)
    if disturbed:
        print(f"Other processes used cores during {', '.join(disturbed)}: do not trust these rows, run them again.")
    if options.json:
        write_json(options.json, rows, where)
    if options.csv:
        write_csv(options.csv, rows)
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
