"""The loops that ``bench`` measures beside ours: what torch offers, each on bf16 parameters."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from gradacc_fused.floor import Floor, Pass
from gradacc_fused.report.paths import MAX_NORM, Fused, Noise, Path, Stock, make_optimizer

from .shapes import Shape

MS = (1, 4)  # of our path, where a window has as many micro-batches


def make_params(shapes: Sequence[Shape], seed: int = 0) -> list[torch.Tensor]:
    """bf16 parameters; the same values for the same seed."""
    noise = Noise(seed)
    return [torch.nn.Parameter(noise.fill(torch.empty(shape, dtype=torch.bfloat16))) for shape in shapes]


class StockCopy(Stock):
    """The kinder stock loop: the first micro-batch is copied into the main grads instead of added to zeros."""

    name = "stock_copy"
    first = "copy"


class Plain(Stock):
    """Everything in bf16: the sum, the moments and the parameters. Fewer bytes, and other results."""

    name = "plain"
    footprint = 10
    first = "take"
    with_main_params = False


class PlainFp32Grad(Stock):
    """``param.grad_dtype = torch.float32``: autograd casts and sums in fp32, and ``.grad`` is the main grad.

    The cast belongs to the making of the gradient and is not measured. torch's optimizers refuse fp32 gradients of bf16
    parameters, so the step runs on fp32 main params.
    """

    name = "plain_fp32_grad"
    with_main_grads = False

    def __init__(self, params: list[torch.Tensor], k: int, lr: float = 1e-3, rule: str = "adamw") -> None:
        for param in params:
            param.grad_dtype = torch.float32
        super().__init__(params, k, lr, rule)

    def floor_of(self, dtype: torch.dtype) -> Floor | None:
        table = super().floor_of(dtype)
        assert table is not None
        kept = [row for row in table.passes if row.name not in ("zero", "add")]
        return Floor(self.k, 0, (Pass("add", self.k - 1, 3 * 4, 1, 1), *kept), 4)


class Compiled(Stock):
    """``torch.compile`` of clip and AdamW. Compiling is not measured.

    The main params are views of one flat fp32 parameter, and so are the main grads: for a list of tensors Inductor
    makes a loop per tensor and compiles for minutes.
    """

    name = "compiled"

    def make_optimizer(self) -> Any:
        sizes = [stepped.numel() for stepped in self.stepped]
        self.flat = torch.cat([stepped.flatten() for stepped in self.stepped])
        self.flat.grad = torch.empty_like(self.flat)
        parts = zip(self.stepped, self.flat.split(sizes), self.flat.grad.split(sizes), strict=True)
        for i, (stepped, values, total) in enumerate(parts):
            self.stepped[i], self.sums[i] = values.view_as(stepped), total.view_as(stepped)
        optimizer = make_optimizer(self.rule, [self.flat], self.lr)

        def clip_and_step() -> None:
            torch.nn.utils.clip_grad_norm_([self.flat], MAX_NORM)
            optimizer.step()

        self.clip_and_step = torch.compile(clip_and_step)
        return optimizer

    def micro_step(self, micro_step: int, measured: Callable[[str], Any]) -> None:
        with measured("accumulate"):
            self.accumulate(micro_step, self.take())
        if micro_step == self.k - 1:
            with measured("update"):
                self.clip_and_step()
                torch._foreach_copy_(self.params, self.stepped)

    def floor_of(self, dtype: torch.dtype) -> Floor | None:
        return None  # Inductor decides what it fuses


Maker = Callable[[list[torch.Tensor], int], Path]


def grad_dtype_missing() -> str | None:
    """Why ``plain_fp32_grad`` cannot run here; None where it can."""
    if hasattr(torch.Tensor, "grad_dtype"):
        return None
    return f"torch {torch.__version__} has no Tensor.grad_dtype"


def compiler_missing() -> str | None:
    """Why ``compiled`` cannot run here; None where it can."""
    if any(map(shutil.which, ("g++", "clang++", "c++"))):
        return None
    return "torch.compile needs a C++ compiler, and none is on PATH"


def ours(k: int) -> dict[str, Maker]:
    """gradacc_fused, by name and m."""
    return {f"gradacc_fused-m{m}": partial(Fused, m=m) for m in MS if m <= k}


# (path, why it cannot run here); stock itself is in every group.
TORCH: dict[str, tuple[Maker, Callable[[], str | None]]] = {
    "stock_copy": (StockCopy, lambda: None),
    "plain": (Plain, lambda: None),
    "plain_fp32_grad": (PlainFp32Grad, grad_dtype_missing),
    "compiled": (Compiled, compiler_missing),
}
