"""What to compile here: the CPU extension where a compiler and torch are, CUDA where a toolkit and a CUDA torch are.

``GRADACC_FUSED_CPU`` and ``GRADACC_FUSED_CUDA`` take ``0`` (leave out), ``1`` (an error before compiling where it
cannot be built) or ``auto`` (the default: build it where that is possible and say why not elsewhere).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# No -ffast-math (it deletes the non-finite checks), no -march=native: the loops pick their instruction set at run time.
# -fopenmp: at::parallel_for is a header, and runs serially in a file compiled without it; torch has loaded the runtime.
OPENMP = ["-fopenmp"] if sys.platform == "linux" else []
# --fmad=false: as -ffp-contract=off, only those multiply-adds are fused that are spelled so.
NVCC_FLAGS = ["-O3", "--fmad=false", "-std=c++17", "-lineinfo"]
# -g0: Python's own flags ask for debug information, which costs a third of the time and is stripped by the linker.
CPU_FLAGS = ["-O3", "-g0", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden"]


class BuildError(RuntimeError):
    """An explicit wish that this machine cannot meet; raised before anything is compiled."""


@dataclass(frozen=True)
class Part:
    """A part of the build: wanted and possible, or left out for ``reason``."""

    name: str
    built: bool
    reason: str


def wish(name: str, environ: Mapping[str, str]) -> str:
    value = environ.get(name, "auto").lower()
    if value not in ("0", "1", "auto"):
        raise BuildError(f"{name} must be 0, 1 or auto, got {value!r}.")
    return value


def decide(name: str, variable: str, missing: str | None, environ: Mapping[str, str]) -> Part:
    """Weigh the wish in ``variable`` against what is ``missing`` (None: nothing)."""
    wanted = wish(variable, environ)
    if wanted == "0":
        return Part(name, False, f"left out by {variable}=0")
    if missing is None:
        return Part(name, True, "")
    if wanted == "1":
        raise BuildError(f"{variable}=1 cannot be met: {missing}")
    return Part(name, False, missing)


def missing_for_cpu(environ: Mapping[str, str], torch_version: str | None) -> str | None:
    if torch_version is None:
        return (
            "torch is not installed in the build environment. Install torch first, then run "
            "'pip install --no-build-isolation gradacc_fused' so that the build sees it."
        )
    compiler = environ.get("CXX", "g++").split()[0]
    if shutil.which(compiler, path=environ.get("PATH")) is None and (
        "CXX" in environ or shutil.which("clang++", path=environ.get("PATH")) is None
    ):
        return f"no C++ compiler ({compiler}) on PATH. Install g++ or clang++, or set CXX, and reinstall."
    return None


def find_cuda_home(environ: Mapping[str, str]) -> str | None:
    """The toolkit's folder: ``CUDA_HOME``, else what nvcc itself says (the one on PATH may be a wrapper script)."""
    if environ.get("CUDA_HOME"):
        return environ["CUDA_HOME"]
    nvcc = shutil.which("nvcc", path=environ.get("PATH"))
    if nvcc is None:
        return None
    run = subprocess.run(
        [nvcc, "--dryrun", "-x", "cu", "-c", "-o", os.devnull, os.devnull],
        capture_output=True, text=True, env=dict(environ), check=False,
    )  # fmt: skip
    top = re.search(r"^#\$ TOP=(.+)$", run.stderr, re.MULTILINE)
    return os.path.realpath(top.group(1).strip()) if top else None


def toolkit_version(cuda_home: str, environ: Mapping[str, str]) -> str | None:
    nvcc = Path(cuda_home) / "bin" / "nvcc"
    if not nvcc.exists():
        return None
    run = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, env=dict(environ), check=False)
    found = re.search(r"release (\d+\.\d+)", run.stdout)
    return found.group(1) if found else None


def missing_for_cuda(environ: Mapping[str, str], torch_cuda: str | None, sources: list[str]) -> str | None:
    """What keeps the CUDA extension from being built, told before a compiler runs."""
    if not sources:
        return "this version has no CUDA sources (csrc/cuda is empty)."
    if torch_cuda is None:
        return "this torch is built without CUDA. Install a CUDA build of torch, then reinstall."
    cuda_home = find_cuda_home(environ)
    if cuda_home is None:
        return "no CUDA toolkit: neither CUDA_HOME is set nor is nvcc on PATH. Set CUDA_HOME to the toolkit's folder."
    version = toolkit_version(cuda_home, environ)
    if version is None:
        return f"no nvcc in {cuda_home}/bin. Set CUDA_HOME to the toolkit's folder."
    if version.split(".")[0] != torch_cuda.split(".")[0]:
        return (
            f"nvcc is {version} ({cuda_home}) but torch is built for CUDA {torch_cuda}: the major versions must agree. "
            f"Point CUDA_HOME at a CUDA {torch_cuda.split('.')[0]} toolkit, or install a torch built for "
            f"CUDA {version.split('.')[0]}."
        )
    return None


def installed_torch() -> tuple[str | None, str | None]:
    """(torch version, CUDA version it is built for), None where absent."""
    try:
        import torch
    except ImportError:
        return None, None
    return torch.__version__, torch.version.cuda


def architectures(version: str) -> str:
    """What is compiled for where TORCH_CUDA_ARCH_LIST does not say: A100, H100, B200 (from CUDA 12.8 on) and later."""
    knows_blackwell = tuple(map(int, version.split("."))) >= (12, 8)
    return "8.0;9.0;10.0+PTX" if knows_blackwell else "8.0;9.0+PTX"


def parts(root: Path, environ: Mapping[str, str]) -> list[Part]:
    version, torch_cuda = installed_torch()
    cuda_sources = sorted(str(path) for path in (root / "csrc" / "cuda").glob("*.cu"))
    return [
        decide("cpu", "GRADACC_FUSED_CPU", missing_for_cpu(environ, version), environ),
        decide("cuda", "GRADACC_FUSED_CUDA", missing_for_cuda(environ, torch_cuda, cuda_sources), environ),
    ]


def extensions(root: Path) -> tuple[list, dict]:
    """Setuptools' ext_modules and cmdclass for this machine."""
    cpu, cuda = parts(root, os.environ)
    for part in (cpu, cuda):
        print(f"gradacc_fused: {part.name}: " + ("building" if part.built else f"not built: {part.reason}"))
    if not cpu.built:
        return [], {}
    if cuda.built:  # torch looks for the toolkit when it is imported
        os.environ["CUDA_HOME"] = cuda_home = find_cuda_home(os.environ) or ""
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", architectures(toolkit_version(cuda_home, os.environ) or "0"))
    from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension

    sources = sorted(str(path.relative_to(root)) for path in (*root.glob("csrc/*.cpp"), *root.glob("csrc/cpu/*.cpp")))
    headers = sorted(str(path.relative_to(root)) for path in (*root.glob("csrc/**/*.h"), *root.glob("csrc/**/*.cuh")))
    built = [
        CppExtension(
            "gradacc_fused._C",
            sources,
            depends=headers,
            extra_compile_args={"cxx": CPU_FLAGS + OPENMP},
            extra_link_args=["-s", *OPENMP],
        )
    ]
    if cuda.built:
        built.append(
            CUDAExtension(
                "gradacc_fused._C_cuda",
                sorted(str(path.relative_to(root)) for path in root.glob("csrc/cuda/*.c*") if path.suffix != ".cuh"),
                depends=headers,
                extra_compile_args={"cxx": CPU_FLAGS, "nvcc": NVCC_FLAGS},
                extra_link_args=["-s"],
            )
        )
    return built, {"build_ext": BuildExtension}
