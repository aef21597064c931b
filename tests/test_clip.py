"""clip_ on every backend against values worked out by hand and against torch.nn.utils."""

from __future__ import annotations

import math

import pytest
import torch
from tolerances import NORM


def clip(ops, partials, counts=(1.0,), loss_scale=1.0, norm_type=2.0, max_norm=math.inf, dtype=torch.float32):
    out = {
        "total_norm": torch.empty((), dtype=dtype),
        "clip_coef": torch.empty((), dtype=dtype),
        "multiplier": torch.empty((), dtype=torch.float64),
        "weight_sum": torch.empty((), dtype=torch.float64),
    }
    ops.clip_(
        torch.tensor(partials, dtype=torch.float64), torch.tensor(counts, dtype=torch.float64),
        torch.tensor(loss_scale), *out.values(), norm_type=norm_type, max_norm=max_norm,
    )  # fmt: skip
    return {name: float(value) for name, value in out.items()}


def test_everything_folds_into_one_multiplier(ops):
    out = clip(ops, [9.0, 16.0], counts=(3.0, 2.0), loss_scale=4.0, max_norm=0.125)
    # norm 5 of the scaled sum; denominator (3 + 2) * 4 = 20; norm 0.25; coefficient 0.5 (1e-6 aside)
    assert out["total_norm"] == 0.25
    assert math.isclose(out["clip_coef"], 0.125 / (0.25 + 1e-6), rel_tol=1e-7)
    assert math.isclose(out["multiplier"], 0.125 / (0.25 + 1e-6) / 20, rel_tol=1e-12)
    assert out["weight_sum"] == 5.0


def test_inf_norm_takes_the_largest(ops):
    out = clip(ops, [3.0, 8.0, 2.0], counts=(2.0,), norm_type=math.inf, max_norm=1.0)
    assert out["total_norm"] == 4.0
    assert math.isclose(out["multiplier"], 1 / (4 + 1e-6) / 2, rel_tol=1e-12)


def test_C5_zero_norm_gives_coefficient_one(ops):
    out = clip(ops, [0.0, 0.0], max_norm=1e-9)
    assert out == {"total_norm": 0.0, "clip_coef": 1.0, "multiplier": 1.0, "weight_sum": 1.0}


@pytest.mark.parametrize("counts", [(0.0, 0.0), ()], ids=["zeros", "none"])
def test_no_weight_gives_a_multiplier_that_skips(ops, counts):
    out = clip(ops, [0.0], counts=counts)
    assert math.isnan(out["multiplier"])
    assert out["weight_sum"] == 0.0
    assert out["total_norm"] == 0.0


def test_norm_that_is_not_finite_cannot_be_clipped(ops):
    assert math.isnan(clip(ops, [math.inf], max_norm=1.0)["multiplier"])
    assert math.isnan(clip(ops, [math.nan, 1.0], max_norm=1.0)["multiplier"])
    assert clip(ops, [math.inf])["multiplier"] == 1.0  # nothing to clip: found_inf decides
    assert math.isnan(clip(ops, [1.0, math.nan], norm_type=math.inf, max_norm=1.0)["multiplier"])


@pytest.mark.parametrize("norm_type", [2.0, math.inf], ids=["l2", "inf"])
@pytest.mark.parametrize("max_norm", [0.1, 1e3], ids=["clips", "leaves"])
def test_coefficient_is_that_of_clip_grad_norm(ops, norm_type, max_norm):
    grads = [torch.randn(50), torch.randn(3, 7)]
    params = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    expected = torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type=norm_type)
    partials = [
        float(grad.double().square().sum() if norm_type == 2.0 else grad.double().abs().max()) for grad in grads
    ]
    out = clip(ops, partials, norm_type=norm_type, max_norm=max_norm)
    torch.testing.assert_close(torch.tensor(out["total_norm"]), expected, rtol=1e-6, atol=0)
    for param, grad in zip(params, grads, strict=True):
        torch.testing.assert_close(grad * out["multiplier"], param.grad, rtol=1e-6, atol=1e-9)


def test_float64_cells_keep_float64(ops):
    out = clip(ops, [2.0], dtype=torch.float64)
    torch.testing.assert_close(
        torch.tensor(out["total_norm"], dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64).sqrt(), **NORM
    )
    assert out["total_norm"] == math.sqrt(2.0)
