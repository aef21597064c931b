"""CASES C and M: norm, clip, found_inf, low precision."""

from __future__ import annotations

import math

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import gradacc_fused as gf


def assigned(backend, shapes_or_grads, dtype=torch.float32, **options):
    """Parameters whose gradients the test assigns itself; SGD with lr 1 from zero shows what the update saw."""
    params = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes_or_grads]
    options.setdefault("accumulation_steps", 2)
    options.setdefault("weighting", "equal" if options["accumulation_steps"] else None)
    return params, gf.GradAccumOptimizer(torch.optim.SGD(params, lr=1.0), backend=backend, **options)


def feed(params, opt, *pieces):
    for piece in pieces:
        for param, grad in zip(params, piece, strict=True):
            param.grad = None if grad is None else torch.as_tensor(grad, dtype=param.dtype)
        opt.step()


def test_C1_clip_is_of_the_accumulated_gradient(backend):
    # mean of [2, 0] and [0, 2] is [1, 1], norm sqrt(2), clipped to 1
    params, opt = assigned(backend, [(2,)], max_grad_norm=1.0)
    feed(params, opt, [[2.0, 0.0]], [[0.0, 2.0]])
    torch.testing.assert_close(-params[0].detach(), torch.full((2,), 0.70710678), rtol=1e-6, atol=1e-6)
    assert math.isclose(float(opt.last_result.total_norm), math.sqrt(2), rel_tol=1e-6)


def test_C3_fp16_norm_does_not_overflow(backend):
    params, opt = assigned(backend, [(4,)], torch.float16, accumulation_steps=1)
    feed(params, opt, [[40000.0] * 4])
    assert float(opt.last_result.total_norm) == 80000.0 and not opt.last_result.skipped


@pytest.mark.parametrize("defer", [1, 3, 15])
def test_C4_bf16_values_sum_in_fp32(backend, defer):
    value = torch.tensor(1.01).bfloat16()
    params, opt = assigned(backend, [(1,)], torch.bfloat16, accumulation_steps=15, defer=defer)
    feed(params, opt, *[[[float(value)]]] * 15)
    exact = 15 * float(value)
    assert math.isclose(float(opt.last_result.total_norm) * 15, exact, rel_tol=1e-6)
    main_param = opt.state[params[0]]["main_param"]
    assert math.isclose(-float(main_param) * 15, exact, rel_tol=1e-6)


def test_C5_an_all_zero_window(backend):
    params, opt = assigned(backend, [(3,), (2, 2)], max_grad_norm=1.0)
    zeros = [torch.zeros(3), torch.zeros(2, 2)]
    feed(params, opt, zeros, zeros)
    result = opt.last_result
    assert float(result.total_norm) == 0.0 and float(result.clip_coef) == 1.0 and not result.skipped
    assert all(torch.equal(param.detach(), torch.zeros_like(param)) for param in params)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_C6_one_non_finite_element_skips_the_whole_step(backend, bad):
    params = [torch.nn.Parameter(torch.ones(5)) for _ in range(3)]
    inner = torch.optim.AdamW(params, lr=0.1)
    opt = gf.GradAccumOptimizer(inner, accumulation_steps=2, weighting="equal", max_grad_norm=1.0, backend=backend)
    fine = [torch.ones(5)] * 3
    feed(params, opt, fine, fine)
    before = [param.detach().clone() for param in params]
    steps = [float(opt.state[param]["step"]) for param in params]
    feed(params, opt, fine, [torch.ones(5), torch.tensor([1.0, 1.0, bad, 1.0, 1.0]), torch.ones(5)])
    assert opt.last_result.skipped and float(opt.last_result.found_inf) == 1.0
    for param, old in zip(params, before, strict=True):
        assert torch.equal(param.detach(), old)
        assert torch.isfinite(opt.state[param]["exp_avg"]).all()
    assert [float(opt.state[param]["step"]) for param in params] == steps
    feed(params, opt, fine, fine)
    assert not opt.last_result.skipped and not torch.equal(params[0].detach(), before[0])


def test_C6_on_nonfinite_raise_names_the_parameters(backend):
    params, opt = assigned(backend, [(2,), (2,), (2,)], on_nonfinite="raise")
    with pytest.raises(gf.NonFiniteError, match=r"not finite in 2 parameter\(s\): 0, 2\. Nothing was"):
        feed(params, opt, [[1.0, 1.0]] * 3, [[math.nan, 1.0], [1.0, 1.0], [1.0, math.inf]])
    assert all(torch.equal(param.detach(), torch.zeros(2)) for param in params)
    feed(params, opt, [[1.0, 1.0]] * 3, [[1.0, 1.0]] * 3)
    assert all(torch.equal(param.detach(), -torch.ones(2)) for param in params)


def window_events(tensors, steps=4, mode="counting"):
    """Operator events of one window, nested ones counted, gradients made beforehand."""
    params = [torch.nn.Parameter(torch.zeros(7)) for _ in range(tensors)]
    kwargs = {"accumulation_steps": steps, "weighting": "given"} if mode == "counting" else {}
    opt = gf.GradAccumOptimizer(torch.optim.AdamW(params, lr=0.1), max_grad_norm=1.0, **kwargs)
    for measured in (False, True):
        pieces = [[torch.ones(7) for _ in params] for _ in range(steps)]
        losses = [torch.tensor(float(j)) for j in range(steps)]
        weights = [torch.tensor(j + 1) for j in range(steps)]
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
            for piece, loss, weight in zip(pieces, losses, weights, strict=True):
                for param, grad in zip(params, piece, strict=True):
                    param.grad = grad
                opt.step(weight=weight, loss=loss)
        if measured:
            return [event.name for event in profiler.events() if "::" in event.name]
    raise AssertionError


@pytest.mark.compiled
@pytest.mark.parametrize("steps", [1, 4, 8])
def test_C7_operator_calls_do_not_grow_with_the_number_of_tensors(steps):
    few, many = window_events(10, steps), window_events(2000, steps)
    assert sorted(few) == sorted(many)
    assert len(many) <= 3 * steps + 10
    assert many.count("gradacc_fused::accumulate_") == steps
    assert many.count("gradacc_fused::clip_") == many.count("gradacc_fused::update_") == 1
    assert sum(name.startswith("aten::empty") for name in many) <= 5  # allocations


def test_C8_clip_by_value_is_of_the_whole_batchs_gradient(backend):
    params, opt = assigned(backend, [(3,)], max_grad_value=1.0)
    # pieces [4, -6, 1] and [-3, 1, 0.5]: mean [0.5, -2.5, 0.75], clipped [0.5, -1, 0.75]
    feed(params, opt, [[4.0, -6.0, 1.0]], [[-3.0, 1.0, 0.5]])
    assert torch.equal(-params[0].detach(), torch.tensor([0.5, -1.0, 0.75]))
    assert math.isclose(float(opt.last_result.total_norm), math.sqrt(0.25 + 6.25 + 0.5625), rel_tol=1e-6)


def test_M5_two_fp16_gradients_of_40000(backend):
    params, opt = assigned(backend, [(1,)], torch.float16)
    feed(params, opt, [[40000.0]], [[40000.0]])
    assert not opt.last_result.skipped
    assert float(opt.last_result.total_norm) * 2 == 80000.0
    assert float(opt.state[params[0]]["main_param"]) == -40000.0


@pytest.mark.parametrize("defer", [1, 4, 1024])
@pytest.mark.parametrize(
    "values, expected",
    [
        ([1 / 512] * 512, 1.0),
        ([1.0] + [2.0**-9] * 255, 1.498046875),
        ([1.0] * 1024, 1024.0),
    ],
    ids=["512-x-1/512", "1+255-x-2^-9", "1024-ones"],
)
def test_M6_bf16_sums_are_exact(backend, values, expected, defer):
    params, opt = assigned(backend, [(1,)], torch.bfloat16, accumulation_steps=len(values), defer=defer)
    feed(params, opt, *[[[value]] for value in values])
    assert float(opt.last_result.total_norm) * len(values) == expected


def test_a_scale_of_1e19_and_of_1e_minus_30_trains(backend):
    for value in (1e19, 1e-30):
        params, opt = assigned(backend, [(4,)], max_grad_norm=1.0)
        feed(params, opt, [[value] * 4], [[value] * 4])
        assert not opt.last_result.skipped
        assert math.isclose(float(opt.last_result.total_norm), 2 * value, rel_tol=1e-6)
        if value > 1:
            torch.testing.assert_close(-params[0].detach(), torch.full((4,), 0.5), rtol=1e-6, atol=0)
        else:
            torch.testing.assert_close(-params[0].detach(), torch.full((4,), value), rtol=1e-6, atol=0)


def test_fp64_parameters_are_computed_in_fp64(backend):
    param = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    opt = gf.GradAccumOptimizer(
        torch.optim.SGD([param], lr=1.0), accumulation_steps=3, weighting="given", backend=backend
    )
    gradients, weights = [1.0 + 1e-12, 3.0, -2.0 + 1e-13], [1 / 3, 2.0, 0.7]
    for gradient, weight in zip(gradients, weights, strict=True):
        param.grad = torch.tensor([gradient], dtype=torch.float64)
        opt.step(weight=weight)
    exact = sum(g * w for g, w in zip(gradients, weights, strict=True)) / sum(weights)
    assert math.isclose(-param.item(), exact, rel_tol=4e-16)
    assert opt.last_result.total_norm.dtype == torch.float64
