"""Lion in plain torch, and what the fused rule makes of it, against algorithm 2 of Chen et al. 2023 in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from models import batch, mlp, whole_step, window_step
from tolerances import STORED, TRAJECTORY
from torch import nn
from updates import PlainLion

import gradacc_fused as gf

OPTIONS = {
    "plain": {"lr": 0.05, "betas": (0.9, 0.99)},
    "decay": {"lr": 0.05, "betas": (0.7, 0.8), "weight_decay": 0.4},
    "maximize": {"lr": 0.05, "betas": (0.3, 0.6), "weight_decay": 0.2, "maximize": True},
}


def one_by_hand():
    """p = 2, g = 1 then -1; lr 0.1, betas 0.5 and 0.75, decay 0.5."""
    param = nn.Parameter(torch.tensor([2.0]))
    # c = 0.5 -> p = 2 * 0.95 - 0.1; m = 0.25. Then c = 0.125 - 0.5 < 0 -> p = 1.8 * 0.95 + 0.1; m = 0.1875 - 0.25.
    return param, {"lr": 0.1, "betas": (0.5, 0.75), "weight_decay": 0.5}, (1.0, -1.0), (1.8, 1.81), (0.25, -0.0625)


def check_by_hand(wrap):
    param, options, grads, values, momenta = one_by_hand()
    optimizer = wrap(gf.Lion([param], **options))
    for step, (grad, value, momentum) in enumerate(zip(grads, values, momenta, strict=True), 1):
        param.grad = torch.tensor([grad])
        optimizer.step()
        assert param.item() == pytest.approx(value)
        assert optimizer.state[param]["exp_avg"].item() == pytest.approx(momentum)
        assert optimizer.state[param]["step"].item() == step


def test_by_hand():
    check_by_hand(lambda lion: lion)


def test_fused_by_hand(backend):
    check_by_hand(lambda lion: gf.GradAccumOptimizer(lion, backend=backend))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_plain_torch_follows_the_paper(options):
    generator = torch.Generator().manual_seed(1)
    params = [nn.Parameter(torch.randn(shape, generator=generator).double()) for shape in ((7, 5), (), (11,))]
    exact = copy.deepcopy(params)
    mine, theirs = gf.Lion(params, **options), PlainLion(exact, **options)
    for _ in range(10):
        for param, other in zip(params, exact, strict=True):
            param.grad = torch.randn(param.shape, generator=generator).double()
            other.grad = param.grad.clone()
        mine.step()
        theirs.step()
    for param, other in zip(params, exact, strict=True):
        torch.testing.assert_close(param, other, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_windows_follow_the_paper(backend, options, dtype):
    """Ten windows of three pieces; the groups differ, one parameter has no gradient in every third window."""
    generator = torch.Generator().manual_seed(5)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((70, 50), (9,), (300,))]
    exact = [nn.Parameter(param.detach().double()) for param in params]
    groups = [{"params": [0, 1]}, {"params": [2], "lr": 0.02}]

    def grouped(tensors):
        return [group | {"params": [tensors[i] for i in group["params"]]} for group in groups]

    opt = gf.GradAccumOptimizer(
        gf.Lion(grouped(params), **options), accumulation_steps=3, weighting="equal", backend=backend
    )
    theirs = PlainLion(grouped(exact), **options)
    weights = [torch.randn(param.shape, generator=generator).to(dtype) for param in params]
    for step in range(10):
        pieces = [float(x) for x in torch.randn(3, generator=generator)]
        used = [i for i in range(3) if i != 1 or step % 3]
        for x in pieces:
            opt.backward(sum((params[i] * weights[i]).sum() for i in used).float() * x)
            opt.step()
        for i, other in enumerate(exact):
            other.grad = weights[i].double() * (sum(pieces) / 3) if i in used else torch.zeros_like(other)
        kept = exact[1].detach().clone(), copy.copy(theirs.state[exact[1]])
        theirs.step()
        if 1 not in used:
            exact[1].data.copy_(kept[0])
            theirs.state[exact[1]] = kept[1]
    for param, other in zip(params, exact, strict=True):
        main_param = opt.state[param]["main_param"] if dtype == torch.bfloat16 else param.detach()
        torch.testing.assert_close(main_param.double(), other.detach(), rtol=1e-5, atol=2e-5)
        momentum = opt.state[param]["exp_avg"].double()
        atol = 3 * STORED[dtype] if dtype in STORED else 1e-6  # autograd rounds each gradient, up to 3 in size
        torch.testing.assert_close(momentum, theirs.state[other]["m"], rtol=1e-5, atol=atol)
        assert torch.equal(param.detach(), main_param.to(dtype))
    assert [opt.state[param]["step"].item() for param in params] == [10, 6, 10]


@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01), torch.tensor([0.01])], ids=["float", "tensor", "one-element"])
def test_a_model_trains_as_with_plain_lion(backend, lr):
    model = mlp()
    other = copy.deepcopy(model)
    opt = gf.GradAccumOptimizer(gf.Lion(model.parameters(), lr=lr, weight_decay=0.1), backend=backend)
    whole = gf.Lion(other.parameters(), lr=lr, weight_decay=0.1)
    for step in range(10):
        window_step(opt, model, step)
        whole_step(whole, other, step)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, **TRAJECTORY)


def test_checkpoints_are_exchanged_with_plain_lion(backend):
    model = mlp()
    opt = gf.GradAccumOptimizer(gf.Lion(model.parameters(), lr=0.01), backend=backend)
    window_step(opt, model, 0)
    other = copy.deepcopy(model)
    plain = gf.Lion(other.parameters(), lr=0.5)
    plain.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert plain.param_groups[0]["lr"] == 0.01
    third = copy.deepcopy(model)
    back = gf.GradAccumOptimizer(gf.Lion(third.parameters(), lr=0.5), backend=backend)
    back.load_state_dict(copy.deepcopy(plain.state_dict()))
    window_step(opt, model, 1)
    whole_step(plain, other, 1)
    window_step(back, third, 1)
    for mine, theirs, same in zip(model.parameters(), other.parameters(), third.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, **TRAJECTORY)
        assert torch.equal(mine, same)
    assert {float(state["step"]) for state in plain.state.values()} == {2.0}


@pytest.mark.parametrize("wrap", [False, True], ids=["plain", "fused"])
def test_a_checkpoint_of_another_implementation_has_no_step_and_no_maximize(wrap):
    """lucidrains' and the paper's own keep exp_avg alone; the momentum goes on."""
    param = nn.Parameter(torch.tensor([2.0]))
    opt = gf.Lion([param], lr=0.5)
    opt = gf.GradAccumOptimizer(opt) if wrap else opt
    group = {"lr": 0.1, "betas": (0.5, 0.75), "weight_decay": 0.5, "params": [0]}
    opt.load_state_dict({"state": {0: {"exp_avg": torch.tensor([0.25])}}, "param_groups": [group]})
    param.grad = torch.tensor([-1.0])
    opt.step()
    assert param.item() == pytest.approx(2.0 * 0.95 + 0.1)  # 0.125 - 0.5 is below 0
    assert opt.state[param]["exp_avg"].item() == pytest.approx(-0.0625)


def test_a_complex_parameter_is_refused():
    with pytest.raises(TypeError, match=r"Lion: params\[1\] must be of a real floating dtype, got torch\.complex64"):
        gf.Lion([nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1, dtype=torch.complex64))])


def test_names_and_iterators_are_taken_as_torch_takes_them():
    model = mlp()
    named = gf.Lion(model.named_parameters())
    assert named.param_groups[0]["param_names"] == [name for name, _ in model.named_parameters()]
    assert len(gf.Lion(iter(model.parameters())).param_groups[0]["params"]) == len(list(model.parameters()))


def test_a_subclass_runs_its_own_step(backend):
    class Mine(gf.Lion):
        pass

    fused, own = (gf.GradAccumOptimizer(kind(mlp().parameters()), backend=backend) for kind in (gf.Lion, Mine))
    assert fused._engine.rule.name == "lion" and own._engine.rule is None


def test_a_closure_is_run_with_gradients():
    model = mlp()
    lion = gf.Lion(model.parameters())
    inputs, targets = batch(0)[:2]

    def closure():
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        return loss

    assert lion.step(closure).requires_grad
    assert all(state["step"] == 1 for state in lion.state.values()) and len(lion.state) == len([*model.parameters()])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, r"Lion: lr must be at least 0, got -1\.0\."),
        ({"weight_decay": float("nan")}, r"Lion: weight_decay must be at least 0, got nan\."),
        ({"betas": (0.9, 1.0)}, r"Lion: betas must be two numbers from 0 to below 1, got \(0\.9, 1\.0\)\."),
        ({"betas": (0.9,)}, "betas must be two numbers"),
        ({"lr": torch.tensor([0.1, 0.2])}, r"Lion: lr must be a number or a tensor of one element, got shape \[2\]\."),
    ],
)
def test_refused(options, message):
    param = nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match=message):
        gf.Lion([param], **options)
    lion = gf.Lion([param])
    with pytest.raises(ValueError, match=message):
        lion.add_param_group({"params": [nn.Parameter(torch.ones(1))], **options})
    assert len(lion.param_groups) == 1


def test_a_sparse_gradient_is_refused_before_anything_moved():
    dense, embedding = nn.Parameter(torch.ones(2)), nn.Embedding(4, 2, sparse=True)
    lion = gf.Lion([{"params": [dense]}, {"params": embedding.parameters()}], lr=1.0)
    (dense.sum() + embedding(torch.tensor([1])).sum()).backward()
    with pytest.raises(RuntimeError, match=r"Lion: the gradient of param_groups\[1\]\['params'\]\[0\] must be dense"):
        lion.step()
    assert torch.equal(dense, torch.ones(2)) and not lion.state
