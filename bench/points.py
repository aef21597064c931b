"""What a scaling study times: one window of each path at one point, ours also stage by stage, within the memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from . import study
from .paths import Fused, Stock, make_params
from .shapes import Shape

Grads = Sequence[Sequence[torch.Tensor]]
Sample = dict[str, float]  # stage -> milliseconds
Samples = dict[str, list[Sample]]  # path -> rounds
LR = 1e-3
TOGETHER, ALONE = 0.5, 0.9  # shares of the available memory that all paths together, or one, may take
VISITS = 2  # to each path, where they have to be built one after the other
STAGES = {"flush": "flush", "measure": "closing", "clip": "clip", "update": "update"}  # engine's method -> our word
WINDOW, PASSES, GRADIENTS = "window", "passes", "gradients"


@dataclass(frozen=True)
class Point:
    """Elements in so many equal tensors (the last takes the rest), and micro-batches in a window."""

    elements: int
    tensors: int
    k: int

    @property
    def shapes(self) -> list[Shape]:
        each = self.elements // self.tensors
        return [(each,)] * (self.tensors - 1) + [(self.elements - each * (self.tensors - 1),)]


def make_source(shapes: Sequence[Shape], seed: int = 1) -> list[torch.Tensor]:
    """bf16 gradients of one micro-batch. Read only: autograd leaves a copy of each in ``.grad``."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, 0.1, generator=generator) for shape in shapes]


class Ours:
    """gradacc_fused in counting mode, its passes timed one by one.

    The stages of a sample, in milliseconds: ``window``, all micro-steps; ``flush``, ``closing`` (the pass over the last
    gradients that takes norm and found_inf), ``clip`` and ``update``; ``passes``, these four together; ``gradients``,
    the rest: taking gradient tensors from their parameters, freeing them, and the window's own Python.
    """

    def __init__(self, point: Point, m: int) -> None:
        self.name = f"ours, m={m}"
        self.m = m
        self.k = point.k
        self.path = Fused(make_params(point.shapes), point.k, LR, m=m)
        engine = self.path.optimizer._engine
        self.compiled = self.path.optimizer.backend == "cpu"
        self.watches = {name: study.Stopwatch() for name in STAGES}
        for name, watch in self.watches.items():
            setattr(engine, name, watch.wrap(getattr(engine, name)))

    def sample(self, grads: Grads) -> Sample:
        """Time one window."""
        for watch in self.watches.values():
            watch.reset()
        whole = study.Stopwatch()
        self.path.window(grads, lambda *part: whole)
        self._check_calls()
        stages = {STAGES[name]: 1e3 * watch.seconds for name, watch in self.watches.items()}
        passes = sum(stages.values())
        return {WINDOW: 1e3 * whole.seconds, **stages, PASSES: passes, GRADIENTS: 1e3 * whole.seconds - passes}

    def _check_calls(self) -> None:
        """A stage that runs past its stopwatch would be reported as free."""
        expected = {"measure": 1, "clip": 1, "update": 1}
        if self.compiled:  # the reference cannot hold gradients
            expected["flush"] = -(-self.k // self.m) - 1
        for name, calls in expected.items():
            if self.watches[name].calls != calls:
                raise RuntimeError(
                    f"{self.name}: {name} ran {self.watches[name].calls} times in a window, not {calls}."
                )


class Whole:
    """A path that is timed as a whole."""

    m = 0

    def __init__(self, name: str, path: Any) -> None:
        self.name = name
        self.path = path

    def sample(self, grads: Grads) -> Sample:
        """Time one window."""
        whole = study.Stopwatch()
        self.path.window(grads, lambda *part: whole)
        return {WINDOW: 1e3 * whole.seconds}


class Taking:
    """No accumulation: a Python loop reads and clears ``.grad``, and the window's gradients are freed at its end.

    What any loop in Python pays for gradient tensors, whatever it then does with them.
    """

    def __init__(self, params: list[torch.Tensor]) -> None:
        self.params = params

    def window(self, grads: Grads, measured: Callable[..., AbstractContextManager[Any]]) -> None:
        held = []
        for number, piece in enumerate(grads):
            torch.autograd.backward(self.params, piece)
            with measured():
                held.append([param.grad for param in self.params])
                for param in self.params:
                    param.grad = None
                if number == len(grads) - 1:
                    held.clear()


TimedPath = Ours | Whole


@dataclass(frozen=True)
class Kind:
    """A path that can be built at a point.

    Attributes:
        name: As in the rows.
        build: Makes it.
        bytes_per_element: What it keeps at its peak, with its gradients, without their source.
    """

    name: str
    build: Callable[[Point], TimedPath]
    bytes_per_element: int


def ours(m: int, k: int) -> Kind:
    """Parameter 2, main param 4, moments 8, gradients of as many micro-batches as are held, sum where there is one."""
    held = 2 * min(m, k)
    return Kind(f"ours, m={m}", partial(Ours, m=m), 2 + 4 + 8 + held + (4 if k > m else 0))


def stock() -> Kind:
    """Parameter 2, main param 4, main grad 4, moments 8, gradient 2."""

    def build(point: Point) -> Whole:
        return Whole("stock", Stock(make_params(point.shapes), point.k, LR))

    return Kind("stock", build, 2 + 4 + 4 + 8 + 2)


def taking(k: int) -> Kind:
    """Parameter 2, gradients of the window."""

    def build(point: Point) -> Whole:
        return Whole("taking in Python", Taking(make_params(point.shapes)))

    return Kind("taking in Python", build, 2 + 2 * k)


SOURCE_BYTES = 2  # per element: every micro-batch's gradients are copies of one list


@dataclass(frozen=True)
class Skipped:
    """A path that was not measured at a point, and why."""

    curve: str
    path: str
    elements: int
    reason: str


def time_point(
    point: Point, kinds: Sequence[Kind], repeats: int, available: int | None
) -> tuple[Samples, dict[str, str], bool]:
    """Time every kind of path at a point: in turns where all fit into memory, else one after the other.

    Args:
        point: Shapes and k.
        kinds: The paths.
        repeats: Rounds.
        available: Bytes that may be taken; None: no limit is known.

    Returns:
        Samples by path, reasons by path for those that do not fit, and whether the paths took turns.
    """
    limit = float("inf") if available is None else float(available)
    skipped, fitting = {}, []
    for kind in kinds:
        needed = point.elements * (kind.bytes_per_element + SOURCE_BYTES)
        if needed <= ALONE * limit:
            fitting.append(kind)
        else:
            skipped[kind.name] = (
                f"needs {needed / 2**30:.1f} GiB ({kind.bytes_per_element + SOURCE_BYTES} bytes per element), and "
                f"{ALONE:.0%} of the {limit / 2**30:.1f} GiB available is the limit"
            )
    if not fitting:
        return {}, skipped, False
    grads = [make_source(point.shapes)] * point.k
    total = point.elements * (sum(kind.bytes_per_element for kind in fitting) + SOURCE_BYTES)
    in_turns = total <= TOGETHER * limit
    samples: Samples = {kind.name: [] for kind in fitting}
    if in_turns:
        _visit([kind.build(point) for kind in fitting], grads, repeats, study.WARM_UP, samples)
        study.free_memory()
        return samples, skipped, True
    for _ in range(VISITS):
        for kind in fitting:
            _visit([kind.build(point)], grads, -(-repeats // VISITS), 1, samples)
            study.free_memory()
    return samples, skipped, False


def _visit(paths: Sequence[TimedPath], grads: Grads, repeats: int, warm_up: int, samples: Samples) -> None:
    taken = study.take_turns([partial(path.sample, grads) for path in paths], repeats, warm_up=warm_up)
    for path, rounds in zip(paths, taken, strict=True):
        samples[path.name] += rounds
