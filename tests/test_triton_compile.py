"""The compile contract of the Triton kernels, for GPUs that are not here: vectors, no spills, exact arithmetic."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
MOST_REGISTERS = 144  # 3 programs of 4 warps on a multiprocessor, each with vectors of several arrays on the way
VECTORS = ("LDG.E.128", "STG.E.128", "global_load_dwordx4", "global_store_dwordx4")

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def run(cache: Path, *arguments: str):
    """What tests/harness/triton_compile.py says: in a process without the interpreter, and with a cache of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "GRADACC_HARNESS": "0"}
    paths = [str(ROOT), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    done = subprocess.run(
        [sys.executable, "-m", "tests.harness.triton_compile", *arguments],
        capture_output=True, text=True, check=False, env=environment, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return run(tmp_path_factory.mktemp("triton"), *TARGETS)


def vectors(kernel: dict) -> dict[str, int]:
    return {name: kernel["vectors"][name] for name in VECTORS if name in kernel["vectors"]}


@pytest.mark.parametrize("target", TARGETS)
def test_the_contract_holds(compiled, target, capsys):
    kernels = [kernel for kernel in compiled["kernels"] if kernel["target"] == target]
    assert len(kernels) == 17
    for kernel in kernels:
        with capsys.disabled():
            found = ", ".join(f"{times} {name}" for name, times in vectors(kernel).items()) or "no vectors"
            print(
                f"\n{target:7} {kernel['kernel']:28} {kernel['registers']:3} registers, {kernel['stack']} B stack, "
                f"{kernel['spills']} spills: {found}",
                end="",
            )
        assert kernel["registers"] <= MOST_REGISTERS
        assert kernel["stack"] == 0 and kernel["spills"] == 0
        assert kernel["approximate"] == []
        if not kernel["kernel"].startswith("clip"):
            loads = sum(times for name, times in vectors(kernel).items() if "LD" in name or "load" in name)
            stores = sum(times for name, times in vectors(kernel).items() if "ST" in name or "store" in name)
            assert loads >= 3
            assert stores >= 1 or "stored" not in kernel["kernel"] and kernel["kernel"].startswith("accumulate")


@pytest.mark.compiled  # the reference's collector holds no gradients: other windows
def test_nothing_that_changes_from_step_to_step_is_compiled_anew(tmp_path):
    """Eight windows with another lr, decay, weights, clip factor and set of gradients each: one kernel per kind."""
    found = run(tmp_path, "specializations")
    assert {name: sum(keys.values()) for name, keys in found.items()} == {
        "accumulate_kernel": 8 * 3, "clip_kernel": 8, "update_kernel": 8,
    }  # fmt: skip
    # The first flush overwrites, the second adds, the closing pass measures.
    assert {name: sorted(keys.values()) for name, keys in found.items()} == {
        "accumulate_kernel": [8, 8, 8], "clip_kernel": [8], "update_kernel": [8],
    }  # fmt: skip
