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
# 3 programs of 4 warps on a multiprocessor, each with vectors of several arrays on the way: 65,536 / (3 * 128) is 170,
# less what is asked for (maxnreg); on gfx942 512 registers of a lane for 3 waves, in eights.
MOST_REGISTERS = {"sm_80": 144, "sm_90": 144, "sm_100": 144, "gfx942": 168}
LOADS, STORES = ("LDG.E.128", "global_load_dwordx4"), ("STG.E.128", "global_store_dwordx4")
MOMENTS = {"adamw": 2, "adam": 2, "sgd": 0, "sgd, momentum": 1, "lion": 1}

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


def count(kernel: dict, names: tuple[str, ...]) -> int:
    return sum(kernel["vectors"].get(name, 0) for name in names)


def least_vectors(kernel: str) -> tuple[int, int]:
    """128-bit loads and stores of the path of whole slices at least.

    An fp32 array is one access per 4 elements of a thread, which has 8 in accumulate and 4 in update; fp64 takes twice
    as many, 16 bits half. A gradient is loaded as each of four dtypes (accumulate: 2 + 4 + 1 + 1, update: 1 + 2); an
    update loads and stores main param and moments, and the parameter as fp32 or fp64.
    """
    stage, _, kind = kernel.partition(", ")
    if stage == "clip":
        return 0, 0
    if stage == "update":
        return 3 + 1 + 3 + MOMENTS[kind], 1 + 3 + MOMENTS[kind]
    return 8 + 2 * ("read" in kind), 2 * ("stored" in kind)


@pytest.mark.parametrize("target", TARGETS)
def test_the_contract_holds(compiled, target, capsys):
    kernels = [kernel for kernel in compiled["kernels"] if kernel["target"] == target]
    assert sum(kernel["kernel"].startswith("update") for kernel in kernels) == len(MOMENTS)
    assert len(kernels) == len(MOMENTS) + 2 + 10  # clip: two norms; accumulate: three norms, read, stored, less no-ops
    for kernel in kernels:
        with capsys.disabled():
            found = ", ".join(f"{times} {name}" for name, times in kernel["vectors"].items())
            print(
                f"\n{target:7} {kernel['kernel']:28} {kernel['registers']:3} registers, {kernel['stack']} B stack, "
                f"{kernel['spills']} spills: {found}",
                end="",
            )
        assert kernel["registers"] <= MOST_REGISTERS[target]
        assert kernel["stack"] == 0 and kernel["spills"] == 0
        assert kernel["approximate"] == []
        least_loads, least_stores = least_vectors(kernel["kernel"])
        assert count(kernel, LOADS) >= least_loads
        assert count(kernel, STORES) >= least_stores
        if not kernel["kernel"].startswith("clip"):
            assert kernel["offsets"].get("i64", 0) > 0 and set(kernel["offsets"]) == {"i64"}


@pytest.mark.compiled  # the reference's collector holds no gradients: other windows
def test_nothing_that_changes_from_step_to_step_is_compiled_anew(tmp_path):
    """Eight windows with another lr (float or tensor), decay, momentum, weights, clip factor and set of gradients each,
    with AdamW, Lion and SGD: one kernel per kind, and one update per rule.
    """
    found = run(tmp_path, "specializations")
    assert {name: sum(keys.values()) for name, keys in found.items()} == {
        "accumulate_kernel": 24 * 3, "clip_kernel": 24, "update_kernel": 24,
    }  # fmt: skip
    # The first flush overwrites, the second adds, the closing pass measures.
    assert {name: sorted(keys.values()) for name, keys in found.items()} == {
        "accumulate_kernel": [24, 24, 24], "clip_kernel": [24], "update_kernel": [8, 8, 8],
    }  # fmt: skip
