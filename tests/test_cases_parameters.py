"""CASES P: unused, late, tied, sparse, empty, huge, strided, frozen, moved and replaced parameters."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from models import batch, errors, max_difference, mlp, scalar, whole_step, window_step
from tolerances import TRAJECTORY
from torch import nn

import gradacc_fused as gf
from gradacc_fused.layout import ALIGN, build_layout


def adamw(params, backend=None, lr=0.1, weight_decay=0.1, **options):
    return gf.GradAccumOptimizer(
        torch.optim.AdamW(params, lr=lr, weight_decay=weight_decay), backend=backend, **options
    )


@pytest.mark.parametrize("pieces", [1, 3])
def test_P1_an_unused_parameter_does_not_move(backend, pieces):
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    opt = adamw([used, unused], backend)
    for _ in range(2):
        with opt.window() as window:
            for _ in range(pieces):
                window.backward((used * 2).sum(), weight=1)
    assert torch.equal(unused.detach(), torch.ones(3))
    assert float(opt.state[unused]["step"]) == 0.0 and float(opt.state[used]["step"]) == 2.0
    with opt.window() as window:  # used now for the first time: bias correction of step 1
        window.backward((unused * 3).sum() + 0 * used.sum(), weight=1)
    torch.testing.assert_close(unused.detach(), torch.full((3,), 0.99 - 0.1))


def test_P2_the_first_gradient_comes_in_the_last_piece(backend):
    """After a window in which the parameter had another gradient: what the buffer held must not come back."""
    one, late = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    opt = gf.GradAccumOptimizer(torch.optim.SGD([one, late], lr=1.0), backend=backend)
    for _ in range(2):
        with torch.no_grad():
            late.zero_()
        with opt.window() as window:
            window.backward((one * 5).sum() + (late * 100).sum(), weight=1)
            window.backward((one * 5).sum() + (late * 100).sum(), weight=1)
        with torch.no_grad():
            late.zero_()
        with opt.window() as window:
            window.backward((one * 1).sum(), weight=1)
            window.backward((one * 1).sum(), weight=2)
            window.backward((one * 1).sum() + (late * 8).sum(), weight=1)
        assert torch.equal(late.detach(), torch.full((3,), -2.0))


def test_P3_tied_weights_count_once(backend):
    weight = nn.Parameter(torch.tensor([3.0]))
    tied = nn.ModuleDict({"one": nn.ParameterDict({"w": weight}), "two": nn.ParameterDict({"w": weight})})
    opt = gf.GradAccumOptimizer(torch.optim.SGD(tied.parameters(), lr=1.0), backend=backend)
    with opt.window() as window:
        window.backward((tied["one"]["w"] * tied["two"]["w"]).sum(), weight=1)
    assert float(opt.last_result.total_norm) == 6.0 and weight.item() == -3.0


def test_P4_sparse_embedding(backend):
    embedding = nn.Embedding(4, 1, sparse=True)
    with torch.no_grad():
        embedding.weight.zero_()
    opt = gf.GradAccumOptimizer(torch.optim.SGD(embedding.parameters(), lr=1.0), backend=backend)
    with opt.window() as window:
        window.backward(embedding(torch.tensor([1, 1])).sum(), weight=1, reduction="sum")
        window.backward(embedding(torch.tensor([1, 2])).sum(), weight=1, reduction="sum")
    assert (-2 * embedding.weight.detach().flatten()).tolist() == [0.0, 3.0, 1.0, 0.0]
    assert opt.last_result.micro_batches == 2


@pytest.mark.parametrize("where", [[0], [1], [2], [0, 1, 2]], ids=["first", "middle", "last", "alone"])
def test_P5_empty_tensors_are_no_ops(backend, where):
    shapes = [(0, 3) if i in where else (2, 3) for i in range(3)]
    params = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    twins = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    opt = adamw(params, backend, max_grad_norm=1.0)
    whole = torch.optim.AdamW(twins, lr=0.1, weight_decay=0.1)
    with opt.window() as window:
        for factor in (1.0, 3.0):
            window.backward(sum((param * factor).sum() for param in params), weight=1)
    sum((twin * 2).sum() for twin in twins).backward()
    torch.nn.utils.clip_grad_norm_(twins, 1.0)
    whole.step()
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(param, twin, **TRAJECTORY)
    assert not opt.last_result.skipped


def test_P6_more_than_2_to_the_31_elements():
    """Planned on meta tensors: offsets and chunks in 64 bits, and the ops' fakes take the sizes."""
    k = 12345
    huge = torch.nn.Parameter(torch.empty(2**31 + k, device="meta", dtype=torch.bfloat16))
    after = torch.nn.Parameter(torch.empty(7, device="meta"))
    layout = build_layout([{"params": [huge, after, torch.nn.Parameter(torch.empty(5, device="meta"))]}])
    padded = (2**31 + k + ALIGN - 1) // ALIGN * ALIGN
    assert layout.offsets == (0, padded, padded + ALIGN)
    assert layout.n_partials == (2**31 + k + 65535) // 65536 + 2
    main_grads = [torch.empty(param.shape, device="meta") for param in layout.params]
    partials = torch.empty(layout.n_partials, dtype=torch.float64, device="meta")
    found_inf = torch.empty((), device="meta")
    weights = torch.empty(1, dtype=torch.float64, device="meta")
    grads = [torch.empty_like(param) for param in layout.params]
    gf.accumulate_(main_grads, grads, weights, partials=partials, found_inf=found_inf)
    with pytest.raises(ValueError, match=f"partials must be contiguous with at least {layout.n_partials} elements"):
        gf.accumulate_(main_grads, grads, weights, partials=partials[1:], found_inf=found_inf)


class Strided(nn.Module):
    """A channels_last convolution, a transposed parameter, and one with gaps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.conv = nn.Conv2d(3, 8, 3, bias=False).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(9, 8).t())
        self.gaps = nn.Parameter(torch.randn(8, 6)[:, ::2])

    def forward(self, x):
        hidden = self.conv(x).mean(dim=(2, 3))
        return ((hidden @ self.transposed).sum(dim=1) + (hidden @ self.gaps).tanh().sum(dim=1)).square()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
def test_P7_strided_parameters_and_gradients(backend, memory_format):
    model = Strided()
    other = copy.deepcopy(model)
    strides = [param.stride() for param in model.parameters()]
    opt = adamw(model.parameters(), backend, max_grad_norm=1.0)
    whole = torch.optim.AdamW(other.parameters(), lr=0.1, weight_decay=0.1)
    for step in range(5):
        torch.manual_seed(step)
        x = torch.randn(6, 3, 7, 7).to(memory_format=memory_format)
        with opt.window() as window:
            for start, stop in ((0, 1), (1, 6)):
                window.backward(model(x[start:stop]).sum(), weight=stop - start, reduction="sum")
        whole.zero_grad()
        other(x).mean().backward()
        torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        whole.step()
    for param, twin in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(param, twin, rtol=1e-4, atol=1e-5)
    assert [param.stride() for param in model.parameters()] == strides


def test_P8_frozen_parameters_and_freezing_between_windows(backend):
    model = mlp()
    opt = adamw(model.parameters(), backend)
    model[0].weight.requires_grad_(False)
    frozen = model[0].weight.detach().clone()
    window_step(opt, model, 0)
    assert torch.equal(model[0].weight.detach(), frozen)
    moved = model[2].weight.detach().clone()
    model[0].weight.requires_grad_(True)
    model[2].weight.requires_grad_(False)
    window_step(opt, model, 1)
    assert not torch.equal(model[0].weight.detach(), frozen)
    assert torch.equal(model[2].weight.detach(), moved)
    model[2].weight.requires_grad_(True)
    window_step(opt, model, 2)
    steps = {name: float(opt.state[param]["step"]) for name, param in model.named_parameters() if "weight" in name}
    assert steps == {"0.weight": 2.0, "2.weight": 2.0, "4.weight": 3.0}


def test_P8_freezing_in_an_open_window_is_refused(backend):
    model = mlp()
    opt = adamw(model.parameters(), backend)
    before = [param.detach().clone() for param in model.parameters()]
    x, y = batch(0)
    with pytest.raises(gf.WindowError, match="parameters changed in an open window"), opt.window() as window:
        window.backward(errors(model, x, y).mean(), weight=1)
        model[0].weight.requires_grad_(False)
        window.backward(errors(model, x, y).mean(), weight=1)
    assert all(torch.equal(param.detach(), old) for param, old in zip(model.parameters(), before, strict=True))


def test_P9_parameters_on_several_devices_are_refused_by_name(backend):
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, device="meta"))]
    with pytest.raises(
        ValueError, match="parameter 2 is on meta, parameter 0 on cpu.*one GradAccumOptimizer per device"
    ):
        adamw(params, backend)


@pytest.mark.parametrize(
    "dtype, expected",
    [(torch.complex64, "complex parameters are not supported"), (torch.float8_e5m2, "must be float32")],
)
def test_parameters_that_no_kernel_reads_are_refused(backend, dtype, expected):
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2).to(dtype))]
    with pytest.raises(TypeError, match=f"parameter 1.*{expected}|parameter 1 is.*{expected}"):
        adamw(params, backend)


def continued(backend, transform, inner=lambda params: torch.optim.AdamW(params, lr=0.05)):
    """Train, pass through ``transform``, train on; beside a run that was left alone."""
    model = mlp()
    other = copy.deepcopy(model)
    opt = gf.GradAccumOptimizer(inner(model.parameters()), max_grad_norm=1.0, backend=backend)
    twin = gf.GradAccumOptimizer(inner(other.parameters()), max_grad_norm=1.0, backend=backend)
    for step in range(3):
        window_step(opt, model, step)
        window_step(twin, other, step)
    model, opt = transform(model, opt)
    for step in range(3, 6):
        window_step(opt, model, step)
        window_step(twin, other, step)
    assert max_difference(model, other) == 0.0


INNERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.05),
    "sgd-momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, dampening=0.5),
    "lion": lambda params: gf.Lion(params, lr=0.01),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5),
}
inners = pytest.mark.parametrize("inner", INNERS.values(), ids=INNERS)


@inners
def test_P10_deepcopy(backend, inner):
    continued(backend, lambda model, opt: copy.deepcopy((model, opt)), inner)


@inners
def test_P10_pickle(backend, inner):
    continued(backend, lambda model, opt: pickle.loads(pickle.dumps((model, opt))), inner)


@inners
def test_P10_state_dict_round_trip(backend, inner):
    def transform(model, opt):
        stream = io.BytesIO()
        torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, stream)
        stream.seek(0)
        saved = torch.load(stream, weights_only=True)
        fresh = mlp(seed=9)
        fresh.load_state_dict(saved["model"])
        fresh_opt = gf.GradAccumOptimizer(inner(fresh.parameters()), max_grad_norm=1.0, backend=backend)
        fresh_opt.load_state_dict(saved["opt"])
        return fresh, fresh_opt

    continued(backend, transform, inner)


def test_P10_lambda_lr_and_add_param_group_in_mid_training(backend):
    model, extra = mlp(), nn.Parameter(torch.ones(2))
    other, other_extra = copy.deepcopy(model), nn.Parameter(torch.ones(2))
    opt = gf.GradAccumOptimizer(torch.optim.AdamW(model.parameters(), lr=0.05), backend=backend)
    whole = torch.optim.AdamW(other.parameters(), lr=0.05)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.9**n) for optimizer in (opt, whole)]
    for step in range(6):
        if step == 3:
            opt.add_param_group({"params": [extra], "lr": 0.2})
            whole.add_param_group({"params": [other_extra], "lr": 0.2})
        x, y = batch(step)
        with opt.window() as window:
            for start, stop in ((0, 4), (4, 12)):
                loss = errors(model, x[start:stop], y[start:stop]).sum()
                loss = loss + (stop - start) * (extra**2).sum() if step >= 3 else loss
                window.backward(loss, weight=stop - start, reduction="sum")
        whole.zero_grad()
        (errors(other, x, y).mean() + ((other_extra**2).sum() if step >= 3 else 0.0)).backward()
        whole.step()
        if step < 3:
            for scheduler in schedulers:
                scheduler.step()
    for mine, theirs in zip([*model.parameters(), extra], [*other.parameters(), other_extra], strict=True):
        torch.testing.assert_close(mine, theirs, **TRAJECTORY)
    assert opt.param_groups is opt.inner.param_groups and len(opt.param_groups) == 2


def test_P10_parameters_replaced_under_us(backend):
    """param_group["params"] reassigned between windows: detected, and the old parameters are left alone."""
    model = mlp()
    opt = adamw(model.parameters(), backend)
    window_step(opt, model, 0)
    old = list(model.parameters())
    fresh = mlp(seed=3)
    twin = copy.deepcopy(fresh)
    opt.param_groups[0]["params"] = list(fresh.parameters())
    kept = [param.detach().clone() for param in old]
    whole = torch.optim.AdamW(twin.parameters(), lr=0.1, weight_decay=0.1)
    for step in range(3):
        window_step(opt, fresh, step)
        whole_step(whole, twin, step)
    for param, other in zip(fresh.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(param, other, **TRAJECTORY)
    assert all(torch.equal(param.detach(), before) for param, before in zip(old, kept, strict=True))


def test_P11_a_tensor_lr_that_becomes_a_float(backend):
    model = mlp()
    other = copy.deepcopy(model)
    opt = gf.GradAccumOptimizer(torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.05)), backend=backend)
    whole = torch.optim.AdamW(other.parameters(), lr=0.05)
    for step in range(6):
        if step == 2:
            opt.param_groups[0]["lr"].fill_(0.02)
        if step == 4:
            opt.param_groups[0]["lr"] = 0.01
        whole.param_groups[0]["lr"] = [0.05, 0.02, 0.01][step // 2]
        window_step(opt, model, step)
        whole_step(whole, other, step)
    for param, twin in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(param, twin, **TRAJECTORY)


@pytest.mark.parametrize("inner", ["adamw", "rmsprop"])
def test_P12_bf16_parameters_move_at_a_small_lr(backend, inner):
    """Each update is below half a unit in the last place of bf16 1.0; a hundred of them are not."""
    param = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    inner_class = torch.optim.AdamW if inner == "adamw" else torch.optim.RMSprop
    opt = gf.GradAccumOptimizer(inner_class([param], lr=1e-4), backend=backend)
    plain = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    torch_alone = inner_class([plain], lr=1e-4)
    for _ in range(100):
        with opt.window() as window:
            window.backward(param.sum(), weight=1)
        plain.grad = torch.ones_like(plain)
        torch_alone.step()
    if inner == "adamw":  # RMSprop's first steps are ten times as large
        assert torch.equal(plain.detach(), torch.ones_like(plain))
    exact = nn.Parameter(torch.ones(64))
    whole = inner_class([exact], lr=1e-4)
    for _ in range(100):
        exact.grad = torch.ones_like(exact)
        whole.step()
    assert torch.equal(param.detach(), exact.detach().bfloat16())
    assert float(param.detach()[0]) < 1.0


def test_P12_a_low_precision_parameter_written_by_others_is_taken_up(backend):
    """model.load_state_dict in mid-training: the main param follows, it does not undo the load."""
    param = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    for inner in (torch.optim.SGD([param], lr=0.5), torch.optim.Adagrad([param], lr=0.5)):
        opt = gf.GradAccumOptimizer(inner, backend=backend)
        for start in (1.0, 64.0):
            with torch.no_grad():
                param.fill_(start)
            for _ in range(2):
                before = float(param.detach()[0])
                with opt.window() as window:
                    window.backward(param.sum(), weight=1)
                assert before - 0.75 <= float(param.detach()[0]) < before


def test_scalars_and_mixed_dtypes_in_one_optimizer(backend):
    params = [
        nn.Parameter(torch.tensor(1.0)),
        nn.Parameter(torch.ones(3, dtype=torch.bfloat16)),
        nn.Parameter(torch.ones(3, dtype=torch.float64)),
        nn.Parameter(torch.ones(3, dtype=torch.float16)),
    ]
    opt = adamw(params, backend, max_grad_norm=1.0)
    for _ in range(3):
        with opt.window() as window:
            for _ in range(2):
                window.backward(sum(param.double().sum() for param in params), weight=1)
    norm = 10**0.5
    torch.testing.assert_close(float(opt.last_result.total_norm), norm)
    for param in params:
        assert torch.allclose(param.detach().double(), params[2].detach()[0], rtol=2e-2)


def test_unused_scalar_model_state_is_torchs(backend):
    model, opt = scalar(backend)
    with opt.window() as window:
        window.backward(model.loss_mean([1.0]), weight=1)
    assert opt.state_dict()["state"] == {}  # SGD without momentum has none
