"""Small models and loops that several tests share."""

from __future__ import annotations

import torch
from torch import nn

import gradacc_fused as gf


class Scalar(nn.Module):
    """Fixture S: p starts at 0, SGD with lr 1, token loss p * x; after one step p is minus the gradient."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.full((1,), start))

    def loss_sum(self, tokens) -> torch.Tensor:
        return (self.p * torch.as_tensor(tokens, dtype=self.p.dtype)).sum()

    def loss_mean(self, tokens) -> torch.Tensor:
        return self.loss_sum(tokens) / len(tokens)

    @property
    def value(self) -> float:
        return self.p.item()


def scalar(backend=None, lr=1.0, start=0.0, **options):
    model = Scalar(start)
    return model, gf.GradAccumOptimizer(torch.optim.SGD(model.parameters(), lr=lr), backend=backend, **options)


def mlp(seed=0, dtype=torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 2)).to(dtype)


def batch(step: int, size=12, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(size, 6, generator=generator).to(dtype), torch.randn(size, 2, generator=generator).to(dtype)


def errors(model, x, y) -> torch.Tensor:
    """Squared errors per sample."""
    return (model(x) - y).square().sum(dim=1)


SPLITS = [(0, 1), (1, 4), (4, 12)]


def window_step(opt, model, step, splits=SPLITS, dtype=torch.float32):
    """One logical batch of 12 samples in uneven pieces, loss sums weighted by samples."""
    x, y = batch(step, dtype=dtype)
    with opt.window() as window:
        for start, stop in splits:
            window.backward(errors(model, x[start:stop], y[start:stop]).sum(), weight=stop - start, reduction="sum")


def whole_step(optimizer, model, step, max_norm=None, max_value=None, norm_type=2.0):
    """The same logical batch at once, in plain torch."""
    x, y = batch(step)
    optimizer.zero_grad()
    (errors(model, x, y).sum() / len(x)).backward()
    total_norm = None
    if max_norm is not None:
        total_norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type=norm_type)
    if max_value is not None:
        nn.utils.clip_grad_value_(model.parameters(), max_value)
    optimizer.step()
    return total_norm


def max_difference(model, other) -> float:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(float((a.detach().double() - b.detach().double()).abs().max()) for a, b in pairs)


def snapshot(opt) -> list[torch.Tensor]:
    """Copies of every parameter and every state tensor."""
    tensors = [param for group in opt.param_groups for param in group["params"]]
    for state in opt.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return [tensor.detach().clone() for tensor in tensors]


def assert_unmoved(before, after) -> None:
    assert len(before) == len(after)
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old, new)
