"""Time and operator events per window: ours beside the stock loop, in the same run, on the same micro-batches."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..optimizer import GradAccumOptimizer
from ..report.events import operator_events
from ..report.timing import take_turns, timed
from .model import GPT
from .train import Piece, Usual, Windowed, active_tokens


@dataclass
class Measured:
    """One path's window: all of it, and what it adds to forward and backward alone."""

    ms: float
    ms_added: float
    op_calls: int


def measure(model: GPT, pieces: Sequence[Piece], repeats: int) -> tuple[Measured, Measured]:
    """(our window, the stock loop): clip and AdamW in both; events and time of forward and backward are taken off."""
    alone, windowed, usual = copy.deepcopy(model), Windowed(copy.deepcopy(model)), Usual(copy.deepcopy(model))
    whole_batch = pieces[0]  # neither path reads it

    def forward_backward() -> None:
        for inputs, labels in pieces:
            alone.zero_grad()
            active_tokens(labels)
            alone.loss_sum(inputs, labels).backward()

    runs = [
        forward_backward,
        lambda: windowed.window(windowed.optimizer, pieces),
        lambda: usual.step(whole_batch, pieces),
    ]
    for run in runs:
        run()
        run()
    base, ours, stock = (operator_events(run) for run in runs)
    samples = take_turns([timed(run, "ms") for run in runs], seconds=0.0, min_repeats=repeats)
    base_ms, ours_ms, stock_ms = (statistics.median(sample["ms"]) * 1e3 for sample in samples)
    return (
        Measured(ours_ms, ours_ms - base_ms, ours - base),
        Measured(stock_ms, stock_ms - base_ms, stock - base),
    )


def events_by_tensors(counts: Sequence[int], micro_batches: int) -> list[int]:
    """Operator events of our window for models of so many tensors, forward and backward taken off."""
    out = []
    for count in counts:
        params = [torch.nn.Parameter(torch.ones(64)) for _ in range(count)]
        opt = GradAccumOptimizer(torch.optim.AdamW(params), max_grad_norm=1.0)

        def loss(params: list[torch.nn.Parameter] = params) -> torch.Tensor:
            return torch.stack([param.sum() for param in params]).sum()

        def window(opt: GradAccumOptimizer = opt, loss: Callable[[], torch.Tensor] = loss) -> None:
            with opt.window() as open_window:
                for _ in range(micro_batches):
                    open_window.backward(loss(), weight=1)

        def alone(opt: GradAccumOptimizer = opt, loss: Callable[[], torch.Tensor] = loss) -> None:
            for _ in range(micro_batches):
                for group in opt.param_groups:
                    for param in group["params"]:
                        param.grad = None
                loss().backward()
            for group in opt.param_groups:
                for param in group["params"]:
                    param.grad = None

        window()
        out.append(operator_events(window) - operator_events(alone))
    return out
