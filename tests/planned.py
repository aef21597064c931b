"""A model whose memory runs out at a chosen place, plans over its samples, and the whole batch in float64."""

from __future__ import annotations

import copy
import math

import torch
from models import batch
from torch import nn

import gradacc_fused as gf

SIZE = 12
TOKENS = [3, 1, 4, 1, 5, 0, 2, 6, 5, 3, 5, 8]  # per sample; one has none


class Allocator:
    """Raises when a layer sees more rows than fit, in its forward or its backward; or an error of another kind."""

    def __init__(self) -> None:
        self.place: tuple[int, str] | None = None  # (layer, "forward" | "backward")
        self.most_rows = 0
        self.error: type[Exception] = torch.OutOfMemoryError
        self.failures = 0

    def check(self, layer: int, where: str, rows: torch.Tensor) -> None:
        if self.place != (layer, where) or rows.shape[0] <= self.most_rows:
            return
        self.failures += 1
        raise self.error("planted: no more memory")


class Checked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, allocator, layer):
        allocator.check(layer, "forward", x)
        ctx.allocator, ctx.layer = allocator, layer
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.allocator.check(ctx.layer, "backward", grad)
        return grad, None, None


DEPTHS = [(layer, where) for layer in range(3) for where in ("forward", "backward")]


class Net(nn.Module):
    """Three linear layers with dropout and BatchNorm between them if asked for."""

    def __init__(self, allocator: Allocator | None = None, noisy: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2)])
        self.norm = nn.BatchNorm1d(8) if noisy else nn.Identity()
        self.dropout = nn.Dropout(0.5 if noisy else 0.0)
        self.allocator = Allocator() if allocator is None else allocator

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = Checked.apply(layer(x), self.allocator, number)
            if number == 0:
                x = self.dropout(self.norm(torch.tanh(x)))
        return x


def plan(max_samples=5, **options) -> gf.Plan:
    options.setdefault("counts", {"active_tokens": TOKENS, "advantage_tokens": [t // 2 for t in TOKENS]})
    return gf.plan_batch([1] * SIZE, limits=gf.Limits(max_samples=max_samples), **options)


TERMS = {
    "cross_entropy": "active_tokens",
    "kl": gf.Term("samples", coefficient=0.3),
    "entropy": gf.Term("advantage_tokens", coefficient=-0.1, reduction="mean"),
    "decay": gf.Term(None, coefficient=0.01),
}


def losses_of(model, samples, step=0) -> dict[str, torch.Tensor]:
    """Sums over the samples of three terms, and a pure sum; the entropy as a mean over its tokens."""
    x, y = batch(step, SIZE)
    rows = list(samples)
    param = next(model.parameters())
    out = model(x[rows].to(param.dtype))
    tokens = torch.tensor([TOKENS[sample] for sample in rows], dtype=param.dtype)
    advantage = torch.tensor([TOKENS[sample] // 2 for sample in rows], dtype=param.dtype)
    squared = (out - y[rows].to(param.dtype)).square().sum(1)
    return {
        "cross_entropy": (squared * tokens).sum(),
        "kl": out.abs().sum(),
        "entropy": (out.square().sum(1) * advantage).sum() / advantage.sum(),  # NaN where there are none
        "decay": out.sum(),
    }


def whole_gradient(model, step=0, terms=TERMS) -> dict[str, torch.Tensor]:
    """Of the whole batch, float64, with the denominators written out."""
    truth = copy.deepcopy(model).double()
    truth.allocator = Allocator()
    losses = losses_of(truth, range(SIZE), step)
    totals = {
        "active_tokens": sum(TOKENS), "samples": SIZE, "advantage_tokens": sum(t // 2 for t in TOKENS), None: 1,
    }  # fmt: skip
    loss = torch.zeros((), dtype=torch.float64)
    for name, declared in terms.items():
        term = declared if isinstance(declared, gf.Term) else gf.Term(declared)
        divisor = 1 if term.reduction == "mean" else totals[term.denominator]
        loss = loss + term.coefficient * losses[name] / divisor
    loss.backward()
    found = {name: param.grad.double() for name, param in truth.named_parameters()}
    return found | {"loss": loss.detach()}


def sgd(model, backend=None, **options):
    """lr 1 without momentum: the parameters' change is minus the gradient."""
    return gf.GradAccumOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), backend=backend, **options)


def gradient_difference(model, before, truth) -> float:
    """Norm of (gradient that the step used - truth), relative to truth's."""
    gap = reference = 0.0
    for name, param in model.named_parameters():
        used = before[name].double() - param.detach().double()
        gap += float((used - truth[name]).square().sum())
        reference += float(truth[name].square().sum())
    return math.sqrt(gap / reference)


def values(model) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}
