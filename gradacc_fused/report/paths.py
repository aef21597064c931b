"""Ways to run one window of k micro-batches on a list of parameters: ours, and what a loop of torch's operators does.

All take the same gradients the same way: autograd leaves a copy in ``.grad``, as the backward of a model does, and that
part is never measured. Assigning ``.grad`` in Python would not do: a gradient that Python has seen is never held, so
``defer`` would measure as 1. The gradients count as divided by k already, as the loss is in the usual loop: a window
steps on their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from ..floor import LOW_PRECISION, Floor, floor_of_flushes, stock
from ..layout import math_dtype
from ..lion import Lion
from ..optimizer import GradAccumOptimizer

MAX_NORM = 1.0
Grads = Sequence[Sequence[torch.Tensor]]
Measured = Callable[[str], AbstractContextManager[object]]

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {}),
    "adam": (torch.optim.Adam, {}),
    "sgd": (torch.optim.SGD, {}),
    "sgd_momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "lion": (Lion, {}),
}


def unmeasured(name: str) -> AbstractContextManager[object]:
    return nullcontext()


def make_optimizer(rule: str, params: Sequence[torch.Tensor], lr: float, **options: Any) -> torch.optim.Optimizer:
    """The plain optimizer of a rule (a key of ``OPTIMIZERS``)."""
    kind, defaults = OPTIMIZERS[rule]
    return kind(params, lr=lr, **defaults, **options)  # type: ignore[call-arg]


def copies(params: Sequence[torch.Tensor], dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Parameters of the same shapes, values and memory order, in ``dtype`` where it is given."""
    return [torch.nn.Parameter(param.detach().to(dtype or param.dtype, copy=True)) for param in params]


class Noise:
    """Normal values of standard deviation 0.1, the same for the same seed.

    A block of them is drawn and goes round and round: drawing 124M takes a second each time, and nobody reads them.
    """

    BLOCK = 1_000_003  # prime: rows of a matrix do not repeat each other

    def __init__(self, seed: int) -> None:
        block = torch.empty(self.BLOCK).normal_(0.0, 0.1, generator=torch.Generator().manual_seed(seed))
        self._twice = torch.cat([block, block])
        self._start = 0

    def fill(self, tensor: torch.Tensor) -> torch.Tensor:
        """Write the next values into a tensor of any shape and dtype; returns it."""
        size = tensor.numel()
        values = self._twice[self._start : self._start + self.BLOCK].repeat(-(-size // self.BLOCK))
        self._start = (self._start + size) % self.BLOCK
        return tensor.copy_(values[:size].view(tensor.shape))


def make_grads(params: Sequence[torch.Tensor], k: int, seed: int = 1) -> list[list[torch.Tensor]]:
    """Gradients of k micro-batches: the parameters' shapes, dtypes and memory order, standard deviation 0.1."""
    noise = Noise(seed)
    return [[noise.fill(torch.empty_like(param, requires_grad=False)) for param in params] for _ in range(k)]


def sizes_by_dtype(params: Sequence[torch.Tensor]) -> dict[torch.dtype, int]:
    """Elements of the parameters of each dtype."""
    sizes: dict[torch.dtype, int] = {}
    for param in params:
        sizes[param.dtype] = sizes.get(param.dtype, 0) + param.numel()
    return sizes


class Path:
    """One way to run a window.

    Args:
        params: Parameters of its own. Written.
        k: Micro-batches in a window.
        lr: Learning rate.
        rule: A key of ``OPTIMIZERS``.
    """

    name: str
    footprint = 22  # bytes per element at most: bf16 parameter and gradient, fp32 main param, main grad, two moments
    m: int | None = None
    main_params: Sequence[torch.Tensor] | None = None  # what is updated, where it is not of low precision

    def __init__(self, params: list[torch.Tensor], k: int, lr: float = 1e-3, rule: str = "adamw") -> None:
        self.params = params
        self.k = k
        self.lr = lr
        self.rule = rule

    def window(self, grads: Grads, measured: Measured = unmeasured) -> None:
        """Run one window.

        Args:
            grads: k lists, one tensor per parameter. Read only.
            measured: Makes the context of a part by its name, never around the making of gradients.
        """
        for micro_step, piece in enumerate(grads):
            torch.autograd.backward(self.params, piece)
            with torch.no_grad():
                self.micro_step(micro_step, measured)

    def micro_step(self, micro_step: int, measured: Measured) -> None:
        """Take the gradients in ``.grad``; after the last micro-batch clip and update."""
        raise NotImplementedError

    def floor_of(self, dtype: torch.dtype) -> Floor | None:
        """What a window moves for parameters of ``dtype``; None where there is no formula."""
        return None

    def floors(self) -> list[tuple[Floor, int]] | None:
        """(what a window moves, elements) for the parameters of each dtype; None where there is no formula."""
        found = []
        for dtype, size in sizes_by_dtype(self.params).items():
            table = self.floor_of(dtype)
            if table is None:
                return None
            found.append((table, size))
        return found

    def bytes(self) -> int | None:
        """Bytes of a window; None where there is no formula."""
        floors = self.floors()
        return None if floors is None else sum(table.bytes_per_element * size for table, size in floors)


class Fused(Path):
    """gradacc_fused in counting mode, holding up to ``m`` micro-batches' gradients. Its parts: "window".

    Within ``stages()`` also "flush_first", "flush", "closing", "clip" and "update".

    Args:
        m: ``defer``; with "auto" call ``settle`` before bytes are asked for.
    """

    name = "gradacc_fused"

    def __init__(
        self, params: list[torch.Tensor], k: int, lr: float = 1e-3, rule: str = "adamw", m: int | str = 1
    ) -> None:
        super().__init__(params, k, lr, rule)
        self.optimizer = GradAccumOptimizer(
            make_optimizer(rule, params, lr), accumulation_steps=k, weighting="equal", host_scale=1.0 / k,
            max_grad_norm=MAX_NORM, defer=m,
        )  # fmt: skip
        self.backend = self.optimizer.backend
        self._stage: Measured = unmeasured
        self._flushed: list[int] = []  # micro-batches of each flush of the last window in stages()
        if isinstance(m, int):
            flushes = -(-k // m) - 1
            self.m, self.flushes = m, [m] * flushes
        state = self.optimizer.state
        self.main_params = [state[param].get("main_param", param) for param in params]

    def settle(self, grads: Grads) -> None:
        """Run a window and take note of the micro-batches that it held: ``m`` and ``flushes`` are then those."""
        with self.stages():
            self.window(grads)
        self.flushes = list(self._flushed)
        self.m = max([*self.flushes, self.k - sum(self.flushes)])

    def window(self, grads: Grads, measured: Measured = unmeasured) -> None:
        self._stage, self._flushed = measured, []
        super().window(grads, measured)

    def micro_step(self, micro_step: int, measured: Measured) -> None:
        with measured("window"):
            self.optimizer.step()

    @contextmanager
    def stages(self) -> Iterator[None]:
        """Within it the engine's own passes are measured one by one, while real windows run."""
        engine: Any = self.optimizer._engine
        methods = ("flush", "measure", "clip", "update")
        originals = {method: getattr(engine, method) for method in methods}

        def flush(pieces: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            name = "flush" if self._flushed else "flush_first"
            self._flushed.append(len(pieces))
            with self._stage(name):
                return originals["flush"](pieces, *args, **kwargs)

        def measured(method: str, name: str) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                with self._stage(name):
                    return originals[method](*args, **kwargs)

            return run

        engine.flush = flush
        engine.measure, engine.clip = measured("measure", "closing"), measured("clip", "clip")
        engine.update = measured("update", "update")
        try:
            yield
        finally:
            for method in methods:
                delattr(engine, method)

    def floor_of(self, dtype: torch.dtype) -> Floor:
        return floor_of_flushes(self.flushes, self.k - sum(self.flushes), dtype, dtype, self.rule)

    def floors(self) -> list[tuple[Floor, int]] | None:
        """As of Path; None on the reference, which makes tensors in between."""
        return None if self.backend == "reference" else super().floors()


class Stock(Path):
    """torch's foreach operators, ``clip_grad_norm_`` and fused step. Its parts: "accumulate", "clip", "update".

    Low-precision parameters have fp32 main params and fp32 main grads, which are zeroed at the start of a window. The
    gradients of others are summed in place into the first micro-batch's, as autograd itself does.
    """

    name = "stock"
    first = "zero"
    with_main_params = True
    with_main_grads = True

    def __init__(self, params: list[torch.Tensor], k: int, lr: float = 1e-3, rule: str = "adamw") -> None:
        super().__init__(params, k, lr, rule)
        low = [param.dtype in LOW_PRECISION for param in params]
        self._main = [i for i, is_low in enumerate(low) if is_low and self.with_main_params]
        self._buffered = self._main if self.with_main_grads else []
        self._taken = [i for i in range(len(params)) if i not in set(self._buffered)]
        self.stepped = list(params)
        for i in self._main:
            self.stepped[i] = params[i].detach().to(math_dtype(params[i].dtype))
        if all(not is_low or self.with_main_params for is_low in low):
            self.main_params = self.stepped
        self.sums: list[Any] = [None] * len(params)
        for i in self._buffered:
            self.sums[i] = torch.empty_like(self.stepped[i])
        self.optimizer = self.make_optimizer()

    def make_optimizer(self) -> Any:
        options = {} if self.rule == "lion" else {"fused": True}  # torch has no fused one
        return make_optimizer(self.rule, self.stepped, self.lr, **options)

    def micro_step(self, micro_step: int, measured: Measured) -> None:
        with measured("accumulate"):
            self.accumulate(micro_step, self.take())
        if micro_step == self.k - 1:
            with measured("clip"):
                for stepped, total in zip(self.stepped, self.sums, strict=True):
                    stepped.grad = total
                self.clip()
            with measured("update"):
                self.update()

    def take(self) -> list[torch.Tensor]:
        """Read ``.grad`` of every parameter and clear it."""
        grads: list[Any] = [param.grad for param in self.params]
        for param in self.params:
            param.grad = None
        return grads

    def accumulate(self, micro_step: int, grads: list[torch.Tensor]) -> None:
        if micro_step > 0:
            torch._foreach_add_(self.sums, grads)
            return
        for i in self._taken:
            self.sums[i] = grads[i]  # autograd's copy: ours to write
        if self._buffered:
            sums, first = [self.sums[i] for i in self._buffered], [grads[i] for i in self._buffered]
            if self.first == "zero":
                torch._foreach_zero_(sums)
                torch._foreach_add_(sums, first)
            else:
                torch._foreach_copy_(sums, first)

    def clip(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.stepped, MAX_NORM)

    def update(self) -> None:
        self.optimizer.step()
        for stepped in self.stepped:
            stepped.grad = None
        for i in self._taken:
            self.sums[i] = None
        if self._main:
            torch._foreach_copy_([self.params[i] for i in self._main], [self.stepped[i] for i in self._main])

    def floor_of(self, dtype: torch.dtype) -> Floor | None:
        return stock(self.k, dtype, dtype, self.rule, self.first)
