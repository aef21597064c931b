"""Interactions of modes, windows, state and copies that once gave, or nearly gave, a silently wrong number."""

from __future__ import annotations

import copy
import subprocess
import sys

import numpy
import pytest
import torch
from models import mlp, scalar, window_step
from test_robustness import Two, counting, swallowed
from torch import nn

import gradacc_fused as gf


def given(backend, k=2, **options):
    return scalar(backend, accumulation_steps=k, weighting="given", **options)


@pytest.mark.compiled
def test_the_compiled_loops_run_on_torchs_threads():
    """at::parallel_for runs serially in a file that was compiled without OpenMP: count the threads of the process."""
    code = (
        "import os, sys, torch, gradacc_fused as gf\n"
        "torch.set_num_threads(1)\n"
        "main, grad = torch.zeros(1 << 22), torch.ones(1 << 22)\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "torch.set_num_threads(int(sys.argv[1]))\n"
        "gf.accumulate_([main], [grad], torch.ones(1, dtype=torch.float64))\n"
        "print(len(os.listdir('/proc/self/task')) - before)\n"
    )
    started = [
        subprocess.run([sys.executable, "-c", code, count], capture_output=True, text=True, check=True).stdout.strip()
        for count in ("1", "2", "3")
    ]
    assert started == ["0", "1", "2"]


def test_W8_flush_refuses_what_failed(backend):
    model = Two()
    opt = counting(model, backend, steps=4)
    x = torch.ones(3, 6)
    for _ in range(2):
        model(x).sum().backward()
        opt.step()
    before = [param.detach().clone() for param in model.parameters()]
    swallowed(model(x, fails=True).sum())
    with pytest.raises(gf.WindowError, match="began and did not finish"):
        opt.flush()
    assert all(torch.equal(param.detach(), old) for param, old in zip(model.parameters(), before, strict=True))
    assert all(param.grad is None for param in model.parameters()) and opt.flush() is None


@pytest.mark.parametrize("how", ["opt.backward", "loss.backward"])
def test_W2_flush_refuses_a_micro_batch_that_was_not_taken(backend, how):
    model, opt = given(backend)
    if how == "opt.backward":
        opt.backward(model.loss_mean([100.0]), weight=1)
    else:
        model.loss_mean([100.0]).backward()
    with pytest.raises(gf.WindowError, match="flush: micro-batch 0 was not taken"):
        opt.flush()
    opt.zero_grad()
    for _ in range(2):
        model.loss_mean([1.0]).backward()
        opt.step(weight=1)
    assert model.value == -1.0


@pytest.mark.parametrize(
    "what", [{"loss": torch.ones(2)}, {"tokens": torch.ones(3)}, {"samples": torch.ones(0)}], ids=str
)
def test_a_refused_micro_batch_is_not_counted(backend, what):
    model, opt = given(backend)
    model.loss_mean([3.0]).backward()
    with pytest.raises(ValueError, match="must be a tensor with one element"):
        opt.step(weight=1, **what)
    opt.step(weight=1)  # the gradient is still there
    model.loss_mean([1.0]).backward()
    opt.step(weight=1)
    assert model.value == -2.0


def test_N7_zero_grad_forgets_a_declared_weight(backend):
    model, opt = given(backend)
    opt.backward(model.loss_mean([7.0]), weight=9)
    opt.zero_grad()
    model.loss_mean([1.0]).backward()
    with pytest.raises(gf.DenominatorError, match="has no weight"):
        opt.step()
    opt.step(weight=1)
    opt.backward(model.loss_mean([3.0]), weight=1)
    opt.step()
    assert model.value == -2.0


@pytest.mark.parametrize("order", ["before", "after"])
def test_W4_counting_mode_refuses_a_stray_backward_beside_opt_backward(backend, order):
    model, opt = given(backend, k=1)
    with pytest.raises(gf.WindowError, match="somebody else wrote .grad beside opt.backward"):
        if order == "before":
            model.loss_mean([100.0]).backward()
            opt.backward(model.loss_mean([2.0]), weight=2)
        else:
            opt.backward(model.loss_mean([2.0]), weight=2)
            model.loss_mean([100.0]).backward()
            opt.step()
    assert model.value == 0.0 and model.p.grad is None
    opt.backward(model.loss_mean([2.0]), weight=2)
    opt.step()
    assert model.value == -2.0


def test_W4_boundary_mode_notices_a_stray_backward_over_a_change_of_parameters(backend):
    model, opt = scalar(backend)
    opt.backward(model.loss_mean([2.0]), weight=1)
    opt.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    model.loss_mean([100.0]).backward()
    with pytest.raises(gf.WindowError, match="written or cleared by somebody else"):
        opt.backward(model.loss_mean([2.0]), weight=1)


def test_P1_a_refused_step_leaves_no_touched_bits(backend):
    used, unused = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    inner = torch.optim.AdamW([used, unused], lr=0.1, weight_decay=0.5)
    opt = gf.GradAccumOptimizer(inner, accumulation_steps=2, weighting="equal", backend=backend)
    with pytest.raises(gf.WindowError, match="has no gradient"):
        opt.step()
    with opt.window() as window:
        window.backward((used + unused).sum(), weight=1)
    before = unused.item()
    for _ in range(2):
        used.sum().backward()
        opt.step()
    assert unused.item() == before


@pytest.mark.parametrize("cause", ["copy", "frozen", "flip"])
def test_P12_published_main_params_survive(backend, cause):
    """add_param_group then deepcopy; freezing and unfreezing; a rule that was fused before."""
    param, other = nn.Parameter(torch.ones(4, dtype=torch.bfloat16)), nn.Parameter(torch.zeros(1))
    exact = nn.Parameter(torch.ones(4))
    make = torch.optim.SGD if cause == "flip" else torch.optim.RMSprop
    opt = gf.GradAccumOptimizer(make([param, other], lr=1e-4), backend=backend)
    whole = make([exact], lr=1e-4)

    def step(opt, param):
        with opt.window() as window:
            window.backward(param.sum(), weight=1)
        exact.grad = torch.ones_like(exact)

    for number in range(10):
        if number == 5 and cause == "copy":
            opt.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
            assert any("main_param" in entry for entry in opt.state_dict()["state"].values())
            opt = copy.deepcopy(opt)
            param = opt.param_groups[0]["params"][0]
        if number == 5 and cause == "frozen":
            param.requires_grad_(False)
            with opt.window() as window:
                window.backward(other.sum(), weight=1)
            param.requires_grad_(True)
        if number == 5 and cause == "flip":
            opt.param_groups[0]["differentiable"] = True  # no fused rule: its own step runs from now on
        step(opt, param)
        whole.step()
    index = 0
    main_param = opt.state_dict()["state"][index]["main_param"]
    torch.testing.assert_close(main_param, exact.detach())


def test_loading_copies_options_and_keeps_names(backend):
    models = mlp(), mlp()
    first, second = (
        gf.GradAccumOptimizer(torch.optim.AdamW(model.named_parameters(), lr=torch.tensor(0.1)), backend=backend)
        for model in models
    )
    saved = first.state_dict()
    del saved["param_groups"][0]["param_names"]
    second.load_state_dict(saved)
    first.param_groups[0]["lr"].fill_(9.0)
    assert float(second.param_groups[0]["lr"]) == pytest.approx(0.1)
    assert second.param_groups[0]["param_names"] == [name for name, _ in models[1].named_parameters()]


@pytest.mark.parametrize("edit", ["missing", "step", "frozen"])
def test_inconsistent_state_is_refused(backend, edit):
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    opt = gf.GradAccumOptimizer(torch.optim.AdamW(params, lr=0.1), backend=backend)
    saved = copy.deepcopy(opt.state_dict())
    if edit == "missing":
        del saved["state"][0]["exp_avg_sq"]
    elif edit == "step":
        saved["state"][0]["step"] = torch.ones(3)
    else:
        params[1].requires_grad_(False)
        saved["state"][1]["exp_avg"] = torch.ones(7)
    with pytest.raises(ValueError, match=r"load_state_dict: state\[[01]\].* must have .*Nothing was loaded"):
        opt.load_state_dict(saved)


def test_an_edited_main_param_is_the_main_param(backend):
    param = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    opt = gf.GradAccumOptimizer(torch.optim.SGD([param], lr=0.001), backend=backend)
    opt.state[param]["main_param"] = torch.full((2,), 1.001)
    with opt.window() as window:
        window.backward(param.sum(), weight=1)
    torch.testing.assert_close(opt.state[param]["main_param"], torch.full((2,), 1.0))


def test_a_closed_optimizer_refuses(backend):
    model, opt = given(backend)
    opt.close()
    model.loss_mean([1.0]).backward()
    for call in (lambda: opt.step(weight=1), lambda: opt.window()):
        with pytest.raises(gf.WindowError, match="was closed"):
            call()


@pytest.mark.compiled
def test_a_gradient_in_foreign_memory_is_taken_at_once():
    model, opt = scalar("cpu", accumulation_steps=2, weighting="equal", defer=2)
    buffer = numpy.zeros(1, dtype=numpy.float32)
    for value in (1.0, 3.0):
        buffer[0] = value
        model.p.grad = torch.from_numpy(buffer)
        opt.step()
    assert model.value == -2.0


def test_counters_may_be_reused_tensors(backend):
    model, opt = given(backend)
    counter = torch.zeros((), dtype=torch.int64)
    for count in (3, 5):
        counter.fill_(count)
        model.loss_mean([1.0]).backward()
        opt.step(weight=counter, tokens=counter, samples=counter)
    assert float(opt.last_result.tokens) == float(opt.last_result.samples) == float(opt.last_result.weight_sum) == 8.0


def test_a_float64_gradient_of_an_fp32_parameter_is_measured_as_it_is_applied(backend):
    param = nn.Parameter(torch.zeros(1))
    param.grad_dtype = None
    opt = gf.GradAccumOptimizer(torch.optim.SGD([param], lr=1.0), backend=backend)
    param.grad = torch.full((1,), 1e200, dtype=torch.float64)
    opt.step()
    assert opt.last_result.skipped and param.item() == 0.0


@pytest.mark.compiled
def test_fp16_subnormals_survive_flush_denormal():
    value = torch.tensor([6e-6], dtype=torch.float16)
    main_grad = torch.zeros(1)
    torch.set_flush_denormal(True)
    try:
        gf.accumulate_([main_grad], [value], torch.ones(1, dtype=torch.float64), overwrite=True)
    finally:
        torch.set_flush_denormal(False)
    assert main_grad.item() == value.float().item() > 0


def test_a_window_that_cannot_begin_does_not_stay_open(backend):
    model, opt = scalar(backend)
    extra = nn.Parameter(torch.zeros(1, device="meta"))
    opt.param_groups[0]["params"].append(extra)
    with pytest.raises(ValueError, match="is on meta"), opt.window():
        pass
    opt.param_groups[0]["params"].pop()
    with opt.window() as window:
        window.backward(model.loss_mean([1.0]), weight=1)
    assert model.value == -1.0


def test_discard_inside_the_block_abandons_the_window(backend):
    model, opt = scalar(backend)
    with opt.window() as window:
        window.backward(model.loss_mean([1.0]), weight=1)
        opt.discard()
    assert model.value == 0.0 and opt.last_result is None


def test_N3_boundary_mode_with_nothing_but_weightless_pieces(backend):
    model, opt = scalar(backend)
    for _ in range(2):
        opt.backward(model.loss_mean([float("nan")]), weight=0)
    with pytest.warns(UserWarning, match="total weight is 0"):
        opt.step()
    assert model.value == 0.0 and opt.last_result.skipped


@pytest.mark.compiled
def test_an_expanded_parameter_is_refused_before_anything_is_written():
    params = [torch.zeros(3), torch.zeros(1).expand(3)]
    steps = torch.zeros(2)
    states = [[torch.zeros(3), torch.zeros(3)] for _ in range(2)]
    with pytest.raises(ValueError, match="must not overlap itself"):
        gf.update_(
            params, [], *states, steps, [], [torch.ones(3), torch.ones(3)], torch.ones(1, dtype=torch.float64),
            gf.hyper_rows([{"lr": 0.1, "betas": (0.9, 0.9)}]), torch.zeros(2, dtype=torch.int32),
            torch.ones(2, dtype=torch.uint8), torch.ones((), dtype=torch.float64), torch.zeros(()), rule="adamw",
        )  # fmt: skip
    assert not params[0].any() and not steps.any()


def test_window_on_a_counting_optimizer_between_its_windows(backend):
    model = mlp()
    opt = counting(model, backend)
    window_step(opt, model, 0)
    swallowed(Two()(torch.ones(1, 6), fails=True).sum())  # somebody else's model: not ours to refuse
    window_step(opt, model, 1)
    assert opt.last_result.micro_batches == 3
