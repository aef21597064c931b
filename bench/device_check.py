"""One command for a machine with a GPU: builds, checks and times the CUDA backend, and writes one table and one JSON.

    python bench/device_check.py --json bench/results/device_check.json

Needs torch and a toolkit, nothing else, and takes under five minutes. ``--device cpu`` runs the same script on the cpu
backend: what only a GPU has is told as such. ``--backend triton`` checks and times that one; without, the first one of
the device is, and the others there are get some conformance cases. The exit status is 1 where a check failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from bench.device_numbers import (  # noqa: E402
    FEW,
    Row,
    boundary,
    conformance,
    graph,
    moved,
    others,
    some_of,
    step_graph,
    sync,
    whole_windows,
)  # fmt: skip

COUNTED = ((10, 1, 1), (10, 8, 1), (1000, 8, 1), (1000, 8, 4), (4000, 8, 4))  # tensors, k, m
TIMED = {"gpt2": 4, "small": 4}  # parameter list -> k
REPEATS = 20
SANITIZER_SECONDS = 60
OURS = ("gradacc", "accumulate_kernel", "clip_kernel", "update_kernel")  # in kernels' names: CUDA's, Triton's
PEERS = {"apex": "apex.optimizers", "transformer_engine": "transformer_engine.pytorch.optimizers"}


def build(device: torch.device) -> Row:
    start = time.perf_counter()
    wish = "1" if device.type == "cuda" else "0"
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "GRADACC_FUSED_CUDA": wish}, capture_output=True, text=True, check=False
    )  # fmt: skip
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return Row("build", "extension", f"{time.perf_counter() - start:.0f} s", True)


# -- windows -------------------------------------------------------------------------------------------------------


class Windows:
    """An AdamW in counting mode with gradients that autograd makes."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], k: int, m: int, device: torch.device) -> None:
        from bench.paths import make_params
        from gradacc_fused.report.paths import Fused, make_grads

        on_host = make_params(shapes)
        self.params: list[torch.Tensor] = [torch.nn.Parameter(param) for param in moved(on_host, device)]
        self.path = Fused(self.params, k, m=m)
        self.grads = [moved(piece, device) for piece in make_grads(on_host, k)]

    def run(self) -> None:
        self.path.window(self.grads)


def counts(device: torch.device) -> Iterator[Row]:
    """Kernels and copies of a window, by the profiler; on the cpu: operator events of ours."""
    from torch.profiler import ProfilerActivity, profile

    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    for tensors, k, m in COUNTED:
        windows = Windows([(100,)] * tensors, k, m, device)
        for _ in range(3):
            windows.run()

        def window(windows: Windows = windows) -> list[Any]:
            found: list[Any] = []
            for piece in windows.grads:
                torch.autograd.backward(windows.params, piece)
                sync(device)
                with profile(activities=[activity]) as profiler:
                    windows.path.optimizer.step()
                    sync(device)
                found += profiler.events()
            return found

        done = window()
        if device.type == "cuda":
            names = [event.name for event in done if event.device_type == torch.autograd.DeviceType.CUDA]
            copies = [name for name in names if name.startswith("Memcpy")]
            kernels = [name for name in names if not name.startswith(("Memcpy", "Memset"))]
            others = [name for name in kernels if not any(ours in name for ours in OURS)]
        else:
            kernels, copies, others = [e.name for e in done if e.name.startswith("gradacc_fused::")], [], []
        most = -(-k // m) + 2  # flushes, closing pass; clip, update
        tables = [3 if m * tensors > 4000 and device.type == "cuda" else 0]  # more addresses than a launch takes
        tables += range(most) if windows.path.optimizer.backend == "triton" else ()  # those that moved
        found = f"{len(kernels)} launches, {len(copies)} copies" + (f", {len(others)} not ours" if others else "")
        passed = len(kernels) == most and len(copies) in tables and not others
        yield Row("launches", f"{tensors} tensors, K = {k}, m = {m}", found, passed, len(kernels))


def no_sync(device: torch.device) -> Row:
    what = "a window under set_sync_debug_mode('error')"
    if device.type != "cuda":
        return Row("sync", what, "only a GPU can tell")
    windows = Windows([(1000,)] * 20, 4, 2, device)
    windows.run()
    sync(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        windows.run()
    except RuntimeError as error:
        return Row("sync", what, str(error).splitlines()[0], False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return Row("sync", what, "none", True)


def host_times(device: torch.device, repeats: int) -> Iterator[Row]:
    """Microseconds until a boundary's ``step()`` is back at its caller, the device being idle before it."""
    if device.type != "cuda":
        yield Row("host", "microseconds of a boundary's step()", "only where the device works beside the host")
        return
    for tensors, m in ((10, 4), (1000, 1), (1000, 4)):
        windows = Windows([(100,)] * tensors, 4, m, device)
        times = []
        for _ in range(repeats + 2):
            for number, piece in enumerate(windows.grads):
                torch.autograd.backward(windows.params, piece)
                sync(device)
                start = time.perf_counter()
                windows.path.optimizer.step()
                if number == len(windows.grads) - 1:
                    times.append(1e6 * (time.perf_counter() - start))
        median = statistics.median(times[2:])
        yield Row("host", f"{tensors} tensors, m = {m}: a boundary's step()", f"{median:.0f} us", None, median)


# -- times ---------------------------------------------------------------------------------------------------------


def peak_of(windows: Windows, device: torch.device) -> int:
    """Bytes that a window allocates at most beyond what there is, its gradients included."""
    sync(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    windows.run()
    sync(device)
    return torch.cuda.max_memory_allocated(device) - before


class Stopwatch:
    """Seconds by name, from when the device is idle until it is idle again."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, list[float]] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        sync(self.device)
        start = time.perf_counter()
        yield
        sync(self.device)
        self.seconds.setdefault(name, []).append(time.perf_counter() - start)


class Timed(Stopwatch):
    """Seconds that a GPU itself needs: it is kept busy until the host has enqueued everything."""

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if self.device.type != "cuda":
            with super().__call__(name):
                yield
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(2_000_000)
        start.record()
        yield
        end.record()
        end.synchronize()
        self.seconds.setdefault(name, []).append(start.elapsed_time(end) / 1e3)


def peers(device: torch.device, repeats: int) -> Iterator[Row]:
    """The update by itself beside other optimizers' steps, on fp32 parameters with one gradient each."""
    import gradacc_fused as gf
    from bench.shapes import PARAMETER_LISTS

    def made(kind: Callable[[list[torch.Tensor]], Any]) -> Any:
        params = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in PARAMETER_LISTS["small"]()]
        for param in params:
            param.grad = torch.randn_like(param)
        return kind(params)

    def times_of(optimizer: Any) -> float:
        timed, params = Timed(device), [param for group in optimizer.param_groups for param in group["params"]]
        grads = [param.grad for param in params]
        for _ in range(repeats + 2):
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
            with timed("step"):
                optimizer.step()
        return statistics.median(timed.seconds["step"][2:])

    def of_package(place: str) -> Callable[[list[torch.Tensor]], Any]:
        return lambda params: importlib.import_module(place).FusedAdam(params, lr=1e-3)

    kinds: dict[str, Callable[[list[torch.Tensor]], Any]] = {
        "torch AdamW, foreach": lambda params: torch.optim.AdamW(params, lr=1e-3, foreach=True),
        "torch AdamW, fused": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
    }
    for package, place in PEERS.items():
        kinds[package] = of_package(place)
    # Clip and norm are what it cannot leave out.
    mine = times_of(made(lambda params: gf.GradAccumOptimizer(torch.optim.AdamW(params, lr=1e-3))))
    for name, kind in kinds.items():
        if name in PEERS and importlib.util.find_spec(name) is None:
            yield Row("peer", f"step beside {name}", "not installed")
            continue
        try:
            theirs = times_of(made(kind))
        except Exception as error:  # a package that is here and does not run
            yield Row("peer", f"step beside {name}", f"{type(error).__name__}: {error}".splitlines()[0])
            continue
        found = f"{mine * 1e3:.2f} ms, theirs {theirs * 1e3:.2f} ms: {theirs / mine:.2f} times"
        yield Row("peer", f"step beside {name}", found, None, theirs / mine)


def timings(device: torch.device, repeats: int) -> Iterator[Row]:
    """Every stage's bytes per second beside a copy of as many bytes; whole windows beside stock torch."""
    from bench.shapes import PARAMETER_LISTS, elements
    from gradacc_fused.floor import floor
    from gradacc_fused.report.paths import Stock

    for name, k in TIMED.items():
        shapes = PARAMETER_LISTS[name]()
        size = elements(shapes)
        source = torch.empty(4 * size, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        copy = Timed(device)
        for m in (1, 4):
            windows = Windows(shapes, k, m, device)
            whole, stages = Timed(device), Timed(device)
            stock_seconds: list[float] = []
            stock = Stock([torch.nn.Parameter(param.detach().clone()) for param in windows.params], k)
            for repeat in range(repeats + 2):
                watches = Stopwatch(device)
                stock.window(windows.grads, watches)
                stock_seconds.append(sum(sum(times) for times in watches.seconds.values()))
                one = Stopwatch(device)
                windows.path.window(windows.grads, one)
                whole.seconds.setdefault("window", []).append(sum(one.seconds["window"]))
                with windows.path.stages():
                    windows.path.window(windows.grads, stages)
                with copy("copy"):
                    target.copy_(source)
                if repeat == 1:  # warm
                    stock_seconds.clear(), whole.seconds.clear(), stages.seconds.clear(), copy.seconds.clear()
            copied = 8 * size / statistics.median(copy.seconds["copy"])
            table = floor(k, m)
            for stage, times in stages.seconds.items():
                if stage in ("window", "clip"):
                    continue
                speed = table.row(stage).bytes_per_element * size / statistics.median(times)
                found = f"{speed / 1e9:.0f} GB/s, {speed / copied:.2f} of a copy's"
                yield Row("speed", f"{name}, K = {k}, m = {m}: {stage}", found, None, speed / 1e9)
            mine, theirs = statistics.median(whole.seconds["window"]), statistics.median(stock_seconds)
            found = f"{mine * 1e3:.2f} ms, stock {theirs * 1e3:.2f} ms: {theirs / mine:.2f} times"
            yield Row("speed", f"{name}, K = {k}, m = {m}: window", found, None, theirs / mine)
            report = windows.path.optimizer.memory_report()
            found = f"{report.peak / size:.1f} B/element by memory_report()"
            if device.type == "cuda":
                found += f", {peak_of(windows, device) / size:.1f} above what was allocated before a window"
            yield Row("memory", f"{name}, K = {k}, m = {m}: peak", found, None, report.peak / size)
            del windows, stock


def sanitizer(device: torch.device, backend: str | None) -> Iterator[Row]:
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "compute-sanitizer"
    tool = shutil.which("compute-sanitizer") or (str(home) if home.exists() else None)
    for kind in ("memcheck", "racecheck"):
        what = f"compute-sanitizer {kind} on some conformance cases"
        if device.type != "cuda" or tool is None:
            yield Row("sanitizer", what, "not found" if device.type == "cuda" else "only for a GPU")
            continue
        again = [sys.executable, __file__, "--only", "conformance", "--no-build", "--few"]
        again += ["--backend", backend] if backend else []
        command = [tool, "--tool", kind, "--error-exitcode", "9", *again]
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # a tensor is an allocation of its own
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=SANITIZER_SECONDS, env=environment
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            yield Row("sanitizer", what, f"did not finish in {SANITIZER_SECONDS} s")
            continue
        yield Row("sanitizer", what, (done.stdout.strip().splitlines() or ["no output"])[-1], done.returncode == 0)


# -- program -------------------------------------------------------------------------------------------------------

CHECKS = ("conformance", "launches", "sync", "graph", "host", "speed", "sanitizer")


def run(options: argparse.Namespace) -> list[Row]:
    device = torch.device(options.device)
    rows = [] if options.no_build else [build(device)]
    from gradacc_fused.backends import registry

    chosen = options.backend or device.type
    if options.backend:
        os.environ[registry.VARIABLE] = chosen  # the optimizers here take it too
    ops, cpu = registry.get(chosen, device), registry.get("cpu")
    stride = FEW if options.few else 1
    wanted: dict[str, Callable[[], Any]] = {
        "conformance": lambda: chain(
            conformance(ops, cpu, device, stride),
            boundary(ops, cpu, device, stride),
            [whole_windows(device)],
            chain.from_iterable(some_of(other, cpu, device) for other in others(device, chosen)),
        ),
        "launches": lambda: counts(device),
        "sync": lambda: [no_sync(device)],
        "graph": lambda: [graph(ops, device), step_graph(device)],
        "host": lambda: host_times(device, options.repeats),
        "speed": lambda: chain(timings(device, options.repeats), peers(device, options.repeats)),
        "sanitizer": lambda: sanitizer(device, options.backend),
    }
    for name in options.only or CHECKS:
        for row in without_end(name, wanted[name]):
            rows.append(row)
            verdict = {True: "ok", False: "FAILED", None: ""}[row.passed]
            print(f"{row.check:12} {row.what:58} {verdict:7} {row.found}", flush=True)
            write(options, rows)
    return rows


def without_end(name: str, check: Callable[[], Any]) -> Iterator[Row]:
    """A check's rows; what it raises is a row too, so that the others still run."""
    try:
        yield from check()
    except Exception as error:
        yield Row(name, "the check itself", f"{type(error).__name__}: {error}".splitlines()[0], False)


def write(options: argparse.Namespace, rows: Sequence[Row]) -> None:
    from gradacc_fused.report.machine import environment

    where: dict[str, Any] = environment() | {"device": options.device, "cuda": torch.version.cuda or "none"}
    if options.device == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        where |= {"gpu": gpu.name, "compute": f"{gpu.major}.{gpu.minor}", "processors": gpu.multi_processor_count}
    if options.json:
        text = json.dumps({"environment": where, "rows": [asdict(row) for row in rows]}, indent=2)
        options.json.write_text(text + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python bench/device_check.py", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--backend", metavar="NAME", help="the one to check (default: the first that can run)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write environment and rows")
    parser.add_argument("--only", action="append", choices=CHECKS, help="a check; repeatable (default: all)")
    parser.add_argument("--repeats", type=int, default=REPEATS, help=f"timed repeats ({REPEATS})")
    parser.add_argument("--few", action="store_true", help="an eighth of the conformance cases")
    parser.add_argument("--no-build", action="store_true", help="the extension is built already")
    options = parser.parse_args(arguments)
    start = time.perf_counter()
    rows = run(options)
    seconds = time.perf_counter() - start
    failed = [row for row in rows if row.passed is False]
    print(f"{len(rows)} rows, {len(failed)} failed, {seconds:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
