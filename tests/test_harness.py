"""The CUDA harness itself: it finds planted faults, each by a named mode at its place, and none in the real code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness import build, cuda_on_cpu

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.skipif(cuda_on_cpu.unavailable_reason() is not None, reason=str(cuda_on_cpu.unavailable_reason())),
]
CONFORMANCE = ("tests/test_accumulate.py", "tests/test_clip.py", "tests/test_update.py")
MODES = {mode.name: mode for mode in (build.PLAIN, build.ADDRESS, build.THREAD)}


def run_driver(mode: build.Mode, skip: int = 0, order: str = "asc", faulty: Path | None = None) -> tuple[int, str]:
    """(exit status, output) of the driver: one window, checked against plain loops."""
    program = build.kernels(mode, "driver.cpp", faulty)
    fixed_addresses = ["setarch", "-R"] if mode is build.THREAD else []  # thread sanitizer's shadow memory
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0", "GRADACC_HARNESS_ORDER": order}
    done = subprocess.run(
        [*fixed_addresses, str(program), str(skip)], capture_output=True, text=True, env=environment, check=False,
        timeout=120,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


RUNS = [("plain", "asc"), ("plain", "desc"), ("plain", "5"), ("address", "asc"), ("thread", "asc")]


@pytest.mark.parametrize("skip", [0, 1])
@pytest.mark.parametrize("mode, order", RUNS)
def test_the_kernels_run_clean_in_every_mode(mode, order, skip):
    status, output = run_driver(MODES[mode], skip=skip, order=order)
    assert status == 0 and output.startswith("ok: norm"), output
    assert "WARNING" not in output and "runtime error" not in output


@dataclass(frozen=True)
class Fault:
    """What is wrong, and how it shows."""

    name: str
    file: str
    right: str
    wrong: str
    mode: str
    shows: str  # a pattern; {line}: where the fault lies; {at: TEXT}: the line of the kernel's file that has TEXT
    skip: int = 0
    order: str = "asc"
    kernel: str = "accumulate.cu"  # what is compiled with the fault


FAULTS = [
    Fault(
        "missing-barrier", "cuda/reduce.cuh", "  __syncthreads();  // of_warp is written anew for the next slice\n", "",
        "thread", r"data race[\s\S]*reduce\.cuh:{at: of_warp[threadIdx.x / kWarp] = value}\b",
    ),
    Fault(
        "missing-fence", "cuda/reduce.cuh", "    __threadfence();\n    last = ", "    last = ", "thread",
        r"data race[\s\S]*accumulate\.cu:{at: p.norm.of_slices[s] = folded}\b",
    ),
    Fault(
        "inter-block-race", "cuda/update.cu", "  if (!last_block(p.blocks_done)) return;\n", "", "thread",
        r"data race[\s\S]*update\.cu:{at: p.steps[t] = next_step}\b", kernel="update.cu",
    ),
    Fault(
        "one-element-too-far", "cuda/gather.cuh", "i < slice.numel; ++i)", "i <= slice.numel; ++i)", "address",
        r"heap-buffer-overflow[\s\S]*gather\.cuh",
    ),
    Fault(
        "misaligned-vector", "cuda/gather.cuh", "if (kAligned || is_aligned(from, sizeof(vector.words[0]))) {",
        "if (true) {", "address", r"gather\.cuh:\d+:\d+: runtime error: .*misaligned address", skip=1,
    ),
    Fault(
        "shared-array-too-far", "cuda/reduce.cuh", "of_warp[threadIdx.x / kWarp] = value",
        "of_warp[threadIdx.x / kWarp + 1] = value", "address",
        r"reduce\.cuh:{line}:\d+: runtime error: index 8 out of bounds",
    ),
    Fault(
        "divergent-barrier", "cuda/reduce.cuh", "  __syncthreads();\n  if (last) ",
        "  if (threadIdx.x < 32) {\n    __syncthreads();\n  } else {\n    __syncthreads();\n  }\n  if (last) ",
        "plain",
        r"divergent __syncthreads: some threads at .*reduce\.cuh:\d+, others at .*reduce\.cuh:\d+",
    ),
    Fault(
        "half-a-warp-shuffles", "cuda/reduce.cuh", "    value = with_part(value, __shfl_xor_sync",
        "    if (threadIdx.x % kWarp < 16) value = with_part(value, __shfl_xor_sync", "plain",
        r"deadlock: .* wait for lanes that never come; thread 0 at .*reduce\.cuh:{line}",
    ),
    Fault(
        "missing-ticket-barrier", "cuda/reduce.cuh", "  __syncthreads();\n  if (last) ", "  if (last) ", "plain",
        r"WRONG|CUDA harness", order="desc", kernel="update.cu",
    ),
]  # fmt: skip


def line_of(csrc, text: str) -> str:
    """Number of the one line of the kernels' files that has ``text``."""
    files = [path for path in (build.ROOT / csrc / "cuda").iterdir() if path.suffix in (".cu", ".cuh")]
    numbers = [number for path in files for number, line in enumerate(path.read_text().split("\n"), 1) if text in line]
    assert len(numbers) == 1, (text, numbers)
    return str(numbers[0])


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault):
    csrc = build.planted(fault.name, fault.file, fault.right, fault.wrong)
    text = (build.ROOT / csrc / fault.file).read_text()
    line = text[: text.index(fault.wrong)].count("\n") + 1 if fault.wrong else 0
    status, output = run_driver(MODES[fault.mode], fault.skip, fault.order, csrc / "cuda" / fault.kernel)
    assert status != 0, f"not found: {output}"
    shown = re.sub(r"\{at: (.*?)\}", lambda found: line_of(csrc, found.group(1)), fault.shows)
    assert re.search(shown.replace("{line}", str(line)), output), output


SUITE = (*CONFORMANCE, "-k", cuda_on_cpu.NAME)


def run_suite(environment: dict[str, str], *arguments: str) -> str:
    """Output of the conformance suite on cuda_on_cpu in a process of its own; it must pass."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        capture_output=True, text=True, cwd=build.ROOT, env={**os.environ, **environment}, check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_the_conformance_suite_is_clean_under_address_and_undefined_sanitizers():
    """In an order drawn from a seed; the run for coverage is in descending order, any other in ascending order."""
    environment = {"GRADACC_HARNESS_KERNELS": str(build.kernels(build.ADDRESS)), **build.ADDRESS.environment()}
    environment["GRADACC_HARNESS_ORDER"] = "3"
    assert re.search(r"\d+ passed|100%", run_suite(environment, *SUITE))


def test_a_ring_that_does_not_wait_is_found():
    csrc = build.planted("ring-without-events", "cuda/stream_state.cpp", "is_pending(op, current_->copied)", "false")
    environment = {**os.environ, "GRADACC_HARNESS_MODULE": str(build.torch_side(csrc / "cuda" / "stream_state.cpp"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "pending", "tests/test_cuda_on_cpu.py"],
        capture_output=True, text=True, cwd=build.ROOT, env=environment, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1 and "test_a_table_is_not_written_while_its_copy_is_pending" in done.stdout, done.stdout


def test_line_coverage_of_the_kernels():
    """95 % of the lines of the .cu and .cuh files, by gcov, from the conformance suite."""
    library = build.kernels(build.COVERAGE)
    for path in build.BUILD.glob("*/*.gcda"):
        path.unlink()
    also = ("tests/test_cuda_on_cpu.py", "-k", f"{cuda_on_cpu.NAME} and not launches")
    run_suite({"GRADACC_HARNESS_KERNELS": str(library), "GRADACC_HARNESS_ORDER": "desc"}, *CONFORMANCE, *also)
    hits: dict[tuple[str, int], int] = {}
    for notes in build.BUILD.glob("*/*.gcda"):
        report = subprocess.run(
            ["gcov", "--json-format", "--stdout", str(notes)], capture_output=True, text=True, cwd=build.ROOT,
            check=True,
        )  # fmt: skip
        for unit in filter(None, report.stdout.splitlines()):
            for file in json.loads(unit)["files"]:
                if file["file"].startswith("csrc/cuda/") and Path(file["file"]).suffix in (".cu", ".cuh"):
                    for found in file["lines"]:
                        place = file["file"], found["line_number"]
                        hits[place] = hits.get(place, 0) + found["count"]
    missed = sorted(place for place, count in hits.items() if count == 0)
    share = 1 - len(missed) / len(hits)
    print(f"{len(hits)} lines, {share:.1%} executed; not: {missed}")
    assert len(hits) > 200 and share >= 0.95, f"{share:.1%} of {len(hits)} lines; not executed: {missed}"
