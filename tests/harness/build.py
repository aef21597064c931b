"""Compiles csrc/cuda for the CPU: the kernels with whatever checks a mode has, and the torch side once."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
HARNESS = Path("tests/harness/cuda")  # this and CSRC: relative to ROOT, where compilers run
CSRC = Path("csrc")
BUILD = Path(os.environ.get("GRADACC_HARNESS_BUILD") or ROOT / "build" / "harness")
KERNELS = ("accumulate.cu", "clip.cu", "update.cu")
RUNTIME = ("block.cpp", "stream.cpp")
TORCH_SIDE = ("hot_path.cpp", "ops.cpp", "passes.cpp", "stream_state.cpp")
MODULE = "gradacc_cuda_harness"
# -fno-tree-vectorize: g++ would make one aligned load of the scalar ones that a misaligned array gets.
LANGUAGE = (
    "-x", "c++", "-std=c++20", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-tree-vectorize", "-Wall",
    "-Wextra", "-Wno-unknown-pragmas", f"-I{HARNESS / 'include'}", f"-I{HARNESS}",
)  # fmt: skip


@dataclass(frozen=True)
class Mode:
    """One way to compile and run the kernels."""

    name: str
    flags: tuple[str, ...]
    preload: tuple[str, ...] = ()  # libraries that a process needs before anything else

    def environment(self) -> dict[str, str]:
        """For a process that loads kernels of this mode into Python."""
        found = [
            subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
            for name in self.preload
        ]
        return {"LD_PRELOAD": " ".join(path.strip() for path in found), "ASAN_OPTIONS": "detect_leaks=0"}


PLAIN = Mode("plain", ("-O2", "-g1"))
ADDRESS = Mode(
    "address", ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
    ("libasan.so", "libubsan.so"),
)  # fmt: skip
THREAD = Mode("thread", ("-O1", "-g", "-fsanitize=thread"), ("libtsan.so",))
COVERAGE = Mode("coverage", ("-O1", "-g", "--coverage"))


def missing() -> str | None:
    """Why nothing can be compiled here; None where it can."""
    wish = os.environ.get("GRADACC_HARNESS")
    if wish in ("0", "triton"):
        return f"left out by GRADACC_HARNESS={wish}"
    if not (ROOT / CSRC / "cuda").exists():
        return f"no CUDA sources in {ROOT / CSRC / 'cuda'}"
    return None if shutil.which("g++") else "no g++ on PATH"


def fma_flags() -> tuple[str, ...]:
    """A processor's own fused multiply-add where it has one: libm's takes a hundred times as long."""
    cpuinfo = Path("/proc/cpuinfo")
    return ("-mfma",) if cpuinfo.exists() and " fma " in cpuinfo.read_text() else ()


def make_once(name: str, command: Sequence[str], inputs: Sequence[Path]) -> Path:
    """Run ``command -o FILE`` unless the same was run before on the same inputs; returns FILE."""
    digest = hashlib.sha256(shlex.join(command).encode())
    for path in sorted(inputs):
        digest.update(path.read_bytes())
    folder = BUILD / digest.hexdigest()[:16]
    if not (folder / name).exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial_file = folder / f"partial-{os.getpid()}-{name}"
        done = subprocess.run(
            [*command, "-o", str(partial_file)], capture_output=True, text=True, check=False, cwd=ROOT
        )  # fmt: skip
        if done.returncode != 0 or done.stderr:  # a warning too
            raise RuntimeError(f"{shlex.join(command)}\n{done.stdout}{done.stderr}")
        partial_file.rename(folder / name)
    return folder / name


def headers(csrc: Path) -> list[Path]:
    folders = (ROOT / csrc, ROOT / HARNESS)
    return [path for folder in folders for path in folder.rglob("*") if path.suffix in (".h", ".cuh")]


def compile_object(flags: Sequence[str], csrc: Path, source: Path) -> Path:
    command = ["g++", *LANGUAGE, *flags, f"-I{csrc / 'cuda'}", "-c", str(source)]
    return make_once(f"{source.stem}.o", command, [ROOT / source, *headers(csrc)])


def compile_all(flags: Sequence[str], csrc: Path, sources: Sequence[Path]) -> list[Path]:
    with ThreadPoolExecutor(max_workers=2) as pool:
        return list(pool.map(partial(compile_object, flags, csrc), sources))


def kernels(mode: Mode = PLAIN, program: str | None = None, faulty: Path | None = None) -> Path:
    """The kernels as a library, or with the ``main`` of a file of the harness as an executable.

    Args:
        mode: How to compile.
        program: Name of the file.
        faulty: A kernel file in a copy of csrc with a fault, to take in place of the real one.
    """
    flags = (*fma_flags(), *mode.flags)
    names = [name for name in KERNELS if faulty is None or name != faulty.name]
    sources = [CSRC / "cuda" / name for name in names] + [HARNESS / name for name in RUNTIME]
    sources += [HARNESS / program] if program else []
    objects = compile_all(flags, CSRC, sources)
    if faulty:
        objects.append(compile_object(flags, faulty.parents[1], faulty))
    name = Path(program).stem if program else "libkernels.so"
    link = ["g++", *mode.flags, *([] if program else ["-shared"]), *map(str, objects)]
    return make_once(name, link, objects)


def torch_side(faulty: Path | None = None) -> Path:
    """csrc/cuda's checks, tables and ring as a Python module; the kernels have to be loaded first.

    Args:
        faulty: A file in a copy of csrc with a fault, to take in place of the real one.
    """
    from torch.utils import cpp_extension

    include = [f"-isystem{path}" for path in (*cpp_extension.include_paths(), sysconfig.get_paths()["include"])]
    flags = (
        "-O1", "-fvisibility=hidden", *include, f"-DTORCH_EXTENSION_NAME={MODULE}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}", "-include", "device_type.h",
    )  # fmt: skip
    names = [name for name in TORCH_SIDE if faulty is None or name != faulty.name]
    objects = compile_all(flags, CSRC, [*(CSRC / "cuda" / name for name in names), HARNESS / "module.cpp"])
    if faulty:
        objects.append(compile_object(flags, faulty.parents[1], faulty))
    libraries = [f"-L{cpp_extension.TORCH_LIB_PATH}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    return make_once(f"{MODULE}.so", ["g++", "-shared", *map(str, objects), *libraries], objects)


def planted(name: str, file: str, right: str, wrong: str) -> Path:
    """A copy of csrc with a fault: ``right`` in ``csrc/file`` replaced by ``wrong``. Relative to ROOT."""
    copy = BUILD / "planted" / name
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(ROOT / CSRC, copy)
    text = (copy / file).read_text()
    assert text.count(right) == 1, f"{right!r} occurs {text.count(right)} times in {file}"
    (copy / file).write_text(text.replace(right, wrong))
    return Path(os.path.relpath(copy, ROOT))
