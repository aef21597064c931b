"""Ways to run one window of k micro-batches on bf16 parameters: ours, and two that need nothing but torch.

All take the same gradients the same way: autograd leaves a copy in ``.grad``, as the backward of a model does, and that
part is never measured. Assigning ``.grad`` in Python would not do: a gradient that Python has seen is never held, so
``defer`` would measure as 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

import gradacc_fused as gf

from .shapes import Shape

MAX_NORM = 1.0
Grads = Sequence[Sequence[torch.Tensor]]


def make_params(shapes: Sequence[Shape], seed: int = 0) -> list[torch.Tensor]:
    """bf16 parameters; the same values for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.nn.Parameter(torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, 0.1, generator=generator))
        for shape in shapes
    ]


def make_grads(shapes: Sequence[Shape], k: int, seed: int = 1) -> list[list[torch.Tensor]]:
    """bf16 gradients of k micro-batches."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, 0.1, generator=generator) for shape in shapes]
        for _ in range(k)
    ]


class Path:
    """One way to run a window.

    Args:
        params: bf16 parameters of its own. Written.
        k: Micro-batches in a window.
        lr: Learning rate of AdamW.
    """

    name: str
    m: int | None = None
    main_params: list[torch.Tensor] | None = None  # fp32, where there are any

    def __init__(self, params: list[torch.Tensor], k: int, lr: float = 1e-3) -> None:
        self.params = params
        self.k = k
        self.lr = lr

    def window(self, grads: Grads, measured: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        """Run one window.

        Args:
            grads: k lists, one tensor per parameter. Read only.
            measured: Makes the context that each micro-step runs in, without the making of its gradients.
        """
        for micro_step, piece in enumerate(grads):
            torch.autograd.backward(self.params, piece)
            with measured(), torch.no_grad():
                self.micro_step(micro_step)

    def micro_step(self, micro_step: int) -> None:
        """Take the gradients in ``.grad``; after the last micro-batch clip and update."""
        raise NotImplementedError

    def take(self) -> list[torch.Tensor]:
        """Read ``.grad`` of every parameter and clear it."""
        grads = [param.grad for param in self.params]
        for param in self.params:
            param.grad = None
        return grads  # type: ignore[return-value]


class Fused(Path):
    """gradacc_fused in counting mode, holding up to ``m`` micro-batches' gradients."""

    name = "gradacc_fused"

    def __init__(self, params: list[torch.Tensor], k: int, lr: float = 1e-3, m: int = 1) -> None:
        super().__init__(params, k, lr)
        self.m = m
        self.optimizer = gf.GradAccumOptimizer(
            torch.optim.AdamW(params, lr=lr), accumulation_steps=k, weighting="equal", max_grad_norm=MAX_NORM, defer=m
        )
        self.backend = self.optimizer.backend
        self.main_params = [self.optimizer.state[param]["main_param"] for param in params]

    def micro_step(self, micro_step: int) -> None:
        self.optimizer.step()


class Stock(Path):
    """torch's foreach operators and fused AdamW on fp32 main grads and main params."""

    name = "stock"

    def __init__(self, params: list[torch.Tensor], k: int, lr: float = 1e-3) -> None:
        super().__init__(params, k, lr)
        self.main_params = [param.detach().float() for param in params]
        self.main_grads = [torch.empty_like(main_param) for main_param in self.main_params]
        for main_param, main_grad in zip(self.main_params, self.main_grads, strict=True):
            main_param.grad = main_grad
        self.optimizer = torch.optim.AdamW(self.main_params, lr=lr, fused=True)

    def micro_step(self, micro_step: int) -> None:
        (torch._foreach_copy_ if micro_step == 0 else torch._foreach_add_)(self.main_grads, self.take())
        if micro_step < self.k - 1:
            return
        if self.k > 1:
            torch._foreach_mul_(self.main_grads, 1.0 / self.k)
        torch.nn.utils.clip_grad_norm_(self.main_params, MAX_NORM)
        self.optimizer.step()
        torch._foreach_copy_(self.params, self.main_params)


class Plain(Path):
    """Everything in bf16: the sum, the moments and the parameters. Fewer bytes, and other results."""

    name = "plain"

    def __init__(self, params: list[torch.Tensor], k: int, lr: float = 1e-3) -> None:
        super().__init__(params, k, lr)
        self.optimizer = torch.optim.AdamW(params, lr=lr, fused=True)
        self.sums: list[torch.Tensor] = []

    def micro_step(self, micro_step: int) -> None:
        if micro_step == 0:
            self.sums = self.take()  # autograd's copies: ours to write
        else:
            torch._foreach_add_(self.sums, self.take())
        if micro_step < self.k - 1:
            return
        if self.k > 1:
            torch._foreach_mul_(self.sums, 1.0 / self.k)
        for param, total in zip(self.params, self.sums, strict=True):
            param.grad = total
        torch.nn.utils.clip_grad_norm_(self.params, MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.sums = []


def all_paths(shapes: Sequence[Shape], k: int) -> list[Path]:
    """Every path with parameters of its own; ours with m = 1, and m = 4 where a window has as many micro-batches."""
    fused = [Fused(make_params(shapes), k, m=m) for m in (1, 4) if m <= k]
    return [*fused, Stock(make_params(shapes), k), Plain(make_params(shapes), k)]
