"""The three trainings, and the gradients of their first window."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..optimizer import GradAccumOptimizer
from .model import GPT
from .text import IGNORED

MAX_GRAD_NORM = 1.0
Piece = tuple[torch.Tensor, torch.Tensor]  # inputs, labels


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)


def active_tokens(labels: torch.Tensor) -> int:
    return int((labels != IGNORED).sum())


@dataclass
class Logged:
    """What a training logs of one logical batch."""

    loss_sum: float
    loss_mean: float
    token_count: int


class Whole:
    """(a) The whole batch at once, plain torch: what the other two should equal."""

    name = "whole batch"

    def __init__(self, model: GPT) -> None:
        self.model = model
        self.optimizer = adamw(model.parameters())

    def step(self, batch: Piece, pieces: Sequence[Piece]) -> Logged:
        logged = self.gradients(batch)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()
        return logged

    def gradients(self, batch: Piece) -> Logged:
        """Leave the batch's gradient, before clipping, in ``.grad``."""
        self.optimizer.zero_grad()
        loss_sum, tokens = self.model.loss_sum(*batch), active_tokens(batch[1])
        (loss_sum / tokens).backward()
        return Logged(loss_sum.item(), loss_sum.item() / tokens, tokens)


class Windowed:
    """(b) Our window: every micro-batch says how many active tokens it has."""

    name = "gradacc_fused window"

    def __init__(self, model: GPT) -> None:
        self.model = model
        self.optimizer = GradAccumOptimizer(adamw(model.parameters()), max_grad_norm=MAX_GRAD_NORM)

    def step(self, batch: Piece, pieces: Sequence[Piece]) -> Logged:
        self.window(self.optimizer, pieces)
        result = self.optimizer.last_result
        assert result is not None and result.loss_sum is not None and result.loss_mean is not None
        return Logged(float(result.loss_sum), float(result.loss_mean), int(result.tokens or 0))

    def window(self, optimizer: GradAccumOptimizer, pieces: Sequence[Piece]) -> None:
        with optimizer.window() as window:
            for inputs, labels in pieces:
                tokens = active_tokens(labels)
                loss_sum = self.model.loss_sum(inputs, labels)
                window.backward(loss_sum, weight=tokens, reduction="sum", samples=len(inputs), tokens=tokens)


class Usual:
    """(c) The usual loop: mean loss of each micro-batch, divided by the number of micro-batches."""

    name = "usual loop (mean / k)"

    def __init__(self, model: GPT) -> None:
        self.model = model
        self.optimizer = adamw(model.parameters())

    def step(self, batch: Piece, pieces: Sequence[Piece]) -> Logged:
        logged = self.gradients(pieces)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()
        return logged

    def gradients(self, pieces: Sequence[Piece]) -> Logged:
        """Leave the accumulated gradient, before clipping, in ``.grad``."""
        self.optimizer.zero_grad()
        loss_sum, loss_mean, count = 0.0, 0.0, 0
        for inputs, labels in pieces:
            tokens = active_tokens(labels)
            loss = self.model.loss_sum(inputs, labels) / tokens
            (loss / len(pieces)).backward()
            loss_sum, loss_mean = loss_sum + loss.item() * tokens, loss_mean + loss.item() / len(pieces)
            count += tokens
        return Logged(loss_sum, loss_mean, count)


class GradientProbe(torch.optim.Optimizer):
    """An inner optimizer without a fused rule that keeps the gradient published to it and moves nothing."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.0})
        self.gradients: list[torch.Tensor] = []

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        self.gradients = [param.grad.clone() for group in self.param_groups for param in group["params"]]


def first_gradients(model: GPT, batch: Piece, pieces: Sequence[Piece]) -> dict[str, list[torch.Tensor]]:
    """The first logical batch's gradient, before clipping, as each of the three computes it."""
    whole, usual, windowed = Whole(copy.deepcopy(model)), Usual(copy.deepcopy(model)), Windowed(copy.deepcopy(model))
    whole.gradients(batch)
    usual.gradients(pieces)
    probe = GradientProbe(windowed.model.parameters())
    windowed.window(GradAccumOptimizer(probe), pieces)
    return {
        Whole.name: [param.grad for param in whole.model.parameters() if param.grad is not None],
        Windowed.name: probe.gradients,
        Usual.name: [param.grad for param in usual.model.parameters() if param.grad is not None],
    }


@dataclass
class Training:
    """One training's course."""

    trainer: Any
    first: Logged | None = None
    losses: list[float] = field(default_factory=list)  # per active token, by the window

    def step(self, batch: Piece, pieces: Sequence[Piece]) -> None:
        logged = self.trainer.step(batch, pieces)
        self.first = self.first or logged
        self.losses.append(logged.loss_mean)


def relative_difference(mine: Sequence[torch.Tensor], whole: Sequence[torch.Tensor]) -> float:
    """|mine - whole| / |whole|, over all tensors together, in float64."""
    mine64, whole64 = (torch.cat([t.detach().double().flatten() for t in tensors]) for tensors in (mine, whole))
    return float((mine64 - whole64).norm() / whole64.norm())
