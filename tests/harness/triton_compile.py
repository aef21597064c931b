"""Compiles the Triton kernels for GPUs that are not here, and prints what became of them as JSON; its own process.

python -m tests.harness.triton_compile sm_80 sm_90 gfx942
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import triton
from gradacc_fused.triton_kernels.accumulate import accumulate_kernel
from gradacc_fused.triton_kernels.clip import clip_kernel
from gradacc_fused.triton_kernels.update import update_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gradacc_fused.backends.triton import FOLD, blocks, options

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Arguments by name; what is not listed is a 64-bit address of int64 words.
TYPES = {
    "n_slices": "i32", "m": "i32", "tensors": "i32", "chunks": "i32", "n_partials": "i32", "n_counts": "i32",
    "counters_ptr": "*i32", "group_ids_ptr": "*i32", "touched_ptr": "*u8", "steps_ptr": "*fp32",
    "found_inf_ptr": "*fp32", "total_norm_ptr": "*fp32", "clip_coef_ptr": "*fp32",
    **dict.fromkeys(
        ("weights_ptr", "of_slices_ptr", "partials_ptr", "counts_ptr", "loss_scale_ptr", "multiplier_ptr",
         "weight_sum_ptr", "max_norm_ptr", "hyper_ptr", "bound_ptr"), "*fp64",
    ),
}  # fmt: skip
ACCUMULATE = {
    f"accumulate{', read' * read}{', stored' * store}{('', ', largest', ', norm')[norm]}": (
        accumulate_kernel, {"READ": read, "STORE": store, "NORM": norm, "FOLD": FOLD}
    )
    for norm in (0, 1, 2) for read in (True, False) for store in (True, False) if store or norm
}  # fmt: skip
UPDATE = {
    f"update, {name}": (
        update_kernel,
        {"RULE": rule, "BUFFER": buffer, "FOLD": FOLD},
    )
    for name, rule, buffer in (
        ("adamw", "adamw", True), ("adam", "adam", True), ("sgd", "sgd", False), ("sgd, momentum", "sgd", True),
        ("lion", "lion", True),
    )
}  # fmt: skip
CLIP = {f"clip{', largest' * inf}": (clip_kernel, {"INF": inf, "BLOCK": 1024}) for inf in (False, True)}
KERNELS: dict[str, tuple[Any, dict[str, Any]]] = ACCUMULATE | CLIP | UPDATE


@dataclass
class Compiled:
    """What a kernel became on a target."""

    kernel: str
    target: str
    registers: int
    stack: int
    spills: int
    shared: int
    vectors: dict[str, int] = field(default_factory=dict)  # memory instructions by name
    approximate: list[str] = field(default_factory=list)
    offsets: dict[str, int] = field(default_factory=dict)  # of a tile's elements, by the integers' type


def target_of(name: str) -> GPUTarget:
    return GPUTarget("cuda", int(name[3:]), 32) if name.startswith("sm_") else GPUTarget("hip", name, 64)


def compile_for(name: str, target: str) -> Compiled:
    kernel, constants = KERNELS[name]
    hip = not target.startswith("sm_")
    if "FOLD" in constants:
        constants = constants | {"BLOCK": blocks(hip)[name.startswith("update")]}
    names = kernel.arg_names
    signature = {arg: "constexpr" if arg in constants else TYPES.get(arg, "*i64") for arg in names}
    source = ASTSource(
        fn=kernel, signature=signature, constexprs={(names.index(arg),): value for arg, value in constants.items()},
        attrs={(names.index(arg),): [["tt.divisibility", 16]] for arg in names if signature[arg].startswith("*")},
    )  # fmt: skip
    made = triton.compile(source, target=target_of(target), options=options(hip))
    found = of_amd(name, target, made) if hip else of_nvidia(name, target, made)
    found.offsets = counted(rf"tt\.addptr .*tensor<{constants['BLOCK']}x(i\d+)>", made.asm["ttir"])
    return found


def counted(pattern: str, text: str) -> dict[str, int]:
    found = re.findall(pattern, text)
    return {name: found.count(name) for name in sorted(set(found))}


def of_nvidia(name: str, target: str, made: Any) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        listing, usage = (
            subprocess.run([str(TOOLS / tool), option, file.name], capture_output=True, text=True, check=True).stdout
            for tool, option in (("nvdisasm", "-c"), ("cuobjdump", "--dump-resource-usage"))
        )
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", usage)
    assert found, usage
    memory = counted(r"\b((?:LDG|STG|LDL|STL)[.\w]*)", listing)
    spills = sum(times for instruction, times in memory.items() if instruction.startswith(("LDL", "STL")))
    approximate = re.findall(r"\b\w+\.(?:approx|full)[.\w]*", made.asm["ptx"])
    return Compiled(
        name, target, int(found.group(1)), int(found.group(2)) + int(found.group(3)), spills, made.metadata.shared,
        memory, sorted(set(approximate)),
    )  # fmt: skip


def of_amd(name: str, target: str, made: Any) -> Compiled:
    text = made.asm["amdgcn"]

    def number(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", text)
        assert found, key
        return int(found.group(1))

    # A division rounded to nearest mends its reciprocal and ends in a fixup; one without is approximate.
    exact = len(re.findall(r"\bv_div_fixup_f(?:32|64)\b", text))
    reciprocals = re.findall(r"\bv_rcp_(?:iflag_)?f(?:32|64)\w*", text)
    approximate = sorted(set(reciprocals)) if len(reciprocals) > exact else []
    memory = counted(r"\b((?:global|flat|buffer|scratch)_(?:load|store)\w*)", text)
    spills = number("vgpr_spill_count")  # scalar registers go to lanes of vector ones, not to memory
    return Compiled(
        name, target, number("vgpr_count"), number("private_segment_fixed_size"), spills,
        number("group_segment_fixed_size"), memory, approximate,
    )  # fmt: skip


def specializations() -> dict[str, dict[str, int]]:
    """Launches of a training run in which everything changes from step to step, by the keys that Triton compiles for.

    The launches are recorded and not made; there is no GPU.
    """
    import torch
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    import gradacc_fused as gf
    from gradacc_fused.backends import registry

    registry.ROWS = (registry.Row("recorded", ("cpu",), "gradacc_fused.backends.triton"), *registry.ROWS)
    sys.modules["gradacc_fused.backends.triton"].unavailable_reason = lambda: None  # type: ignore[attr-defined]
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        calls.append((self, args, kwargs))

    JITFunction.run = record
    inners: tuple[Any, ...] = (torch.optim.AdamW, gf.Lion, partial(torch.optim.SGD, momentum=0.9))
    for inner in inners:
        params = [torch.nn.Parameter(torch.zeros(n)) for n in (9000, 17, 70_001)]
        opt = gf.GradAccumOptimizer(
            inner([{"params": params[:1]}, {"params": params[1:]}], lr=torch.tensor(1.0)), accumulation_steps=5,
            weighting="given", max_grad_norm=1.0, defer=2, backend="recorded",
        )  # fmt: skip
        for step in range(40):
            for number, param in enumerate(params):
                param.grad = None if (number + step) % 4 == 0 else torch.full_like(param, float(step))
            for number, group in enumerate(opt.param_groups):
                group["lr"] = torch.tensor(0.1 / (step + 1)) if number else 0.1 / (step + 1)
                group["weight_decay"] = 0.01 * step
                group["momentum"] = 0.9 / (step + 1)
            opt.step(weight=float(step + 1))
    backend = make_backend(target_of("sm_90"))
    found: dict[str, dict[str, int]] = {}
    for kernel, args, kwargs in calls:
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        _, key, options = bind(*args, **kwargs)
        of_kernel = found.setdefault(kernel.__name__, {})
        of_kernel[f"{key} {options}"] = of_kernel.get(f"{key} {options}", 0) + 1
    return found


def main() -> None:
    if sys.argv[1:] == ["specializations"]:
        print(json.dumps(specializations()))
        return
    made = [asdict(compile_for(name, target)) for target in sys.argv[1:] for name in KERNELS]
    print(json.dumps({"triton": triton.__version__, "kernels": made}))


if __name__ == "__main__":
    main()
