"""CASES B3 and B4: what cannot be built is found before compiling and told in a sentence."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import build_config  # noqa: E402
import gradacc_fused  # noqa: E402


def program(folder: Path, name: str, script: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def toolkit(folder: Path, release: str) -> str:
    program(folder / "bin", "nvcc", f'echo "Cuda compilation tools, release {release}, V{release}.88"')
    return str(folder)


def test_B3_without_torch_the_build_says_what_to_do():
    missing = build_config.missing_for_cpu({"PATH": os.environ["PATH"]}, None)
    assert "torch is not installed" in missing and "--no-build-isolation" in missing


def test_B3_without_a_compiler_the_build_says_what_to_do(tmp_path):
    missing = build_config.missing_for_cpu({"PATH": str(tmp_path)}, "2.13.0")
    assert "no C++ compiler (g++) on PATH. Install g++ or clang++, or set CXX" in missing
    missing = build_config.missing_for_cpu({"PATH": str(tmp_path), "CXX": "icpx -O2"}, "2.13.0")
    assert "no C++ compiler (icpx)" in missing
    program(tmp_path, "clang++", "true")
    assert build_config.missing_for_cpu({"PATH": str(tmp_path)}, "2.13.0") is None


def test_B3_without_cuda_the_build_says_what_to_do(tmp_path):
    path = {"PATH": str(tmp_path)}
    assert "built without CUDA" in build_config.missing_for_cuda(path, None, ["a.cu"])
    assert "neither CUDA_HOME is set nor is nvcc on PATH" in build_config.missing_for_cuda(path, "13.0", ["a.cu"])
    missing = build_config.missing_for_cuda({**path, "CUDA_HOME": str(tmp_path / "none")}, "13.0", ["a.cu"])
    assert f"no nvcc in {tmp_path}/none/bin" in missing
    assert "no CUDA sources" in build_config.missing_for_cuda(path, "13.0", [])


def test_B4_another_major_version_of_cuda_is_found_before_compiling(tmp_path):
    environ = {"PATH": str(tmp_path), "CUDA_HOME": toolkit(tmp_path / "cuda", "12.4")}
    missing = build_config.missing_for_cuda(environ, "13.0", ["a.cu"])
    assert "nvcc is 12.4" in missing and "torch is built for CUDA 13.0" in missing
    assert "Point CUDA_HOME at a CUDA 13 toolkit, or install a torch built for CUDA 12" in missing
    assert build_config.missing_for_cuda(environ, "12.8", ["a.cu"]) is None


def test_the_toolkit_is_found_through_a_wrapper_script(tmp_path):
    """torch takes the folder above the nvcc on PATH; where that is a script, nvcc itself knows better."""
    home = toolkit(tmp_path / "real", "13.0")
    program(tmp_path / "bin", "nvcc", f'echo "#$ TOP={home}/bin/.." >&2')
    environ = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    assert build_config.find_cuda_home(environ) == home
    assert build_config.missing_for_cuda(environ, "13.1", ["a.cu"]) is None


def test_wishes():
    assert build_config.decide("cuda", "V", "a reason", {}) == build_config.Part("cuda", False, "a reason")
    assert build_config.decide("cuda", "V", None, {}).built
    assert build_config.decide("cuda", "V", None, {"V": "0"}).reason == "left out by V=0"
    with pytest.raises(build_config.BuildError, match="V=1 cannot be met: a reason"):
        build_config.decide("cuda", "V", "a reason", {"V": "1"})
    with pytest.raises(build_config.BuildError, match="V must be 0, 1 or auto, got 'yes'"):
        build_config.decide("cuda", "V", None, {"V": "yes"})


def python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, **variables}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environ, check=False
    )  # fmt: skip


def test_B3_importing_without_torch_says_what_to_do():
    done = python("import sys; sys.modules['torch'] = None; import gradacc_fused")
    assert done.returncode == 1
    assert "ImportError: gradacc_fused needs PyTorch, and it is not installed. Run 'pip install torch'" in done.stderr


def test_B3_with_nothing_compiled_it_imports_says_why_and_trains():
    done = python(
        "import sys; sys.modules['gradacc_fused._C'] = None\n"
        "import torch, gradacc_fused as gf\n"
        "print(gf.backends()['cpu'])\n"
        "p = torch.nn.Parameter(torch.zeros(1))\n"
        "opt = gf.GradAccumOptimizer(torch.optim.SGD([p], lr=1.0))\n"
        "with opt.window() as window:\n"
        "    window.backward((p * torch.tensor([1., 1., 1.])).sum(), weight=3, reduction='sum')\n"
        "    window.backward((p * 5).sum(), weight=1, reduction='sum')\n"
        "print(opt.backend, p.item())\n"
        "try:\n    gf.GradAccumOptimizer(torch.optim.SGD([p], lr=1.0), backend='cpu')\n"
        "except gf.BackendUnavailableError as error:\n    print(error)\n"
    )
    assert done.returncode == 0, done.stderr
    status, trained, refused = done.stdout.splitlines()
    assert status.startswith("cpu: not available: the compiled extension is not here")
    assert "pip install --no-build-isolation ." in status
    assert trained == "reference -2.0"
    assert refused.startswith("backend 'cpu' was asked for and cannot run here: the compiled extension")


@pytest.mark.compiled
def test_an_unknown_instruction_set_is_refused():
    def isa(forced: str) -> subprocess.CompletedProcess[str]:
        return python("import torch, gradacc_fused._C as c; print(c.isa())", GRADACC_FUSED_ISA=forced)

    assert "GRADACC_FUSED_ISA must be plain, avx2 or avx512, got 'sse9'" in isa("sse9").stderr
    assert isa("plain").stdout.strip() == "plain"


def test_every_folder_of_the_package_is_installed():
    listed = set(re.findall(r'"(gradacc_fused[.\w]*)"', (ROOT / "pyproject.toml").read_text().split("packages = [")[1]))
    package = Path(gradacc_fused.__file__).parent
    found = [init.parent.relative_to(package).parts for init in package.rglob("__init__.py")]
    folders = {".".join(("gradacc_fused", *parts)) for parts in found} | {"gradacc_fused.triton_kernels"}
    assert folders <= listed
