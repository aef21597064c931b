"""Twenty steps beside torch.optim, clip_grad_norm_ and clip_grad_value_: rule x mode x backend."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from models import batch, errors, max_difference, mlp, whole_step, window_step
from tolerances import TRAJECTORY

import gradacc_fused as gf

INNERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.02, weight_decay=0.2, betas=(0.8, 0.95)),
    "adamw-tensor-lr": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.02), weight_decay=0.2),
    "adamw-maximize": lambda params: torch.optim.AdamW(params, lr=0.005, weight_decay=0.2, maximize=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.02, weight_decay=0.2),
    "adam-decoupled": lambda params: torch.optim.Adam(params, lr=0.02, weight_decay=0.2, decoupled_weight_decay=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05),
    "sgd-momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.8, dampening=0.3, weight_decay=0.1),
    "sgd-nesterov": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.8, nesterov=True, weight_decay=0.1),
    "lion": lambda params: gf.Lion(params, lr=0.005, weight_decay=0.2, betas=(0.8, 0.95)),
    # no fused rule: published
    "amsgrad": lambda params: torch.optim.AdamW(params, lr=0.02, amsgrad=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.02),
}
CLIPS = {
    "no-clip": {},
    "clip-l2": {"max_grad_norm": 0.7},
    "clip-inf": {"max_grad_norm": 0.3, "norm_type": math.inf},
    "clip-value": {"max_grad_value": 0.1},
}


def whole_options(clip):
    options = CLIPS[clip]
    return {
        "max_norm": options.get("max_grad_norm"),
        "norm_type": options.get("norm_type", 2.0),
        "max_value": options.get("max_grad_value"),
    }


def same(model, other):
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, **TRAJECTORY)


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("inner", INNERS)
def test_windows_follow_the_whole_batch(backend, inner, clip):
    model = mlp()
    other = copy.deepcopy(model)
    opt = gf.GradAccumOptimizer(INNERS[inner](model.parameters()), backend=backend, **CLIPS[clip])
    whole = INNERS[inner](other.parameters())
    start = copy.deepcopy(model)
    for step in range(20):
        window_step(opt, model, step)
        norm = whole_step(whole, other, step, **whole_options(clip))
        if norm is not None and step < 3:
            torch.testing.assert_close(opt.last_result.total_norm, norm, rtol=1e-5, atol=0)
    same(model, other)
    assert max_difference(model, start) > 1e-2  # it did train
    assert not opt.last_result.skipped


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("clip", ["no-clip", "clip-l2"])
def test_counting_mode_follows_the_whole_batch(backend, inner, clip):
    """The loop does not change: mean losses of equal pieces, step after each."""
    model = mlp()
    other = copy.deepcopy(model)
    opt = gf.GradAccumOptimizer(
        INNERS[inner](model.parameters()), accumulation_steps=4, weighting="equal", backend=backend, **CLIPS[clip]
    )
    whole = INNERS[inner](other.parameters())
    for step in range(20):
        x, y = batch(step)
        for start in range(0, 12, 3):
            opt.zero_grad()
            errors(model, x[start : start + 3], y[start : start + 3]).mean().backward()
            opt.step()
        whole_step(whole, other, step, **whole_options(clip))
    same(model, other)
    assert opt.last_result.micro_batches == 4


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("clip", CLIPS)
def test_boundary_mode_is_the_plain_optimizer(backend, inner, clip):
    """Autograd accumulates, step() is a drop-in for the inner optimizer's; .grad stays visible."""
    model = mlp()
    other = copy.deepcopy(model)
    opt = gf.GradAccumOptimizer(INNERS[inner](model.parameters()), backend=backend, **CLIPS[clip])
    whole = INNERS[inner](other.parameters())
    for step in range(20):
        x, y = batch(step)
        opt.zero_grad()
        for start in range(0, 12, 3):
            (errors(model, x[start : start + 3], y[start : start + 3]).sum() / 12).backward()
        before = [param.grad.clone() for param in model.parameters()]
        opt.step()
        assert all(torch.equal(param.grad, grad) for param, grad in zip(model.parameters(), before, strict=True))
        whole_step(whole, other, step, **whole_options(clip))
    same(model, other)


def test_boundary_mode_weighs_through_backward(backend):
    """opt.backward multiplies a mean loss by its weight; step divides by the sum."""
    model = mlp()
    other = copy.deepcopy(model)
    opt = gf.GradAccumOptimizer(INNERS["adamw"](model.parameters()), backend=backend, max_grad_norm=0.7)
    whole = INNERS["adamw"](other.parameters())
    for step in range(20):
        x, y = batch(step)
        opt.zero_grad()
        for start, stop in ((0, 1), (1, 5), (5, 12)):
            loss = errors(model, x[start:stop], y[start:stop])
            if stop == 5:
                opt.backward(loss.sum(), weight=stop - start, reduction="sum")
            else:
                opt.backward(loss.mean(), weight=stop - start)
        opt.step()
        whole_step(whole, other, step, max_norm=0.7)
    same(model, other)
    assert opt.last_result.micro_batches == 3
    assert float(opt.last_result.weight_sum) == 12.0


@pytest.mark.parametrize("defer", [1, 2, 3, 8])
@pytest.mark.parametrize("inner", ["adamw", "sgd-momentum", "rmsprop"])
def test_deferral_has_the_same_bits(backend, inner, defer):
    """However many micro-batches are held, the sum is the same fused multiply-adds in the same order."""
    results = []
    for m in (1, defer):
        model = mlp()
        opt = gf.GradAccumOptimizer(INNERS[inner](model.parameters()), defer=m, max_grad_norm=0.7, backend=backend)
        for step in range(5):
            window_step(opt, model, step, splits=[(0, 1), (1, 3), (3, 4), (4, 9), (9, 12)])
        results.append([param.detach().clone() for param in model.parameters()])
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.compiled
def test_short_windows_allocate_no_main_grads():
    """K <= defer never touches an fp32 buffer; K = 1 neither, whatever defer is."""
    for splits, defer in (([(0, 12)], 1), ([(0, 4), (4, 12)], 2)):
        model = mlp()
        opt = gf.GradAccumOptimizer(INNERS["adamw"](model.parameters()), defer=defer)
        for step in range(2):
            window_step(opt, model, step, splits=splits)
        assert opt._engine._main_grads is None


def test_groups_keep_their_options(backend):
    model = mlp()
    other = copy.deepcopy(model)

    def groups(module):
        return [
            {"params": list(module[0].parameters()), "lr": 0.05, "weight_decay": 0.5},
            {"params": list(module[2].parameters()), "betas": (0.5, 0.8)},
            {"params": list(module[4].parameters()), "lr": 0.0},
        ]

    opt = gf.GradAccumOptimizer(torch.optim.AdamW(groups(model), lr=0.01), max_grad_norm=1.0, backend=backend)
    whole = torch.optim.AdamW(groups(other), lr=0.01)
    for step in range(20):
        window_step(opt, model, step)
        whole_step(whole, other, step, max_norm=1.0)
    same(model, other)
    assert opt.last_result.lr == (0.05, 0.01, 0.0)
