"""Times that can be compared: paths take turns, a repeat of one right beside a repeat of the others; then medians."""

from __future__ import annotations

import ctypes
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

WARM_UP = 2  # runs: the first makes the state, the second finds every page mapped
LONG = 0.2  # seconds: of what takes longer, one warm-up is enough
MIN_REPEATS = 5
ENOUGH = 20  # repeats worth waiting PATIENCE times longer for
PATIENCE = 3.0
MAX_REPEATS = 100

Seconds = dict[str, float]
Run = Callable[[], Mapping[str, float]]


def keep_freed_memory() -> None:
    """Tell glibc to keep the memory of freed tensors for the next ones; elsewhere nothing.

    It would give large ones back to the system and fault every page in anew: making a gradient of 124M elements then
    takes several times longer than the pass that reads it, and freeing it falls into somebody's measured time.
    """
    mmap_max, trim_threshold, most = -4, -1, 2**31 - 1  # M_MMAP_MAX, M_TRIM_THRESHOLD of malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(mmap_max, 0)
        mallopt(trim_threshold, most)


class Stopwatches:
    """Adds up, by name, the time spent in the contexts that calling it makes, and counts them."""

    def __init__(self) -> None:
        self.seconds: Seconds = {}
        self.times: dict[str, int] = {}

    def __call__(self, name: str) -> AbstractContextManager[object]:
        return _Running(self, name)

    def each(self) -> Seconds:
        """Seconds of one context of each name, on average."""
        return {name: seconds / self.times[name] for name, seconds in self.seconds.items()}


class _Running:
    def __init__(self, watches: Stopwatches, name: str) -> None:
        self._watches, self._name = watches, name

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        passed = time.perf_counter() - self._start
        watches, name = self._watches, self._name
        watches.seconds[name] = watches.seconds.get(name, 0.0) + passed
        watches.times[name] = watches.times.get(name, 0) + 1


def timed(run: Callable[[], object], name: str) -> Run:
    """``run`` as something that takes turns: all of it is timed, as ``name``."""

    def turn() -> Seconds:
        start = time.perf_counter()
        run()
        return {name: time.perf_counter() - start}

    return turn


def take_turns(runs: Sequence[Run], seconds: float, min_repeats: int = MIN_REPEATS) -> list[dict[str, list[float]]]:
    """Repeat every run, in turns, so that a slow moment of the machine hits all alike.

    The order changes with every round, so that none always finds the caches as the same other one left them. After a
    warm-up, rounds go on for ``seconds``, for up to PATIENCE times as long where that makes ENOUGH repeats, but at
    least ``min_repeats`` and at most MAX_REPEATS times.

    Args:
        runs: Each call runs once and returns seconds by name of the part.
        seconds: Go on for this long, the warm-up not counted.
        min_repeats: At least so many.

    Returns:
        For each run the seconds of every repeat, by part.
    """
    keep_freed_memory()
    for run in runs:
        for _ in range(WARM_UP):
            if sum(run().values()) > LONG:
                break
    samples: list[dict[str, list[float]]] = [{} for _ in runs]
    order = list(range(len(runs)))
    shuffle = random.Random(0).shuffle
    start = time.perf_counter()
    for repeat in range(max(min_repeats, MAX_REPEATS)):
        passed = time.perf_counter() - start
        worth_it = repeat < ENOUGH and passed / max(repeat, 1) * ENOUGH <= PATIENCE * seconds
        if repeat >= min_repeats and passed > seconds and not worth_it:
            break
        shuffle(order)
        for index in order:
            for part, took in runs[index]().items():
                samples[index].setdefault(part, []).append(took)
    return samples


class Neighbours:
    """How many cores other processes keep busy while this object lives, by Linux's own accounts.

    A thread that waits for its core holds up every parallel operator by milliseconds: with one of two cores taken, a
    path of many small operators measured a hundred times slower.
    """

    QUIET = 0.1  # cores that others may use on average before times are not to be trusted

    def __init__(self) -> None:
        self._since, self._others = time.perf_counter(), self._read()

    @staticmethod
    def _read() -> float | None:
        accounts = Path("/proc/stat")
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
