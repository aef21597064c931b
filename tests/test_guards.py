"""CASES B1: BatchNorm in train mode with more than one micro-batch is warned about, once, by name."""

from __future__ import annotations

import warnings

import pytest
import torch
from models import batch, errors
from torch import nn

import gradacc_fused as gf


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.plain_norm = nn.BatchNorm1d(8, affine=False)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.plain_norm(self.features(x)))


def loss_of(model, step):
    x, y = batch(step)
    return errors(model, x, y).mean()


@pytest.mark.parametrize("mode", ["window", "counting", "boundary"])
def test_B1_batch_norm_is_warned_about_once(backend, mode):
    model = Net()
    options = {"accumulation_steps": 2, "weighting": "equal"} if mode == "counting" else {}
    opt = gf.GradAccumOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), backend=backend, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            if mode == "window":
                with opt.window() as window:
                    for _ in range(2):
                        window.backward(loss_of(model, step), weight=1)
                continue
            for _ in range(2):
                if mode == "counting":
                    loss_of(model, step).backward()
                    opt.step()
                else:
                    opt.backward(loss_of(model, step), weight=1)
            if mode == "boundary":
                opt.step()
                opt.zero_grad()
    texts = [str(warning.message) for warning in caught if "BatchNorm" in str(warning.message)]
    assert len(texts) == 1
    for part in ("Net.features.1", "Net.plain_norm", "GroupNorm", "eval()"):
        assert part in texts[0]


def test_B1_no_warning_where_there_is_no_cause(backend):
    model = Net()
    opt = gf.GradAccumOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), backend=backend)
    other = Net()  # alive, in train mode, but not this optimizer's
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with opt.window() as window:
            window.backward(loss_of(model, 0), weight=1)
        model.eval()
        with opt.window() as window:
            for _ in range(2):
                window.backward(loss_of(model, 0), weight=1)
    assert other.training
