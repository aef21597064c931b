"""Lists so long that several threads walk them: the same results as plain torch, and the same care."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradacc_fused as gf

pytestmark = pytest.mark.compiled

COUNT = 1_500  # a thread takes at least 512
LOOKED_UP, MATRIX = 700, 1_499  # their gradients are sparse, and in another memory order


def make_params() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(number % 5 + 1,) for number in range(COUNT)]
    shapes[LOOKED_UP] = (6, 2)
    shapes[MATRIX] = (3, 4)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def loss(params: list[nn.Parameter], step: int) -> torch.Tensor:
    rows = nn.functional.embedding(torch.tensor([step, step, 5]), params[LOOKED_UP], sparse=True)
    inputs = torch.arange(12.0).reshape(4, 3) / 10 - step
    total = (rows * 1.5).sum() + (inputs @ params[MATRIX]).square().sum() / 100
    for number, param in enumerate(params):
        if number not in (LOOKED_UP, MATRIX) and (number + step) % 3:  # the others are not reached
            total = total + (param * (number % 7 - 3 + step)).sum()
    return total


@pytest.mark.parametrize("defer", [1, 4])
def test_many_tensors_step_as_plain_torch_does(defer):
    params, expected = make_params(), make_params()
    opt = gf.GradAccumOptimizer(
        torch.optim.AdamW(params, lr=0.05), accumulation_steps=3, weighting="equal", max_grad_norm=2.0, defer=defer,
        backend="cpu",
    )  # fmt: skip
    usual = torch.optim.AdamW(expected, lr=0.05)
    for _ in range(2):
        for step in range(3):
            loss(params, step).backward()
            opt.step()
            (loss(expected, step) / 3).backward()
        expected[LOOKED_UP].grad = expected[LOOKED_UP].grad.to_dense()
        norm = nn.utils.clip_grad_norm_(expected, 2.0)
        usual.step()
        usual.zero_grad()
        torch.testing.assert_close(opt.last_result.total_norm, norm, rtol=1e-5, atol=0.0)
    for number, (param, wanted) in enumerate(zip(params, expected, strict=True)):
        torch.testing.assert_close(param, wanted, rtol=1e-5, atol=1e-6, msg=lambda text, n=number: f"{n}: {text}")
        assert param.grad is None


@pytest.mark.skipif(not hasattr(nn.Parameter(torch.zeros(1)), "grad_dtype"), reason="torch fixes the gradient's dtype")
def test_a_gradient_that_cannot_be_read_leaves_every_other_where_it_was():
    params = [nn.Parameter(torch.ones(2)) for _ in range(COUNT)]
    params[1_200].grad_dtype = None
    opt = gf.GradAccumOptimizer(torch.optim.SGD(params, lr=1.0), accumulation_steps=2, weighting="equal", backend="cpu")
    for param in params:
        param.grad = torch.ones(2)
    params[1_200].grad = torch.ones(2, dtype=torch.float8_e4m3fn)
    before = [param.grad for param in params]
    with pytest.raises(TypeError, match="the gradient of parameter 1200 must be float32"):
        opt.step()
    assert all(param.grad is grad for param, grad in zip(params, before, strict=True))
    assert all(param.tolist() == [1.0, 1.0] for param in params)


def test_a_parameter_written_among_many_is_followed():
    params = [nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(COUNT)]
    opt = gf.GradAccumOptimizer(torch.optim.SGD(params, lr=1.0), backend="cpu")
    for written in (None, 1_300):
        if written is not None:
            with torch.no_grad():
                params[written].fill_(8.0)
        opt.zero_grad()
        torch.stack([param.sum() for param in params]).sum().backward()
        opt.step()
    assert [number for number, param in enumerate(params) if param.tolist() != [-1.0, -1.0]] == [1_300]
    assert params[1_300].tolist() == [7.0, 7.0]
