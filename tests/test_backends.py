"""The registry: asked for by name it obeys or raises with the reason; imports point one way."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import cuda_on_cpu, triton_on_cpu
from models import scalar

import gradacc_fused as gf
from gradacc_fused.backends import cuda, registry

PACKAGE = Path(gf.__file__).parent


def test_every_backend_is_listed_with_a_reason_for_each_absence():
    statuses = gf.backends()
    assert list(statuses) == [
        "cuda",
        "triton",
        "cpu",
        "reference",
        cuda_on_cpu.NAME,
        triton_on_cpu.NAME,
    ]  # two are the tests' own
    for name, status in statuses.items():
        assert status.available or len(status.reason) > 20
        assert str(status).startswith(f"{name}: ")
    assert statuses["reference"].available


@pytest.mark.skipif(cuda._C is None, reason="the CUDA extension is not built here")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_cuda_extension_imports_without_a_gpu_and_says_so():
    assert "CUDA: registered" in torch._C._dispatch_dump("gradacc_fused::update_")
    param = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(gf.BackendUnavailableError, match="there is no usable GPU"):
        gf.GradAccumOptimizer(torch.optim.SGD([param], lr=1.0), backend="cuda")


@pytest.mark.skipif(cuda._C is None, reason="the CUDA extension is not built here")
def test_the_cuda_hot_path_refuses_what_is_not_on_a_gpu():
    with pytest.raises(ValueError, match="HotPath: device must be one of CUDA's, got cpu"):
        cuda.hot_path([torch.ones(1)], torch.zeros(1, dtype=torch.int32), torch.device("cpu"))


@pytest.mark.parametrize("name", ["cuda", "triton"])
def test_a_backend_that_is_not_here_is_refused_with_the_reason(name):
    with pytest.raises(gf.BackendUnavailableError, match=f"backend '{name}' was asked for and cannot run here: .+"):
        scalar(name)


def test_the_environment_variable_is_obeyed_or_raises(monkeypatch):
    monkeypatch.setenv("GRADACC_FUSED_BACKEND", "reference")
    assert scalar()[1].backend == "reference"
    monkeypatch.setenv("GRADACC_FUSED_BACKEND", "cuda")
    with pytest.raises(gf.BackendUnavailableError, match="'cuda' was asked for"):
        scalar()
    monkeypatch.setenv("GRADACC_FUSED_BACKEND", "gpu")
    with pytest.raises(ValueError, match="must be one of cuda, triton, cpu, reference.*, got 'gpu'"):
        scalar()
    assert scalar("reference")[1].backend == "reference"  # the argument comes first


@pytest.mark.parametrize(
    ("there", "chosen"),
    [(("cuda", "triton"), "cuda"), (("triton",), "triton"), ((), "reference")],
    ids=["both", "triton-alone", "neither"],
)
def test_the_first_that_can_run_is_chosen_for_a_gpu(monkeypatch, there, chosen):
    def load(name):
        known = name in there or name == "reference"
        return (name, "") if known else (None, "it is not here")

    monkeypatch.setattr(registry, "_load", load)
    monkeypatch.delenv(registry.VARIABLE, raising=False)
    gpu = torch.device("cuda")
    assert registry.choose(gpu) == chosen
    for name in ("cuda", "triton"):
        monkeypatch.setenv(registry.VARIABLE, name)
        for asked in (None, name):
            if name in there:
                assert registry.choose(gpu, asked) == name
            else:
                with pytest.raises(gf.BackendUnavailableError, match=f"'{name}' was asked for and cannot run here"):
                    registry.choose(gpu, asked)
        assert registry.choose(gpu, "reference") == "reference"  # the argument comes first


@pytest.mark.compiled
def test_cpu_is_chosen_for_cpu_and_refused_for_others():
    assert scalar()[1].backend == "cpu"
    param = torch.nn.Parameter(torch.ones(1, device="meta"))
    with pytest.raises(gf.BackendUnavailableError, match="parameters are on meta; it serves cpu"):
        gf.GradAccumOptimizer(torch.optim.SGD([param], lr=1.0), backend="cpu")
    assert registry.choose(torch.device("meta")).__name__.endswith("reference")


@pytest.mark.compiled
def test_importing_the_package_is_enough_for_compiled_ops():
    """The stage functions run in C++ from the first call on, whether or not an optimizer was built before."""
    code = (
        "import torch, gradacc_fused as gf\n"
        "keys = torch._C._dispatch_dump('gradacc_fused::accumulate_')\n"
        "print('CPU: registered' in keys)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


# Each module may import those of lower levels only: optimizer -> stages -> backends -> kernels.
LEVELS = [
    {
        "errors",
        "results",
        "options",
        "lion",
        "modules",
        "wrapper",
        "batch.plan",
        "batch.out_of_memory",
        "batch.saved_state",
    },
    {"layout", "batch.planner", "batch.denominators", "batch.ledger", "batch_norm"},
    {"capture", "checks", "collector", "attach", "guards", "hooks", "buffers", "memory"},
    {"_ops", "rules"},
    {"backends.base", "backends.extension", "backends.ops_path"},
    {"backends.reference", "backends.cpu", "backends.device_path"},
    {"backends.cuda", "backends.triton"},
    {"backends.registry"},
    {"accumulate", "clip", "update", "engine"},
    {"publish", "micro_batches"},
    {"modes", "attempts", "open_window"},
    {"checkpoint"},
    {"window", "verify"},
    {"optimizer"},
    {"explain", "floor", "report.events", "report.timing", "report.machine"},
    {"report.paths", "batch.memory"},
    {"report.floor_table", "report.model", "report.bench"},
    {"demo.text"},
    {"demo.model"},
    {"demo.train"},
    {"demo.measure"},
    {"demo.report"},
    {"cli"},
]
LEVEL = {name: number for number, names in enumerate(LEVELS) for name in names}


def imports(path: Path) -> set[str]:
    """Modules of ours that a file imports at run time (a TYPE_CHECKING block is none)."""
    tree = ast.parse(path.read_text())
    folder = path.relative_to(PACKAGE).parent.parts
    skipped = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and getattr(block.test, "id", "") == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level and id(node) not in skipped:
            base = folder[: len(folder) - node.level + 1]
            module = ".".join([*base, *(node.module.split(".") if node.module else [])])
            names = [".".join(filter(None, [module, alias.name])) for alias in node.names]
            found |= {name for name in [module, *names] if name in LEVEL}
    return found


def test_imports_point_one_way():
    files = [path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]
    seen = set()
    for path in files:
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        if name.startswith("triton_kernels"):
            continue
        seen.add(name)
        for other in imports(path):
            assert LEVEL[other] < LEVEL[name], f"{name} imports {other}, which is not below it"
    assert seen == set(LEVEL)


def test_only_one_file_spells_torch_ops():
    spelled = [
        path.name for path in PACKAGE.rglob("*.py") if "torch.ops" in path.read_text().replace("``torch.ops``", "")
    ]
    assert spelled == ["_ops.py"]


def test_files_stay_small():
    root = Path(__file__).resolve().parent.parent
    for pattern in ("gradacc_fused/**/*.py", "csrc/**/*.*", "bench/*.py", "triton_kernels/*.py", "*.py"):
        for path in root.glob(pattern):
            assert len(path.read_text().splitlines()) <= 400, path
