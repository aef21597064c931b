"""The compile contract of the CUDA kernels: what nvcc makes of them, with no GPU at hand.

No spills and no stack, registers that let at least half of a multiprocessor's threads be resident, 128-bit loads and
stores, exact division and square root, and parameters within the limit.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import build_config  # noqa: E402

STEMS = ("accumulate", "clip", "update")
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
THREADS, REGISTERS_PER_MULTIPROCESSOR, MOST_THREADS = 256, 65536, 2048
MOST_REGISTERS = 64  # 65,536 / 64 = 1,024 of 2,048 threads: half
PARAMETER_LIMIT = 32764
# 128-bit loads and stores of a kernel at least: of every dtype's path; clip reads scalars.
VECTORS = {"accumulate": (30, 9), "clip": (0, 0), "update": (31, 14)}


def find_tool(name: str) -> str | None:
    """cuobjdump or nvdisasm: in the toolkit, on PATH, inside the triton wheel, or from PyPI."""
    home = build_config.find_cuda_home(os.environ)
    places = [Path(home) / "bin" / name] if home else []
    for site in map(Path, sys.path):
        places += [*site.glob(f"triton/backends/nvidia/bin/{name}"), *site.glob(f"nvidia/*/bin/{name}")]
    return next((str(place) for place in places if place.exists()), shutil.which(name))


def missing() -> str | None:
    if shutil.which("nvcc") is None and build_config.find_cuda_home(os.environ) is None:
        return "no nvcc here"
    absent = [name for name in ("cuobjdump", "nvdisasm") if find_tool(name) is None]
    return f"no {' or '.join(absent)}: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm" if absent else None


pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@dataclass
class Kernel:
    """What one kernel became on one architecture."""

    name: str
    registers: int = 0
    stack: int = 0
    spill_stores: int = 0
    instructions: dict[str, int] = field(default_factory=dict)

    def count(self, pattern: str) -> int:
        return sum(times for name, times in self.instructions.items() if re.match(pattern, name))


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def demangled(name: str) -> str:
    plain = run("c++filt", name).strip() if shutil.which("c++filt") else name
    found = re.search(r"(\w+_kernel)(<[^>]*>)?", plain)
    return found.group(0) if found else plain


@cache
def compiled(stem: str, architecture: str, folder: Path) -> list[Kernel]:
    cubin = folder / f"{stem}.{architecture}.cubin"
    log = run(
        "nvcc", *build_config.NVCC_FLAGS, f"-arch={architecture}", "-cubin", "-Xptxas", "-v",
        str(ROOT / "csrc" / "cuda" / f"{stem}.cu"), "-o", str(cubin),
    )  # fmt: skip
    usage = run(str(find_tool("cuobjdump")), "--dump-resource-usage", str(cubin))
    listing = run(str(find_tool("nvdisasm")), "-c", str(cubin))
    kernels = []
    for name, body in re.findall(r"\.text\.(\S+):\n(.*?)(?=\n//-+ |\Z)", listing, re.DOTALL):
        kernel = Kernel(demangled(name))
        resources = re.search(re.escape(name) + r":\s*\n?\s*REG:(\d+) STACK:(\d+).*", usage)
        assert resources, usage
        kernel.registers, kernel.stack = int(resources.group(1)), int(resources.group(2))
        spills = re.search(r"Function properties for " + re.escape(name) + r"\n.*?(\d+) bytes spill stores", log)
        assert spills, log
        kernel.spill_stores = int(spills.group(1))
        for instruction in re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)", body, re.MULTILINE):
            kernel.instructions[instruction] = kernel.instructions.get(instruction, 0) + 1
        kernels.append(kernel)
    return kernels


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything is compiled here, two at a time, before the first test looks at it."""
    made = tmp_path_factory.mktemp("cubin")
    with ThreadPoolExecutor(max_workers=2) as pool:
        jobs = [pool.submit(ptx_of, stem, made) for stem in STEMS]
        jobs += [pool.submit(compiled, stem, architecture, made) for stem in STEMS for architecture in ARCHITECTURES]
        for job in jobs:
            job.result()
    return made


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("stem", STEMS)
def test_the_contract_holds(stem, architecture, folder, capsys):
    kernels = compiled(stem, architecture, folder)
    assert len(kernels) >= 1
    for kernel in kernels:
        loads, stores = kernel.count(r"LDG\.E.*\.128"), kernel.count(r"STG\.E.*\.128")
        with capsys.disabled():
            print(
                f"\n{architecture:7} {kernel.name:28} {kernel.registers:3} registers, {kernel.stack} B stack, "
                f"{kernel.spill_stores} B spilled, 128-bit: {loads} loads, {stores} stores",
                end="",
            )
        assert kernel.registers <= MOST_REGISTERS
        resident = REGISTERS_PER_MULTIPROCESSOR // (kernel.registers * THREADS) * THREADS
        assert resident * 2 >= MOST_THREADS, f"{resident} threads of {MOST_THREADS}"
        assert kernel.stack == 0 and kernel.spill_stores == 0
        assert kernel.count(r"LDL|STL") == 0
        assert loads >= VECTORS[stem][0] and stores >= VECTORS[stem][1]


@cache
def ptx_of(stem: str, folder: Path) -> str:
    """In PTX each instruction says how it rounds."""
    out = folder / f"{stem}.ptx"
    source = ROOT / "csrc" / "cuda" / f"{stem}.cu"
    run("nvcc", *build_config.NVCC_FLAGS, "-arch=compute_90", "-ptx", str(source), "-o", str(out))
    return out.read_text()


@pytest.mark.parametrize("stem", STEMS)
def test_no_division_or_square_root_is_approximate(stem, folder):
    text = ptx_of(stem, folder)
    assert not re.findall(r"\b(?:div|sqrt|rcp|rsqrt)\.\w*(?:approx|full)\S*", text)
    if stem == "update":
        assert re.search(r"\bsqrt\.rn\.f32", text) and re.search(r"\bdiv\.rn\.f32", text)
        assert re.search(r"\bfma\.rn\.f32", text)


@pytest.mark.parametrize("stem", STEMS)
def test_no_float_is_added_atomically(stem, folder):
    assert not re.findall(r"\b(?:atom|red)\S*\.f\d\d\b", ptx_of(stem, folder))


def test_multiply_adds_are_fused_only_where_they_are_spelled(folder):
    """acc * a + b without fma stays two instructions: a kernel of its own, compiled as ours are."""
    source = folder / "plain.cu"
    source.write_text("__global__ void plain(float* x, float a, float b) { x[0] = x[0] * a + b; }\n")
    ptx = folder / "plain.ptx"
    run("nvcc", *build_config.NVCC_FLAGS, "-arch=compute_80", "-ptx", str(source), "-o", str(ptx))
    assert "fma.rn.f32" not in ptx.read_text() and "mul.rn.f32" in ptx.read_text().replace("mul.f32", "mul.rn.f32")


@pytest.mark.parametrize("stem", STEMS)
def test_parameters_are_within_the_limit(stem, folder):
    sizes = [int(size) for size in re.findall(r"\.param \.align \d+ \.b8 \S+\[(\d+)\]", ptx_of(stem, folder))]
    assert sizes and max(sizes) <= PARAMETER_LIMIT
    if stem != "clip":
        assert max(sizes) > 32000 and min(sizes) <= 4096  # many addresses, or few


def test_every_architecture_and_ptx_for_later_are_built():
    assert build_config.architectures("13.0") == "8.0;9.0;10.0+PTX"
    assert build_config.architectures("12.4") == "8.0;9.0+PTX"
