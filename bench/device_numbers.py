"""Whether a device computes what the cpu backend does: the suite's cases, and a captured graph. Needs torch alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch

F64 = torch.float64
FEW = 8  # every eighth case


@dataclass
class Row:
    """One line of the table. ``passed``: None where nothing was checked, with the reason in ``found``."""

    check: str
    what: str
    found: str
    passed: bool | None = None
    value: float | None = None


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def moved(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copies on a device: the same strides, gaps and offsets into their memory."""
    copies = []
    for tensor in tensors:
        memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).to(device, copy=True)
        copies.append(memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()))
    return copies


def within_one_ulp(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    mine, theirs = (t.float() if t.dtype in (torch.bfloat16, torch.float16) else t for t in (mine.cpu(), theirs))
    ulp = torch.nextafter(theirs.abs(), torch.full_like(theirs, math.inf)) - theirs.abs()
    close = ((mine - theirs).abs() <= ulp) | (mine == theirs) | (mine.isnan() & theirs.isnan())
    return bool(close.all())


def closing(ops: Any, case: Any, device: torch.device, store: bool, norm_type: float) -> list[torch.Tensor]:
    """Main grads, partials and found_inf of a closing pass, on the host."""
    import gradacc_fused as gf

    main_grads, grads = moved(case.main_grads(), device), moved(case.grads(), device)
    partials = torch.full((gf.n_partials(main_grads),), -1.0, dtype=F64, device=device)
    found_inf = torch.full((), -1.0, device=device)
    ops.accumulate_(
        main_grads, grads, torch.tensor(case.weights, dtype=F64), partials, found_inf,
        overwrite=False, store=store, norm_type=norm_type,
    )  # fmt: skip
    return [tensor.cpu() for tensor in (*main_grads, partials, found_inf)]


def updated(
    ops: Any, case: Any, rule: str, device: torch.device, found_inf: float = 0.0, bound: float = math.inf
) -> list[torch.Tensor]:  # fmt: skip
    """Parameters and state after three updates, on the host."""
    from updates import Updated

    state = Updated(case, rule)
    lists = ("params", "main_params", "exp_avgs", "exp_avg_sqs")
    for name in lists:
        setattr(state, name, moved(getattr(state, name), device))
    state.steps = state.steps.to(device)
    for step in range(3):
        ops.update_(
            state.params, state.main_params, state.exp_avgs, state.exp_avg_sqs, state.steps, [],
            moved(case.grads(seed=step), device), torch.tensor(case.weights, dtype=F64), state.hyper, state.group_ids,
            state.touched, torch.tensor(0.37, dtype=F64, device=device), torch.tensor(found_inf, device=device),
            rule=state.rule, max_grad_value=bound,
        )  # fmt: skip
    return [tensor.cpu() for name in lists for tensor in getattr(state, name)] + [state.steps.cpu()]


def measured(ops: Any, case: Any, device: torch.device, norm_type: float) -> list[torch.Tensor]:
    """total_norm, clip_coef, multiplier, weight_sum and found_inf of ``norm_`` and ``clip_``, on the host."""
    import gradacc_fused as gf

    main_grads = moved(case.main_grads(), device)
    partials = torch.zeros(gf.n_partials(main_grads), dtype=F64, device=device)
    found_inf = torch.zeros((), device=device)
    cells = [torch.zeros((), dtype=F64, device=device) for _ in range(4)]
    ops.norm_(main_grads, partials, found_inf, norm_type=norm_type)
    counts, scale = torch.tensor([3.0, 0.5], dtype=F64), torch.tensor(0.25, dtype=F64)
    ops.clip_(partials, counts, scale, *cells, norm_type=norm_type, max_norm=0.5)
    return [tensor.cpu() for tensor in (*cells, found_inf)]


def boundary(ops: Any, cpu: Any, device: torch.device, stride: int = 1) -> Iterator[Row]:
    """norm_ and clip_ by themselves, a clip by value, and a step that is skipped."""
    from cases import CASES, NONFINITE_CASES
    from updates import RULES, UPDATE_CASES

    host = torch.device("cpu")
    cases, wrong = (*CASES, *NONFINITE_CASES)[::stride], 0
    for case in cases:
        for norm_type in (2.0, math.inf):
            pairs = zip(measured(ops, case, device, norm_type), measured(cpu, case, host, norm_type), strict=True)
            wrong += not all(torch.allclose(a, b, rtol=1e-13, atol=0, equal_nan=True) for a, b in pairs)
    total = 2 * len(cases)
    yield Row("conformance", "norm_ and clip_ equal to cpu", f"{total - wrong} of {total}", wrong == 0)
    clipped, moved_on, case = 0, 0, UPDATE_CASES[0]
    for rule in RULES:
        bounded = (updated(o, case, rule, at, bound=0.05) for o, at in ((ops, device), (cpu, host)))
        clipped += not all(within_one_ulp(a, b) for a, b in zip(*bounded, strict=True))
        skipped, untouched = (updated(o, case, rule, device, found_inf=1.0) for o in (ops, Nothing))
        moved_on += not all(torch.equal(a, b) for a, b in zip(skipped, untouched, strict=True))
    yield Row(
        "conformance", "clip by value within 1 ulp of cpu", f"{len(RULES) - clipped} of {len(RULES)}", clipped == 0
    )
    found = f"{len(RULES) - moved_on} of {len(RULES)}"
    yield Row("conformance", "a step with found_inf changes nothing", found, moved_on == 0)


class Nothing:
    """Ops that leave everything as it is."""

    @staticmethod
    def update_(*arguments: Any, **options: Any) -> None: ...


def conformance(ops: Any, cpu: Any, device: torch.device, stride: int = 1) -> Iterator[Row]:
    """Every case of the suite beside the cpu backend on the host."""
    from cases import CASES, NONFINITE_CASES
    from updates import RULES, UPDATE_CASES

    host = torch.device("cpu")
    wrong = []
    cases, update_cases = (*CASES, *NONFINITE_CASES)[::stride], UPDATE_CASES[::stride]
    for case in cases:
        for store, norm_type in ((True, 2.0), (False, math.inf)):
            mine, theirs = (closing(o, case, at, store, norm_type) for o, at in ((ops, device), (cpu, host)))
            same = all(
                torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(mine[:-2], theirs[:-2], strict=True)
            )
            partials = torch.allclose(mine[-2], theirs[-2], rtol=1e-13, equal_nan=True)
            if not (same and partials and torch.equal(mine[-1], theirs[-1])):
                wrong.append(str(case))
    total = 2 * len(cases)
    yield Row("conformance", "sums bit-equal to cpu, norm, found_inf", f"{total - len(wrong)} of {total}", not wrong)
    wrong = []
    for case in update_cases:
        for rule in RULES:
            pairs = zip(updated(ops, case, rule, device), updated(cpu, case, rule, host), strict=True)
            if not all(within_one_ulp(mine, theirs) for mine, theirs in pairs):
                wrong.append(f"{case}/{rule}")
    total = len(update_cases) * len(RULES)
    found = f"{total - len(wrong)} of {total}" + (f": not {', '.join(wrong[:3])}" if wrong else "")
    yield Row("conformance", "updates within 1 ulp of cpu", found, not wrong)


def whole_windows(device: torch.device) -> Row:
    """The optimizer's own way: windows of all kinds on the device beside the same ones on the host."""
    import gradacc_fused as gf

    def trained(at: torch.device, inner: str, defer: int | str) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        shapes = [(70_000,), (5,), (0,), (40, 30), (1,), (3, 4, 5, 6)] * 2
        dtypes = [torch.bfloat16, torch.float32, torch.float16, torch.float64]
        start = [torch.randn(shape, generator=generator, dtype=F64) for shape in shapes]
        params = [torch.nn.Parameter(x.to(dtypes[i % 4]).to(at)) for i, x in enumerate(start)]
        groups = [{"params": params[:5]}, {"params": params[5:], "lr": 0.01}]
        rule = {
            "adamw": lambda: torch.optim.AdamW(groups, lr=0.05),
            "sgd": lambda: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
            "lion": lambda: gf.Lion(groups, lr=0.05),
        }[inner]()
        opt = gf.GradAccumOptimizer(rule, accumulation_steps=3, weighting="given", max_grad_norm=1.0, defer=defer)
        for step in range(12):
            for i, param in enumerate(params):
                grad = torch.randn(param.shape, generator=generator, dtype=F64)
                if step == 7 and i == 0:
                    grad[3] = math.inf  # that window is skipped
                param.grad = None if i == 3 or (i + step) % 5 == 0 else grad.to(param.dtype).to(at)
            opt.step(weight=1.0 + step)
        state = [value for entry in opt.state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
        return [tensor.detach().cpu() for tensor in (*params, *state)]

    wrong = []
    kinds = [(inner, defer) for inner in ("adamw", "sgd", "lion") for defer in (1, 2, "auto")]
    for inner, defer in kinds:
        mine, theirs = (trained(at, inner, defer) for at in (device, torch.device("cpu")))
        # Norms are summed in another order: a multiplier may differ in its last bit, and four windows add up.
        pairs = zip(mine, theirs, strict=True)
        if not all(torch.allclose(a.double(), b.double(), rtol=2**-7, atol=1e-5) for a, b in pairs):
            wrong.append(f"{inner}/{defer}")
    found = f"{len(kinds) - len(wrong)} of {len(kinds)}" + (f": not {', '.join(wrong)}" if wrong else "")
    return Row("conformance", "whole windows of the optimizer equal to cpu's", found, not wrong)


def others(device: torch.device, name: str) -> list[str]:
    """Backends of the device beside ``name`` that promise its bits; the reference does not."""
    from gradacc_fused.backends import registry

    known = {other: status for other, status in registry.backends().items() if device.type in status.devices}
    return [other for other, status in known.items() if status.available and other != name]


def some_of(name: str, cpu: Any, device: torch.device) -> Iterator[Row]:
    """Some conformance cases of another backend."""
    from gradacc_fused.backends import registry

    for row in chain(*(check(registry.get(name), cpu, device, FEW) for check in (conformance, boundary))):
        yield replace(row, what=f"{name}: {row.what}")


def graph(ops: Any, device: torch.device) -> Row:
    """Closing pass, clip and update captured, and replayed on new values at the same addresses."""
    what = "captured window equals the eager one after 3 replays"
    if device.type != "cuda":
        return Row("graph", what, "only a GPU has graphs")
    import gradacc_fused as gf

    def made() -> dict[str, Any]:
        torch.manual_seed(0)
        params = [torch.randn(n, device=device) for n in (70_000, 5, 3000)]
        like = [torch.zeros_like(param) for param in params]
        cells = [torch.zeros((), dtype=F64, device=device) for _ in range(4)]
        return {
            "params": params, "grads": [torch.empty_like(param) for param in params], "m": like,
            "v": [torch.zeros_like(param) for param in params], "steps": torch.zeros(3, device=device), "cells": cells,
            "partials": torch.zeros(gf.n_partials(params), dtype=F64, device=device),
            "found_inf": torch.zeros((), device=device), "weights": torch.ones(1, dtype=F64, device=device),
            "hyper": gf.hyper_rows([{"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8}]).to(device),
            "group_ids": torch.zeros(3, dtype=torch.int32, device=device),
            "touched": torch.ones(3, dtype=torch.uint8, device=device),
            "scale": torch.ones((), dtype=F64, device=device),
        }  # fmt: skip

    def window(t: dict[str, Any]) -> None:
        ops.accumulate_(
            [], t["grads"], t["weights"], t["partials"], t["found_inf"], overwrite=True, store=False, norm_type=2.0
        )  # fmt: skip
        ops.clip_(t["partials"], t["weights"], t["scale"], *t["cells"], norm_type=2.0, max_norm=1.0)
        ops.update_(
            t["params"], [], t["m"], t["v"], t["steps"], [], t["grads"], t["weights"], t["hyper"], t["group_ids"],
            t["touched"], t["cells"][2], t["found_inf"], rule="adamw", max_grad_value=math.inf,
        )  # fmt: skip

    def fill(t: dict[str, Any], step: int) -> None:
        for i, grad in enumerate(t["grads"]):
            grad.fill_(0.1 * (step + 1) * (i - 1.5))

    eager, replayed = made(), made()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        fill(replayed, 0)
        window(replayed)  # makes the tables on the capturing stream
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=stream):
            window(replayed)
        guard = gf.GuardedGraph(captured, lambda: replayed["grads"])
        for step in range(1, 4):
            fill(replayed, step)
            guard.replay()
    for step in range(4):
        fill(eager, step)
        window(eager)
    sync(device)
    same = all(
        torch.equal(a, b) for name in ("params", "m", "v") for a, b in zip(eager[name], replayed[name], strict=True)
    )
    return Row("graph", what, "equal bits" if same else "differs", same)


def step_graph(device: torch.device) -> Row:
    """A whole window of the optimizer captured: gradients, the lr and the skip are what they are at the replay."""
    what = "captured opt.step() equals the eager one after 4 replays"
    if device.type != "cuda":
        return Row("graph", what, "only a GPU has graphs")
    import gradacc_fused as gf

    k = 2

    class Trained:
        def __init__(self) -> None:
            torch.manual_seed(0)
            shapes = ((70_000, torch.bfloat16), (5, torch.float32), (3000, torch.bfloat16))
            self.params = [torch.nn.Parameter(torch.randn(n, device=device).to(dtype)) for n, dtype in shapes]
            self.grads = [[torch.empty_like(param) for param in self.params] for _ in range(k)]
            self.lr = torch.tensor(1e-2, device=device)
            inner = torch.optim.AdamW(self.params, lr=self.lr, capturable=True)
            self.optimizer = gf.GradAccumOptimizer(
                inner, accumulation_steps=k, weighting="given", max_grad_norm=1.0, defer=1
            )  # fmt: skip

        def fill(self, step: int) -> None:
            self.lr.fill_(1e-2 / (step + 1))
            for j, piece in enumerate(self.grads):
                for i, grad in enumerate(piece):
                    grad.fill_(math.nan if step == 3 and j == 1 else 0.1 * (step + j + 1) * (i - 1.5))

        def window(self) -> None:
            for weight, piece in enumerate(self.grads, start=1):
                for param, grad in zip(self.params, piece, strict=True):
                    param.grad = grad
                self.optimizer.step(weight=float(weight))

        def values(self) -> list[torch.Tensor]:
            state = [value for entry in self.optimizer.state.values() for value in entry.values()]
            return [*self.params, *(value for value in state if isinstance(value, torch.Tensor))]

    eager, replayed = Trained(), Trained()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        replayed.fill(0)
        replayed.window()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=stream):
            replayed.window()
        guard = gf.GuardedGraph(captured, lambda: [grad for piece in replayed.grads for grad in piece])
        for step in range(1, 5):
            replayed.fill(step)
            guard.replay()
    for step in range(5):
        eager.fill(step)
        eager.window()
    sync(device)
    same = all(torch.equal(a, b) for a, b in zip(eager.values(), replayed.values(), strict=True))
    return Row("graph", what, "equal bits" if same else "differs", same)
