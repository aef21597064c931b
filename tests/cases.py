"""The declared cases: lists of tensors in every layout, dtype and size that a list may hold, with their values."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
CHUNK = 65536
TILE = 1024

# Layouts of a parameter: a function from shape and dtype to an uninitialised tensor.
LAYOUTS = {
    "contiguous": lambda shape, dtype: torch.empty(shape, dtype=dtype),
    "transposed": lambda shape, dtype: torch.empty(shape[::-1], dtype=dtype).permute(*reversed(range(len(shape)))),
    "channels_last": lambda shape, dtype: torch.empty(shape, dtype=dtype).to(memory_format=torch.channels_last),
    "gaps": lambda shape, dtype: torch.empty((*shape[:-1], 2 * shape[-1]), dtype=dtype)[..., ::2],
    "misaligned": lambda shape, dtype: torch.empty(math.prod(shape) + 1, dtype=dtype)[1:].view(shape),
}


@dataclass(frozen=True)
class Entry:
    """One tensor of a list."""

    shape: tuple[int, ...]
    dtype: torch.dtype = F32
    layout: str = "contiguous"
    grad_layout: str | None = None  # None: as the parameter

    def empty(self, dtype: torch.dtype | None = None, layout: str | None = None) -> torch.Tensor:
        return LAYOUTS[layout or self.layout](self.shape, dtype or self.dtype)

    def grad(self, generator: torch.Generator, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(self.shape, generator=generator, dtype=F64) * scale
        return self.empty(layout=self.grad_layout or self.layout).copy_(values)

    @property
    def math(self) -> torch.dtype:
        return F64 if self.dtype == F64 else F32


@dataclass(frozen=True)
class Case:
    """A list of tensors with m micro-batches; ``absent`` names the (micro-batch, tensor) pairs without a gradient."""

    name: str
    entries: tuple[Entry, ...]
    weights: tuple[float, ...] = (1.0,)
    absent: tuple[tuple[int, int], ...] = ()
    scale: float = 1.0
    special: dict[tuple[int, int, int], float] = field(default_factory=dict)  # (micro-batch, tensor, element) -> value

    def __str__(self) -> str:
        return self.name

    def grads(self, seed: int = 7) -> list[torch.Tensor]:
        """m*N gradients, piece-major; absent ones are empty tensors."""
        generator = torch.Generator().manual_seed(seed)
        out = []
        for j in range(len(self.weights)):
            for i, entry in enumerate(self.entries):
                grad = entry.grad(generator, self.scale)
                for (piece, tensor, element), value in self.special.items():
                    if (piece, tensor) == (j, i):
                        grad[tuple(int(n) for n in torch.unravel_index(torch.tensor(element), entry.shape))] = value
                out.append(torch.empty(0) if (j, i) in self.absent else grad)
        return out

    def main_grads(self, seed: int = 11) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [
            entry.empty(entry.math).copy_(torch.randn(entry.shape, generator=generator, dtype=F64) * self.scale)
            for entry in self.entries
        ]


def sizes(*numels: int, dtype: torch.dtype = F32) -> tuple[Entry, ...]:
    return tuple(Entry((numel,), dtype) for numel in numels)


AWKWARD = (0, 1, 2, 15, 16, 17, TILE - 1, TILE, TILE + 1, CHUNK - 1, CHUNK, CHUNK + 1)
WEIGHTS3 = (3.0, 0.25, 5.0)

CASES = [
    *(Case(f"sizes-{str(d)[6:]}", sizes(*AWKWARD, dtype=d), WEIGHTS3) for d in (F32, F64, F16, BF16)),
    Case("one-element", sizes(1), (2.0,)),
    Case("scalar", (Entry(()), Entry((), BF16)), WEIGHTS3),
    Case("empty-alone", sizes(0), (1.0, 2.0)),
    Case("empty-first-middle-last", sizes(0, 5, 0, 7, 0), (1.0, 2.0)),
    Case("mixed-dtypes", (Entry((33,), BF16), Entry((70001,), F16), Entry((9, 5)), Entry((1000,), F64)), WEIGHTS3),
    Case("misaligned", tuple(Entry((4097,), d, "misaligned") for d in (F32, F16, BF16, F64)), WEIGHTS3),
    Case("transposed", tuple(Entry((37, 53), d, "transposed") for d in (F32, BF16)), WEIGHTS3),
    Case("channels-last", tuple(Entry((2, 8, 9, 5), d, "channels_last") for d in (F32, F16)), WEIGHTS3),
    Case("gaps", tuple(Entry((31, 41), d, "gaps") for d in (F32, BF16)), WEIGHTS3),
    Case("grad-transposed", (Entry((37, 53), F32, "contiguous", "transposed"),), WEIGHTS3),
    Case("grad-contiguous", (Entry((2, 8, 9, 5), BF16, "channels_last", "contiguous"),), WEIGHTS3),
    Case("grad-gaps", (Entry((300, 300), F32, "contiguous", "gaps"),), WEIGHTS3),
    Case("absent-somewhere", sizes(10, 20, 30), WEIGHTS3, absent=((0, 1), (2, 1), (1, 2))),
    Case("absent-everywhere", sizes(10, 20), (1.0, 1.0), absent=((0, 1), (1, 1))),
    Case("weight-zero", sizes(100, 200), (2.0, 0.0, 3.0)),
    Case("weight-zero-nan", sizes(100, 200), (2.0, 0.0), special={(1, 0, 3): math.nan, (1, 1, 7): math.inf}),
    Case("large-1e19", sizes(5000), (1.0, 2.0), scale=1e19),
    Case("small-1e-30", sizes(5000), (1.0, 2.0), scale=1e-30),
    Case("denormal-fp16", (Entry((3000,), F16),), (1.0, 0.5), scale=3e-7),
    Case("denormal-bf16", (Entry((3000,), BF16),), (1.0, 0.5), scale=1e-39),
    Case("many-tensors", sizes(*range(0, 300)), (1.0, 2.0)),
    Case("one-micro-batch", sizes(4000, 70000, dtype=BF16), (1.0,)),
    Case("eight-micro-batches", sizes(4000, dtype=BF16), tuple(float(w) for w in range(8))),
]

NONFINITE_CASES = [
    Case("nan", sizes(10, 3000), (1.0, 2.0), special={(1, 1, 2999): math.nan}),
    Case("inf", sizes(10, 3000), (1.0, 2.0), special={(0, 1, 5): math.inf}),
    Case("minus-inf-first", sizes(10, 3000, dtype=F16), (1.0, 2.0), special={(0, 0, 0): -math.inf}),
    Case("inf-minus-inf", sizes(100, dtype=BF16), (1.0, 1.0), special={(0, 0, 9): math.inf, (1, 0, 9): -math.inf}),
    Case("overflow-of-the-sum", sizes(100), (1.0, 1.0), special={(0, 0, 9): 3e38, (1, 0, 9): 3e38}),
    Case("nan-fp64", sizes(100, dtype=F64), (1.0,), special={(0, 0, 99): math.nan}),
]
