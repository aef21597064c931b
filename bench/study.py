"""What the three studies (end_to_end, scaling, collector_cost) share: turns, medians, machine, table and files."""

from __future__ import annotations

import argparse
import csv
import gc
import importlib
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

import gradacc_fused as gf

MIN_REPEATS = 5
MAX_REPEATS = 200
WARM_UP = 2  # the first run makes states and buffers, the second finds every page mapped
WIDTH = 150
RESULTS = Path("bench/results")
Environment = dict[str, str | int | float]


class Stopwatch:
    """Adds up the time spent in its context.

    Attributes:
        seconds: The sum so far.
        calls: How many times it was entered.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0
        self._start = 0.0

    def __enter__(self) -> None:
        self.calls += 1
        self._start = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.seconds += time.perf_counter() - self._start

    def reset(self) -> None:
        self.seconds, self.calls = 0.0, 0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` with its calls timed."""

        def timed(*arguments: Any, **keywords: Any) -> Any:
            with self:
                return function(*arguments, **keywords)

        return timed


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of one list of samples, in the samples' unit."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        if len(samples) < 2:
            return cls(samples[0], samples[0], samples[0])
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, low, high)


def take_turns(
    samples: Sequence[Callable[[], Any]], repeats: int, seconds: float = 0.0, warm_up: int = WARM_UP
) -> list[list[Any]]:
    """Call each of ``samples`` once per round, in an order that changes with the round.

    Memory bandwidth and other processes drift within seconds: taken in turns, all are hit alike, and the samples of one
    round may be compared in pairs.

    Args:
        samples: What to call.
        repeats: At least so many rounds.
        seconds: Go on for so long, up to MAX_REPEATS rounds.
        warm_up: Calls of each before the first round.

    Returns:
        One list per callable: what it returned in each round.
    """
    for sample in samples:
        for _ in range(warm_up):
            sample()
    taken: list[list[Any]] = [[] for _ in samples]
    order = list(range(len(samples)))
    shuffle = random.Random(0).shuffle
    end = time.perf_counter() + seconds
    while len(taken[0]) < repeats or (len(taken[0]) < MAX_REPEATS and time.perf_counter() < end):
        shuffle(order)
        for index in order:
            taken[index].append(samples[index]())
    return taken


def accepts_auto_defer() -> bool:
    """Whether the installed version knows ``defer="auto"``."""
    param = torch.nn.Parameter(torch.zeros(1))
    try:
        gf.GradAccumOptimizer(torch.optim.SGD([param], lr=0.0), defer="auto").close()  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return True


def available_memory() -> int | None:
    """Bytes that a process may still take, by Linux's own estimate; None where the system does not say."""
    accounts = Path("/proc/meminfo")
    if not accounts.exists():
        return None
    for line in accounts.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def free_memory() -> None:
    """Let go of what only reference cycles hold: an optimizer is part of one."""
    gc.collect()


def environment() -> Environment:
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
        "instruction_set": instruction_set(),
        "load_before": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else -1.0,
    }


def instruction_set() -> str:
    """The one that the compiled loops run on; "-" where nothing is compiled."""
    try:
        compiled = importlib.import_module("gradacc_fused._C")
    except ImportError:
        return "-"
    return str(compiled.isa())


def machine_line(where: Environment, threads: bool = True) -> str:
    """Machine and versions in one line, for the title of a picture; without ``threads`` where these are its x axis."""
    used = f", {where['threads']} thread(s)" if threads else ""
    return (
        f"{where['machine']}{used}, {where['instruction_set']}; torch {where['torch']}, "
        f"gradacc_fused {where['gradacc_fused']}"
    )


# -- command line, table, files ------------------------------------------------------------------------------------


def repeats(text: str) -> int:
    """An argument: how many rounds."""
    number = int(text)
    if number < MIN_REPEATS:
        raise argparse.ArgumentTypeError(f"at least {MIN_REPEATS}, got {number}")
    return number


def parser(name: str, description: str) -> argparse.ArgumentParser:
    """A command line with the options that every study has."""
    made = argparse.ArgumentParser(prog=f"python -m bench.{name}", description=description)
    made.add_argument("--quick", action="store_true", help="fewer points and rounds")
    made.add_argument("--repeats", type=repeats, help=f"rounds (at least {MIN_REPEATS}); every path runs once in each")
    made.add_argument("--json", type=Path, metavar="FILE", help="write environment and rows")
    made.add_argument("--csv", type=Path, metavar="FILE", help="write the rows, environment in each")
    made.add_argument(
        "--plot", type=Path, metavar="DIR", nargs="?", const=RESULTS, help=f"draw; without DIR into {RESULTS}"
    )
    return made


def require(plot: bool) -> None:
    """Find out before measuring, not after, that the table cannot be printed or the picture not drawn."""
    for module in ("rich", *(("matplotlib",) if plot else ())):
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise SystemExit(f"bench needs {error.name}. Run: pip install 'gradacc_fused[bench]'") from error


def cell(value: object) -> str:
    """A value as text: three digits that count, thousands apart, a dash for None."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def show(title: str, rows: Sequence[Any], columns: Sequence[str], sections: Sequence[str], where: Environment) -> None:
    """Print one table.

    Args:
        title: Above it.
        rows: Dataclass instances.
        columns: Their fields that are shown; ``_`` reads as a space in the heading.
        sections: Fields whose change ends a section.
        where: The environment, printed before the table.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)  # a file or a pipe has no width: rich would cut at 80
    for name, value in where.items():
        console.print(f"{name}: {value}", highlight=False)
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        text = any(isinstance(getattr(row, column), str) for row in rows)
        table.add_column(column.replace("_", " "), justify="left" if text else "right")
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        end = following is None or any(getattr(row, name) != getattr(following, name) for name in sections)
        table.add_row(*(cell(getattr(row, column)) for column in columns), end_section=end)
    console.print(table)


def write(options: argparse.Namespace, rows: Sequence[Any], where: Environment, **more: object) -> None:
    """Write the files that the command line asks for.

    Args:
        options: As parsed by ``parser``.
        rows: Dataclass instances of one class.
        where: The environment; the CSV has it in every row, so that rows of several machines can be put together.
        more: Further entries of the JSON.
    """
    for file in (options.json, options.csv):
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
    if options.json:
        written = {"environment": where, **more, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(written, indent=2) + "\n")
    if options.csv:
        with options.csv.open("w", newline="") as stream:
            names = [field.name for field in fields(rows[0])]
            writer = csv.DictWriter(stream, [*names, *(f"env_{name}" for name in where)])
            writer.writeheader()
            for row in rows:
                writer.writerow(asdict(row) | {f"env_{name}": value for name, value in where.items()})
