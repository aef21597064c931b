"""What the profiler saw: operator events, nested ones counted, and allocations of tensors' memory."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from torch.autograd import DeviceType, profiler
from torch.profiler import record_function

PREFIX = "gradacc_fused report: "
MEMORY = "[memory]"


@dataclass(frozen=True)
class Events:
    """Counts of one section.

    Attributes:
        operators: Operator events (``namespace::name``), nested ones counted; annotations are none.
        tensors: The profiler's memory events that allocate: each is the storage of one new tensor, whichever way C++ or
            Python made it. Views and scalars read in place are none.
    """

    operators: int = 0
    tensors: int = 0

    def __add__(self, other: Events) -> Events:
        return Events(self.operators + other.operators, self.tensors + other.tensors)


def section(name: str) -> AbstractContextManager[object]:
    """A context whose events ``count`` finds under ``name``. It may be entered many times, and within others."""
    return record_function(PREFIX + name)


def count(run: Callable[[], object]) -> dict[str, Events]:
    """Run once under the profiler and count, by section; "" is all of it.

    Events count in every section whose time they fall in, of whatever thread.
    """
    profiled = _profiled(run)
    results, functions = profiled.kineto_results, profiled.function_events
    # Operators as the profiler reports them, where an operator that only calls itself again is one; memory events are
    # kept among the raw ones alone.
    operators = [(event.name, event.time_range.start, event.time_range.end) for event in functions]
    memory = [
        (event.name() if event.nbytes() > 0 or event.name() != MEMORY else "", event.start_ns(), event.end_ns())
        for event in results.events()
    ]
    counted = _by_section(operators, lambda name: "::" in name)
    allocated = _by_section(memory, lambda name: name == MEMORY)
    return {name: Events(counted[name], allocated[name]) for name in counted}


def peak_bytes(run: Callable[[], object]) -> tuple[int, int]:
    """Bytes of host memory that tensors made within ``run``, by any thread, took: (the most at once, at its end)."""
    events = [event for event in _profiled(run).kineto_results.events() if event.name() == MEMORY]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.device_type() == DeviceType.CPU:
            now += event.nbytes()
            peak = max(peak, now)
    return peak, now


def _profiled(run: Callable[[], object]) -> Any:
    with _without_notes(), profiler.profile(profile_memory=True) as profiled:
        run()
    assert profiled.kineto_results is not None and profiled.function_events is not None
    return profiled


@contextmanager
def _without_notes() -> Iterator[None]:
    """Keep the profiler's own notes (start, stop, memory that is older than it) off the terminal."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _by_section(events: Sequence[tuple[str, float, float]], counts: Callable[[str], bool]) -> dict[str, int]:
    """How many (name, start, end) count in each section, sections being among them."""
    spans: dict[str, list[tuple[float, float]]] = {"": [(-math.inf, math.inf)]}
    for name, start, end in events:
        if name.startswith(PREFIX):
            spans.setdefault(name.removeprefix(PREFIX), []).append((start, end))
    starts = [start for name, start, _ in events if counts(name)]
    return {
        name: sum(any(first <= start < last for first, last in times) for start in starts)
        for name, times in spans.items()
    }


def operator_events(run: Callable[[], object]) -> int:
    """Operator events of ``run``, nested ones counted; user annotations are none."""
    return count(run)[""].operators
