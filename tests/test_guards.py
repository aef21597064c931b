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


@pytest.mark.parametrize("groups", [None, 2])
def test_batch_norm_becomes_group_norm_and_splitting_no_longer_matters(groups):
    model = Net()
    before = dict(model.named_parameters())
    x, y = batch(0)

    def loss_sum(piece):
        rows = list(piece.samples)
        return errors(model, x[rows], y[rows]).sum()

    planned = gf.plan_batch([1] * 12, limits=gf.Limits(max_samples=5))
    assert not gf.check_split(loss_sum, planned, model, terms="samples").equal
    assert gf.convert_batch_norm(model, num_groups=groups) is model
    assert gf.check_split(loss_sum, planned, model, terms="samples").equal
    assert dict(model.named_parameters()) == before  # an optimizer still has them
    assert isinstance(model.features[1], nn.GroupNorm) and model.features[1].num_groups == (groups or 4)
    assert model.plain_norm.weight is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt = gf.GradAccumOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        with opt.window(planned, terms="samples") as window:
            for piece in planned.pieces:
                window.backward(loss_sum(piece), piece=piece)


def test_conversions_by_hand_and_refusals():
    x = torch.randn(5, 6, 3, 3)
    norm = nn.BatchNorm2d(6, eps=0.1)
    with torch.no_grad():
        norm.weight.uniform_(), norm.bias.uniform_()
    converted = gf.convert_batch_norm(norm, num_groups=3).double()
    grouped = x.double().view(5, 3, 2 * 9)
    mean, variance = grouped.mean(2, keepdim=True), grouped.var(2, correction=0, keepdim=True)
    expected = ((grouped - mean) / (variance + 0.1).sqrt()).view(5, 6, 3, 3)
    expected = expected * norm.weight.double().view(6, 1, 1) + norm.bias.double().view(6, 1, 1)
    torch.testing.assert_close(converted(x.double()), expected)
    shared = nn.BatchNorm1d(4)
    twice = gf.convert_batch_norm(nn.ModuleDict({"a": shared, "b": shared}).eval())
    assert twice["a"] is twice["b"] and not twice["a"].training
    assert gf.convert_batch_norm(nn.BatchNorm1d(7)).num_groups == 1
    with pytest.raises(ValueError, match="must have two channels or more for a group to have statistics, got 1"):
        gf.convert_batch_norm(nn.BatchNorm1d(1))
    with pytest.raises(ValueError, match="num_groups must be at least 1, got -2"):
        gf.convert_batch_norm(nn.BatchNorm1d(4), num_groups=-2)
    assert isinstance(gf.convert_batch_norm(nn.Sequential(nn.BatchNorm1d(4)), "sync")[0], nn.SyncBatchNorm)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(6))
    with pytest.raises(ValueError, match="num_groups must divide the 6 channels of '1', got 4"):
        gf.convert_batch_norm(model, num_groups=4)
    assert isinstance(model[0], nn.BatchNorm1d)  # nothing was exchanged
    with pytest.raises(ValueError, match="to must be 'group' or 'sync', got 'layer'"):
        gf.convert_batch_norm(model, "layer")
