"""What a call of a stage costs the host: the C++ op beside the Triton backend, whose launch is prepared in Python.

Tensors have one element each, so bytes do not matter. Rows of the Triton backend are split: ``prepare``, the checks,
addresses and tables of our own Python, and ``dispatch``, Triton's: binding the arguments, finding the compiled kernel,
and the launch. ``same``: every call has the same tensors, as a training loop has them where the allocator hands
out the same memory; ``moved``: gradients lie elsewhere in every call, and Triton's table is made anew.

On a GPU both are enqueued and not waited for. Without one the C++ op is the cpu backend's, one element's arithmetic per
tensor included, and Triton's launches end where the driver would take them over (kernels are compiled for sm_90).
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

import gradacc_fused as gf
from gradacc_fused.backends import registry

from . import plots, study

TITLE = "A call of a stage: host microseconds"
COUNTS, QUICK_COUNTS = (10, 100, 1_000), (10, 100)
M = 4  # micro-batches whose gradients a call takes
PLACES = 40  # of gradients that move: more than the tables that are kept
CPP, TRITON = "C++ op", "Triton"
COLUMNS = ("tensors", "call", "addresses", "path", "us", "low_us", "high_us", "prepare_us", "dispatch_us", "to_cpp")


@dataclass(frozen=True)
class Row:
    """One way to make one call.

    Attributes:
        tensors: How many parameters.
        call: "accumulate", the closing pass of ``M`` micro-batches; "clip"; "update", AdamW on the same gradients.
        addresses: "same" or "moved".
        path: Which code made it.
        us: Median of the whole call.
        low_us: First quartile.
        high_us: Third quartile.
        prepare_us: Median of our Python's part; None for the C++ op.
        dispatch_us: Median of Triton's part; None for the C++ op.
        to_cpp: ``us`` over that of the C++ op.
    """

    tensors: int
    call: str
    addresses: str
    path: str
    us: float
    low_us: float
    high_us: float
    prepare_us: float | None
    dispatch_us: float | None
    to_cpp: float


class NoLaunch:
    """A driver of Triton's for a GPU that is not there: kernels are compiled and found, and never run."""

    def __init__(self) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", 90, 32)
        self.launched = 0
        self.utils = SimpleNamespace(
            load_binary=lambda *arguments: (1, 1, 0, 0, 1024),
            get_device_properties=lambda device: {"max_shared_mem": 232_448},
        )

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        def launch(*arguments: Any) -> None:
            self.launched += 1

        return launch


@contextmanager
def triton_backend(device: torch.device) -> Iterator[tuple[Any, study.Stopwatch]]:
    """(the backend, a stopwatch of Triton's part of its calls)."""
    try:
        from triton.runtime import driver
        from triton.runtime.jit import JITFunction
    except ImportError as error:
        raise SystemExit("launch_cost: Triton is not installed. Install a CUDA or ROCm build of torch.") from error
    from gradacc_fused.backends import triton as backend

    dispatch, run = study.Stopwatch(), JITFunction.run
    JITFunction.run = dispatch.wrap(run)
    if device.type != "cuda":
        driver.set_active(NoLaunch())
    try:
        yield backend, dispatch
    finally:
        JITFunction.run = run
        if device.type != "cuda":
            driver._active = None


class Calls:
    """Tensors of the three calls on a device.

    Args:
        count: Parameters, of one element each.
        device: Where everything lies.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        def made(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
            return [torch.ones(1, dtype=dtype, device=device) for _ in range(count)]

        def cell(dtype: torch.dtype = torch.float64) -> torch.Tensor:
            return torch.zeros((), dtype=dtype, device=device)

        self.params, self.main_params = made(torch.bfloat16), made()
        self.exp_avgs, self.exp_avg_sqs = made(), made()
        self.places = [made(torch.bfloat16) for _ in range(M + PLACES)]
        self.weights = torch.ones(M, dtype=torch.float64)
        self.partials = torch.zeros(gf.n_partials(self.params), dtype=torch.float64, device=device)
        self.found_inf, self.loss_scale = cell(torch.float32), torch.ones((), dtype=torch.float64)
        self.cells = [cell() for _ in range(4)]
        self.steps = torch.zeros(count, device=device)
        self.hyper = gf.hyper_rows([{"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8}]).to(device)
        self.group_ids = torch.zeros(count, dtype=torch.int32, device=device)
        self.touched = torch.ones(count, dtype=torch.uint8, device=device)
        self._turn = 0

    def grads(self, moved: bool) -> list[torch.Tensor]:
        self._turn = (self._turn + 1) % PLACES if moved else 0
        return [grad for piece in self.places[self._turn : self._turn + M] for grad in piece]

    def accumulate(self, ops: Any, grads: list[torch.Tensor]) -> None:
        ops.accumulate_(
            [], grads, self.weights, self.partials, self.found_inf, overwrite=True, store=False, norm_type=2.0
        )  # fmt: skip

    def clip(self, ops: Any, grads: list[torch.Tensor]) -> None:
        ops.clip_(self.partials, self.weights, self.loss_scale, *self.cells, norm_type=2.0, max_norm=1.0)

    def update(self, ops: Any, grads: list[torch.Tensor]) -> None:
        ops.update_(
            self.params, self.main_params, self.exp_avgs, self.exp_avg_sqs, self.steps, [], grads, self.weights,
            self.hyper, self.group_ids, self.touched, self.cells[2], self.found_inf, rule="adamw",
            max_grad_value=math.inf,
        )  # fmt: skip


def sampler(calls: Calls, call: str, ops: Any, moved: bool, dispatch: study.Stopwatch) -> Callable[[], Any]:
    """A callable that makes the call once and returns (its microseconds, those of Triton's part)."""
    make = getattr(calls, call)

    def sample() -> tuple[float, float]:
        grads = calls.grads(moved)
        dispatch.reset()
        start = time.perf_counter()
        make(ops, grads)
        end = time.perf_counter()
        if calls.params[0].is_cuda:
            torch.cuda.synchronize()
        return 1e6 * (end - start), 1e6 * dispatch.seconds

    return sample


def measure(count: int, repeats: int, device: torch.device) -> list[Row]:
    """Measure every call with ``count`` parameters, in turns."""
    try:
        compiled = registry.get(device.type)
    except gf.BackendUnavailableError as error:
        raise SystemExit(f"launch_cost: there is no C++ op to compare with. {error}") from error
    kinds = [(call, moved) for call in ("accumulate", "clip", "update") for moved in (False, True)]
    kinds.remove(("clip", True))  # it takes no gradients
    calls = Calls(count, device)
    with triton_backend(device) as (triton, dispatch), torch.no_grad():
        samplers = [
            sampler(calls, call, ops, moved, dispatch) for call, moved in kinds for ops in (compiled, triton)
        ]  # fmt: skip
        taken: list[list[tuple[float, float]]] = study.take_turns(samplers, repeats, warm_up=3)
    rows = []
    for number, (call, moved) in enumerate(kinds):
        cpp = study.Spread.of([whole for whole, _ in taken[2 * number]])
        mine = taken[2 * number + 1]
        whole = study.Spread.of([whole for whole, _ in mine])
        prepare, inside = (study.Spread.of(part).median for part in zip(*((w - d, d) for w, d in mine), strict=True))
        place = "moved" if moved else "same"
        rows.append(Row(count, call, place, CPP, cpp.median, cpp.low, cpp.high, None, None, 1.0))
        rows.append(
            Row(
                count, call, place, TRITON, whole.median, whole.low, whole.high, prepare, inside,
                whole.median / cpp.median,
            )
        )  # fmt: skip
    return rows


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = study.parser("launch_cost", TITLE)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Run the study and return the rows that were printed."""
    options = parse(arguments)
    study.require(plot=options.plot is not None)
    where = study.environment() | {"device": options.device}
    repeats = options.repeats or (study.MIN_REPEATS if options.quick else 50)
    rows: list[Row] = []
    for count in QUICK_COUNTS if options.quick else COUNTS:
        rows += measure(count, repeats, torch.device(options.device))
        study.free_memory()
    study.show(TITLE, rows, COLUMNS, ("tensors",), where)
    study.write(options, rows, where, repeats=repeats)
    if options.plot:
        series: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            series.setdefault(f"{row.call}, {row.addresses}: {row.path}", []).append((row.tensors, row.us))
        print(
            plots.curves(
                options.plot / "launch_cost.png", TITLE, study.machine_line(where), "parameters of one element",
                "microseconds per call", series,
            )
        )  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
