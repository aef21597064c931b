"""The torch.optim.Optimizer surface: groups, state, hooks, closures, schedulers, checkpoints, CASES L1."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from models import batch, errors, max_difference, mlp, scalar, whole_step, window_step
from tolerances import TRAJECTORY
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import gradacc_fused as gf


def test_it_is_an_optimizer_with_the_inner_groups_state_and_defaults(backend):
    model = mlp()
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    opt = gf.GradAccumOptimizer(inner, backend=backend)
    assert isinstance(opt, torch.optim.Optimizer)
    assert opt.param_groups is inner.param_groups and opt.defaults is inner.defaults
    assert opt.state is inner.state
    opt.param_groups[0]["lr"] = 0.5
    assert inner.param_groups[0]["lr"] == 0.5
    assert "GradAccumOptimizer(boundary" in repr(opt) and opt.backend == backend
    assert len(opt.state) == 6  # made before it is first read


@pytest.mark.parametrize("inner", ["adamw", "sgd", "rmsprop"])
def test_step_hooks_fire_once_per_real_step(backend, inner):
    model = mlp()
    made = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "rmsprop": torch.optim.RMSprop}[inner](
        model.parameters(), lr=0.01
    )
    opt = gf.GradAccumOptimizer(made, accumulation_steps=3, weighting="equal", backend=backend)
    calls = []
    opt.register_step_pre_hook(lambda optimizer, args, kwargs: calls.append(("pre", optimizer is opt)))
    opt.register_step_post_hook(lambda optimizer, args, kwargs: calls.append(("post", optimizer is opt)))
    made.register_step_post_hook(lambda optimizer, args, kwargs: calls.append(("inner", optimizer is made)))
    everywhere = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: calls.append(("global", True)))
    try:
        for step in range(7):
            x, y = batch(step)
            errors(model, x, y).mean().backward()
            opt.step()
    finally:
        everywhere.remove()
    for kind in ("pre", "post", "inner", "global"):
        assert calls.count((kind, True)) == 2, kind
    assert len(calls) == 8


def test_hooks_do_not_fire_on_a_skipped_step(backend):
    model, opt = scalar(backend, accumulation_steps=1)
    calls = []
    opt.register_step_post_hook(lambda *_: calls.append(1))
    for value in (float("nan"), 1.0):
        model.loss_mean([value]).backward()
        opt.step()
    assert calls == [1]


@pytest.mark.parametrize("mode", ["boundary", "counting"])
def test_closure(backend, mode):
    model = mlp()
    other = copy.deepcopy(model)
    options = {"accumulation_steps": 2, "weighting": "equal"} if mode == "counting" else {}
    opt = gf.GradAccumOptimizer(torch.optim.AdamW(model.parameters(), lr=0.05), backend=backend, **options)
    whole = torch.optim.AdamW(other.parameters(), lr=0.05)
    for step in range(4):
        x, y = batch(step)
        pieces = [(0, 6), (6, 12)] if mode == "counting" else [(0, 12)]
        for start, stop in pieces:

            def closure(start=start, stop=stop, x=x, y=y):
                opt.zero_grad()
                loss = errors(model, x[start:stop], y[start:stop]).mean()
                loss.backward()
                return loss

            with torch.no_grad():
                loss = opt.step(closure)
            assert isinstance(loss, torch.Tensor) and loss.requires_grad
        whole_step(whole, other, step)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, **TRAJECTORY)


def test_closure_loss_is_the_logged_one(backend):
    model, opt = scalar(backend, start=1.0, accumulation_steps=2, weighting="equal")
    for tokens in ([1.0, 3.0], [8.0]):

        def closure(tokens=tokens):
            loss = model.loss_mean(tokens)
            loss.backward()
            return loss

        opt.step(closure)
    assert float(opt.last_result.loss_mean) == 5.0


def test_L1_an_attached_scheduler_advances_once_per_applied_step(backend):
    model, opt = scalar(backend, accumulation_steps=4, weighting="equal")
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: 0.5**n)
    opt.attach(scheduler=scheduler)
    for _ in range(8):
        model.loss_mean([1.0]).backward()
        opt.step()
        scheduler.step()  # as the unchanged loop does
    assert opt.param_groups[0]["lr"] == 0.25 and scheduler.last_epoch == 2
    assert model.value == -1.5
    assert scheduler.state_dict()["last_epoch"] == 2
    torch.save(scheduler.state_dict(), io.BytesIO())
    opt.close()
    scheduler.step()  # no longer attached
    assert scheduler.last_epoch == 3


@pytest.mark.parametrize("on", ["outer", "inner"])
@pytest.mark.filterwarnings("error:.*lr_scheduler.step.*")
def test_M4_a_skipped_step_leaves_the_attached_scheduler(backend, on):
    model, opt = scalar(backend)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt if on == "outer" else opt.inner, lambda n: 0.5**n)
    opt.attach(scheduler=scheduler)
    with opt.window() as window:
        window.backward(model.loss_mean([float("inf")]), weight=1)
    assert opt.param_groups[0]["lr"] == 1.0 and scheduler.last_epoch == 0
    with opt.window() as window:
        window.backward(model.loss_mean([1.0]), weight=1)
    assert opt.param_groups[0]["lr"] == 0.5 and model.value == -1.0


def test_what_cannot_be_attached_is_refused(backend):
    model, opt = scalar(backend)
    with pytest.raises(TypeError, match="ReduceLROnPlateau steps on a metric"):
        opt.attach(scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(opt))
    with pytest.raises(TypeError, match="must be a torch.optim.lr_scheduler scheduler, got int"):
        opt.attach(scheduler=3)
    scheduler = torch.optim.lr_scheduler.ConstantLR(opt)
    opt.attach(scheduler=scheduler)
    with pytest.raises(ValueError, match="attached already"):
        opt.attach(scheduler=scheduler)


def test_an_lr_that_changes_in_an_open_window_is_warned_about(backend):
    model, opt = scalar(backend, accumulation_steps=2, weighting="equal")
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: 0.5**n)
    model.loss_mean([1.0]).backward()
    opt.step()
    scheduler.step()
    model.loss_mean([1.0]).backward()
    with pytest.warns(UserWarning, match=r"lr of group 0 changed from 1 to 0\.5 in an open window.*opt\.attach"):
        opt.step()


TORCH_INNERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.05, weight_decay=0.1),
    "adam": lambda params: torch.optim.Adam(params, lr=0.05, weight_decay=0.1),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05),
    "sgd-momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, dampening=0.5),
    "lion": lambda params: gf.Lion(params, lr=0.01, weight_decay=0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.9),
}


@pytest.mark.parametrize("inner", TORCH_INNERS)
@pytest.mark.parametrize("direction", ["torch-to-ours", "ours-to-torch"])
def test_checkpoints_are_exchanged_with_plain_torch(backend, inner, direction):
    """Half the training on one side, the state dict loaded on the other, half there: as if it had been one side."""
    make = TORCH_INNERS[inner]
    model, alone = mlp(), mlp()
    ours = gf.GradAccumOptimizer(make(model.parameters()), backend=backend)
    whole = make(alone.parameters())
    for step in range(3):
        if direction == "ours-to-torch":
            window_step(ours, model, step)
        else:
            whole_step(whole, alone, step)
    reference = mlp()
    reference_opt = make(reference.parameters())
    for step in range(6):
        whole_step(reference_opt, reference, step)
    if direction == "ours-to-torch":
        alone.load_state_dict(model.state_dict())
        whole.load_state_dict(ours.state_dict())
        for step in range(3, 6):
            whole_step(whole, alone, step)
        result = alone
    else:
        model.load_state_dict(alone.state_dict())
        ours.load_state_dict(whole.state_dict())
        for step in range(3, 6):
            window_step(ours, model, step)
        result = model
    for mine, theirs in zip(result.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, **TRAJECTORY)


@pytest.mark.parametrize("inner", ["adamw", "sgd-momentum", "rmsprop"])
def test_low_precision_checkpoints_keep_fp32_state(backend, inner):
    """torch's load_state_dict would round moments to bf16; ours resumes bit for bit."""
    make = TORCH_INNERS[inner]
    model = mlp(dtype=torch.bfloat16)
    opt = gf.GradAccumOptimizer(make(model.parameters()), backend=backend)
    for step in range(3):
        window_step(opt, model, step, dtype=torch.bfloat16)
    stream = io.BytesIO()
    torch.save([model.state_dict(), opt.state_dict()], stream)
    stream.seek(0)
    saved_model, saved_opt = torch.load(stream, weights_only=True)
    resumed = mlp(seed=5, dtype=torch.bfloat16)
    resumed_opt = gf.GradAccumOptimizer(make(resumed.parameters()), backend=backend)
    window_step(resumed_opt, resumed, 9, dtype=torch.bfloat16)  # state of its own, to be replaced
    resumed.load_state_dict(saved_model)
    resumed_opt.load_state_dict(saved_opt)
    for step in range(3, 6):
        window_step(opt, model, step, dtype=torch.bfloat16)
        window_step(resumed_opt, resumed, step, dtype=torch.bfloat16)
    assert max_difference(model, resumed) == 0.0
    state = opt.state_dict()["state"][0]
    assert state["main_param"].dtype == torch.float32
    assert all(value.dtype == torch.float32 for value in state.values() if isinstance(value, torch.Tensor))


def test_loading_copies_and_checks(backend):
    model, other = mlp(), mlp()
    opt = gf.GradAccumOptimizer(torch.optim.AdamW(model.parameters(), lr=0.05), backend=backend)
    twin = gf.GradAccumOptimizer(torch.optim.AdamW(other.parameters(), lr=0.01), backend=backend)
    window_step(opt, model, 0)
    twin.load_state_dict(opt.state_dict())
    assert twin.param_groups[0]["lr"] == 0.05
    mine, theirs = opt.state[model[0].weight], twin.state[other[0].weight]
    assert torch.equal(mine["exp_avg"], theirs["exp_avg"]) and float(theirs["step"]) == 1.0
    assert mine["exp_avg"].data_ptr() != theirs["exp_avg"].data_ptr()
    small = gf.GradAccumOptimizer(torch.optim.AdamW([nn.Parameter(torch.ones(1))]), backend=backend)
    with pytest.raises(ValueError, match=r"groups of \[1\] parameters, the state dict of \[6\]"):
        small.load_state_dict(opt.state_dict())


def test_state_dict_hooks_are_torchs(backend):
    model = mlp()
    opt = gf.GradAccumOptimizer(torch.optim.AdamW(model.parameters()), backend=backend)
    seen = []
    opt.register_state_dict_pre_hook(lambda optimizer: seen.append("pre"))
    opt.register_state_dict_post_hook(lambda optimizer, state_dict: seen.append("post"))
    opt.register_load_state_dict_pre_hook(lambda optimizer, state_dict: seen.append("load-pre"))
    opt.register_load_state_dict_post_hook(lambda optimizer: seen.append("load-post"))
    opt.load_state_dict(opt.state_dict())
    assert seen == ["pre", "post", "load-pre", "load-post"]


def test_an_open_window_is_not_copied_or_changed(backend):
    model, opt = scalar(backend, accumulation_steps=2, weighting="equal")
    model.loss_mean([1.0]).backward()
    opt.step()
    for what, call in {
        "load_state_dict": lambda: opt.load_state_dict({}),
        "deepcopy and pickle": lambda: copy.deepcopy(opt),
        "add_param_group": lambda: opt.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
        "window": lambda: opt.window().__enter__(),
    }.items():
        with pytest.raises(gf.WindowError, match=f"{what}: a window with 1 micro-batch"):
            call()
    model.loss_mean([3.0]).backward()
    opt.step()
    assert model.value == -2.0


def test_a_late_momentum_starts_its_buffer(backend):
    """CyclicLR and friends write group['momentum']: from 0 to 0.9 in mid-training, as torch would."""
    model, other = mlp(), mlp()
    opt = gf.GradAccumOptimizer(torch.optim.SGD(model.parameters(), lr=0.05, dampening=0.5), backend=backend)
    whole = torch.optim.SGD(other.parameters(), lr=0.05, dampening=0.5)
    for step in range(6):
        if step == 2:
            opt.param_groups[0]["momentum"] = whole.param_groups[0]["momentum"] = 0.9
        window_step(opt, model, step)
        whole_step(whole, other, step)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, **TRAJECTORY)


def test_an_optimizer_already_in_training_is_taken_over(backend):
    model, other = mlp(), mlp()
    inner = torch.optim.AdamW(model.parameters(), lr=0.05)
    whole = torch.optim.AdamW(other.parameters(), lr=0.05)
    for step in range(3):
        whole_step(inner, model, step)
        whole_step(whole, other, step)
    inner.zero_grad()
    opt = gf.GradAccumOptimizer(inner, backend=backend)
    for step in range(3, 6):
        window_step(opt, model, step)
        whole_step(whole, other, step)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, **TRAJECTORY)


def test_a_published_optimizer_sees_main_params_and_leaves_grad_alone(backend):
    seen = []

    class Probe(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.5})

        def step(self, closure=None):
            for group in self.param_groups:
                for param in group["params"]:
                    seen.append((param.dtype, param.grad.dtype, param.grad.tolist()))
                    self.state[param]["count"] = self.state[param].get("count", 0) + 1
                    with torch.no_grad():
                        param.add_(param.grad, alpha=-group["lr"])

    params = [nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)), nn.Parameter(torch.zeros(2))]
    opt = gf.GradAccumOptimizer(Probe(params), max_grad_value=2.5, backend=backend)
    for _ in range(2):
        with opt.window() as window:
            window.backward(params[0].sum() + params[1].sum() * 3, weight=1)
            window.backward(params[0].sum() * 2 + params[1].sum() * 3, weight=1)
    assert seen == [(torch.float32, torch.float32, [1.5, 1.5]), (torch.float32, torch.float32, [2.5, 2.5])] * 2
    assert params[0].tolist() == [-1.5, -1.5] and params[1].tolist() == [-2.5, -2.5]
    assert params[0].grad is None and opt.state[params[0]] == {"count": 2}


def test_wrong_construction_is_explained():
    param = nn.Parameter(torch.ones(1))
    inner = torch.optim.SGD([param], lr=1.0)
    for make, error, expected in [
        (lambda: gf.GradAccumOptimizer([param]), TypeError, "inner must be a torch.optim.Optimizer, got list"),
        (lambda: gf.GradAccumOptimizer(gf.GradAccumOptimizer(inner)), TypeError, "already a GradAccumOptimizer"),
        (lambda: gf.GradAccumOptimizer(inner, accumulation_steps=0), ValueError, "accumulation_steps must be a pos"),
        (lambda: gf.GradAccumOptimizer(inner, accumulation_steps=True), ValueError, "must be a positive int"),
        (lambda: gf.GradAccumOptimizer(inner, accumulation_steps=2, weighting="x"), ValueError, "'equal' or 'given'"),
        (lambda: gf.GradAccumOptimizer(inner, weighting="equal"), ValueError, "needs accumulation_steps"),
        (lambda: gf.GradAccumOptimizer(inner, max_grad_norm=0.0), ValueError, "max_grad_norm must be a positive"),
        (lambda: gf.GradAccumOptimizer(inner, max_grad_value=-1), ValueError, "max_grad_value must be a positive"),
        (lambda: gf.GradAccumOptimizer(inner, norm_type=1), ValueError, "norm_type must be 2 or inf"),
        (lambda: gf.GradAccumOptimizer(inner, host_scale=0), ValueError, "host_scale must be a positive"),
        (lambda: gf.GradAccumOptimizer(inner, defer=0), ValueError, "defer must be a positive int"),
        (lambda: gf.GradAccumOptimizer(inner, on_nonfinite="warn"), ValueError, "'skip' or 'raise'"),
        (lambda: gf.GradAccumOptimizer(inner, backend="cud"), ValueError, "must be one of cuda, triton, cpu, ref"),
    ]:
        with pytest.raises(error, match=expected):
            make()


def test_step_arguments_that_do_not_fit_the_mode(backend):
    model, opt = scalar(backend)
    model.loss_mean([1.0]).backward()
    with pytest.raises(ValueError, match="weight needs accumulation_steps"):
        opt.step(weight=3)
    model, opt = scalar(backend, accumulation_steps=2, weighting="equal")
    model.loss_mean([1.0]).backward()
    with pytest.raises(ValueError, match="weighting='equal' counts every micro-batch alike"):
        opt.step(weight=3)
    model, opt = scalar(backend, accumulation_steps=2, weighting="given")
    opt.backward(model.loss_mean([1.0]), weight=3)
    with pytest.raises(ValueError, match="given to opt.backward"):
        opt.step(weight=3)
    with pytest.raises(gf.WindowError, match="was not taken by step"):
        opt.backward(model.loss_mean([1.0]), weight=3)


def test_M3_grad_scaler_works_in_boundary_mode_and_is_refused_in_counting_mode(backend):
    model, opt = scalar(backend, max_grad_norm=10.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    for tokens in ([1.0, 3.0], [float("inf")], [4.0]):
        opt.zero_grad()
        scaler.scale(model.loss_mean(tokens)).backward()
        scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
    assert model.value == -6.0 and scaler.get_scale() == 512.0
    model, opt = scalar(backend, accumulation_steps=2, weighting="equal")
    scaler.scale(model.loss_mean([1.0])).backward()
    with pytest.raises(gf.WindowError, match="GradScaler.*Use boundary mode"):
        scaler.step(opt)
    assert model.value == 0.0


def test_reading_state_does_not_walk_the_parameters_each_time(backend, monkeypatch):
    """A loop over ``opt.state[p]`` is as fast as over a dict; an emptied state is made again when it is next read."""
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(50)]
    opt = gf.GradAccumOptimizer(torch.optim.AdamW(params), backend=backend)
    assert len(opt.state) == 50
    made = opt._engine._state
    monkeypatch.setattr(opt._engine, "prepare", lambda: pytest.fail("walked"))
    assert all(opt.state[param]["exp_avg"].shape == (2,) for param in params)
    monkeypatch.undo()
    opt.inner.state.clear()
    assert len(opt.state) == 50 and opt._engine._state is not made
