"""What users do to an optimizer between and around its steps; none of it may go wrong silently."""

from __future__ import annotations

import copy
import pickle

import numpy
import pytest
import torch
from models import assert_unmoved, batch, errors, mlp, scalar, snapshot, whole_step, window_step
from tolerances import TRAJECTORY
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import gradacc_fused as gf


class Bad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("planted")


def swallowed(loss) -> None:
    with pytest.raises(RuntimeError, match="planted"):
        loss.backward()


class Two(nn.Module):
    """Two layers; a failure between them leaves the second with a gradient and the first without."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 2)

    def forward(self, x, fails=False):
        hidden = self.first(x)
        return self.second(Bad.apply(hidden) if fails else hidden)


def counting(model, backend, steps=2, lr=0.1):
    return gf.GradAccumOptimizer(
        torch.optim.SGD(model.parameters(), lr=lr), accumulation_steps=steps, weighting="equal", backend=backend
    )


# -- a backward that failed and was swallowed ------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_W8_swallowed_whatever_k_is(backend, steps):
    model = Two()
    opt = counting(model, backend, steps)
    before = snapshot(opt)
    swallowed(model(batch(0)[0], fails=True).sum())
    with pytest.raises(gf.WindowError, match="began and did not finish"):
        opt.step()
    assert_unmoved(before, snapshot(opt))


@pytest.mark.parametrize("change", ["unfreeze", "add_param_group", "reassign"])
def test_W8_swallowed_after_the_parameters_changed(backend, change):
    model = Two()
    model.first.requires_grad_(change != "unfreeze")
    opt = counting(model, backend)
    for step in range(2):
        model(batch(step)[0]).sum().backward()
        opt.step()
    if change == "unfreeze":
        model.first.requires_grad_(True)
    elif change == "add_param_group":
        opt.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    else:
        opt.param_groups[0]["params"] = list(model.parameters())[:-1]
    before = [param.detach().clone() for param in model.parameters()]
    opt.zero_grad()
    swallowed(model(batch(0)[0], fails=True).sum())
    with pytest.raises(gf.WindowError, match="began and did not finish"):
        opt.step()
    assert_unmoved(before, [param.detach() for param in model.parameters()])


@pytest.mark.parametrize("when", ["before", "after"])
def test_W8_a_users_own_gradient_hook_raises(backend, when):
    model = Two()

    def refuse(param):
        raise RuntimeError("planted")

    if when == "before":
        model.second.weight.register_post_accumulate_grad_hook(refuse)
    opt = counting(model, backend)
    if when == "after":
        model.second.weight.register_post_accumulate_grad_hook(refuse)
    before = snapshot(opt)
    swallowed(model(batch(0)[0]).sum())
    with pytest.raises(gf.WindowError, match="began and did not finish"):
        opt.step()
    assert_unmoved(before, snapshot(opt))


@pytest.mark.parametrize("remedy", ["discard", "zero_grad", "window"])
def test_W8_what_clears_the_gradients_clears_the_failure(backend, remedy):
    model = Two()
    opt = counting(model, backend, steps=1)
    x = batch(0)[0]
    if remedy == "window":
        with pytest.raises(RuntimeError, match="planted"), opt.window() as window:
            window.backward(model(x, fails=True).sum(), weight=1)
    else:
        swallowed(model(x, fails=True).sum())
        getattr(opt, remedy)()
    before = snapshot(opt)
    model(x).sum().backward()
    opt.step()
    assert not torch.equal(before[0], snapshot(opt)[0])


def test_W8_opt_backward_failed_and_step_says_so(backend):
    model = Two()
    opt = counting(model, backend)
    with pytest.raises(RuntimeError, match="planted"):
        opt.backward(model(batch(0)[0], fails=True).sum())
    with pytest.raises(gf.WindowError, match="micro-batch 0 has no gradient: backward of micro-batch 0 raised Runtime"):
        opt.step()


def test_an_own_backward_that_raises_in_the_block_leaves_no_grad(backend):
    model = Two()
    opt = gf.GradAccumOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), backend=backend)
    with pytest.raises(RuntimeError, match="planted"), opt.window():
        model(batch(0)[0], fails=True).sum().backward()
    assert all(param.grad is None for param in model.parameters())
    with opt.window() as window:
        window.backward(model(batch(0)[0]).sum(), weight=1)


# -- gradients of somebody else's --------------------------------------------------------------------------------------


def test_W4_a_stray_backward_at_the_end_of_a_window_is_refused(backend):
    model, opt = scalar(backend)
    with pytest.raises(gf.WindowError, match="where the window is committed"), opt.window() as window:
        window.backward(model.loss_mean([1.0]), weight=1)
        model.loss_mean([7.0]).backward()
    assert model.value == 0.0 and model.p.grad is None


@pytest.mark.parametrize("what", ["cleared", "stray", "window", "no zero_grad"])
def test_W4_in_boundary_mode_declared_weights_and_grad_do_not_drift_apart(backend, what):
    model, opt = scalar(backend)
    opt.backward(model.loss_mean([3.0]), weight=3)
    if what == "cleared":
        model.zero_grad()
    elif what == "stray":
        model.loss_mean([100.0]).backward()
    elif what == "window":
        with pytest.raises(gf.WindowError), opt.window():
            pass
        opt.backward(model.loss_mean([5.0]), weight=1)
        opt.step()
        assert model.value == -5.0
        return
    else:
        opt.step()
        assert model.value == -3.0
    with pytest.raises(gf.WindowError, match="written or cleared by somebody else"):
        opt.backward(model.loss_mean([5.0]), weight=1)
    opt.backward(model.loss_mean([5.0]), weight=1)
    opt.step()
    assert model.value == (-8.0 if what == "no zero_grad" else -5.0)


def test_boundary_step_takes_what_opt_backward_said(backend):
    model, opt = scalar(backend)
    opt.backward(model.loss_mean([3.0]), weight=3, tokens=3)
    with pytest.raises(ValueError, match="were for opt.backward"):
        opt.step(tokens=3)
    assert opt.flush() is opt.last_result and model.value == -3.0 and opt.last_result.tokens == 3


def test_N3_boundary_mode_selects_with_a_tensor_weight(backend):
    model, opt = scalar(backend)
    for tokens, weight in (([1.0, 1.0, 1.0], 3.0), ([float("nan")], 0.0), ([5.0], 1.0)):
        opt.backward(model.loss_mean(tokens), weight=torch.tensor(weight))
    opt.step()
    assert model.value == -2.0


def test_N3_a_loss_without_a_graph_may_weigh_nothing(backend):
    model, opt = scalar(backend)
    with opt.window() as window:
        window.backward(torch.zeros(()), weight=0, reduction="sum")
        window.backward(model.loss_sum([5.0]), weight=1, reduction="sum")
    assert model.value == -5.0


@pytest.mark.parametrize("mode", ["window", "boundary"])
def test_a_backward_under_no_grad(backend, mode):
    model, opt = scalar(backend)
    loss = model.loss_mean([3.0])
    with torch.no_grad():
        if mode == "window":
            with opt.window() as window:
                window.backward(loss, weight=3)
        else:
            opt.backward(loss, weight=3)
            opt.step()
    assert model.value == -3.0


def test_P1_a_window_made_early_starts_when_it_is_entered(backend):
    used, unused = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    inner = torch.optim.AdamW([used, unused], lr=0.1, weight_decay=0.5)
    opt = gf.GradAccumOptimizer(inner, backend=backend)
    window = opt.window()
    (used + unused).sum().backward()
    opt.step()
    opt.zero_grad()
    before = unused.item()
    with window:
        window.backward((used * 2).sum(), weight=1)
    assert unused.item() == before


def test_P8_a_frozen_parameters_leftover_grad_is_nobodys(backend):
    kept, frozen = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    opt = gf.GradAccumOptimizer(torch.optim.SGD([kept, frozen], lr=1.0), backend=backend)
    frozen.grad = torch.ones(1)
    frozen.requires_grad_(False)
    opt.step()  # nothing to do: no active parameter has a gradient
    assert opt.last_result is None
    with opt.window() as window:
        window.backward((kept * 2).sum(), weight=1)
    assert kept.item() == -2.0 and frozen.item() == 0.0


# -- low-precision parameters that others write ---------------------------------------------------------------------


def low_precision(backend, inner=torch.optim.SGD):
    param, other = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16)), nn.Parameter(torch.zeros(1))
    opt = gf.GradAccumOptimizer(inner([param, other], lr=0.5), backend=backend)

    def step(opt=opt, param=param):
        with opt.window() as window:
            window.backward(param.sum(), weight=1)

    step()
    return param, other, opt, step


@pytest.mark.parametrize("inner", [torch.optim.SGD, torch.optim.Adagrad], ids=["fused", "published"])
@pytest.mark.parametrize("how", ["plain", "other-frozen", "frozen-meanwhile", "one-element"])
def test_P12_what_others_write_is_kept(backend, inner, how):
    param, other, opt, step = low_precision(backend, inner)
    if how == "frozen-meanwhile":
        param.requires_grad_(False)
        with opt.window() as window:
            window.backward(other.sum(), weight=1)
    with torch.no_grad():
        if how == "one-element":
            param[2] = 64.0
        else:
            param.fill_(64.0)
    param.requires_grad_(True)
    other.requires_grad_(how != "other-frozen")
    step()
    assert 63.0 <= float(param[2].detach()) < 64.0
    if how == "one-element" and inner is torch.optim.SGD:
        assert param.tolist() == [-1.0, -1.0, 63.5, -1.0]


def test_P12_after_a_copy_and_after_a_load(backend):
    param, _, opt, step = low_precision(backend)
    copied_opt = copy.deepcopy(opt)
    copied = copied_opt.param_groups[0]["params"][0]
    fresh = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    loaded_opt = gf.GradAccumOptimizer(torch.optim.SGD([fresh, nn.Parameter(torch.zeros(1))], lr=0.5), backend=backend)
    loaded_opt.load_state_dict(opt.state_dict())
    for other_opt, other in ((copied_opt, copied), (loaded_opt, fresh)):
        with torch.no_grad():
            other.fill_(64.0)
        step(other_opt, other)
        assert other.tolist() == [63.5] * 4


def test_P12_a_model_cast_to_float_and_back(backend):
    model = nn.Linear(2, 1, bias=False).bfloat16()
    opt = gf.GradAccumOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), backend=backend)

    def step():
        with opt.window() as window:
            window.backward(model.weight.sum(), weight=1)

    with torch.no_grad():
        model.weight.zero_()
    step()
    model.float()
    for _ in range(9):
        step()
    model.bfloat16()
    step()
    assert model.weight.tolist() == [[-11.0, -11.0]]


# -- state and options that others edit --------------------------------------------------------------------------------


EDITS = {
    "clear": lambda opt, param: opt.state.clear(),
    "delete": lambda opt, param: opt.state.pop(param),
    "exp_avg": lambda opt, param: opt.state[param].__setitem__("exp_avg", torch.zeros(1)),
    "step": lambda opt, param: opt.state[param].__setitem__("step", torch.tensor(0.0)),
    "in-place": lambda opt, param: opt.state[param]["exp_avg_sq"].fill_(9.0),
}


@pytest.mark.parametrize("edit", EDITS)
def test_state_edited_by_others_is_the_state(backend, edit):
    params = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    ours = gf.GradAccumOptimizer(torch.optim.AdamW(params[:1], lr=0.1, betas=(0.9, 0.9)), backend=backend)
    whole = torch.optim.AdamW(params[1:], lr=0.1, betas=(0.9, 0.9))
    for step in range(6):
        if step == 3:
            for opt, param in zip((ours, whole), params, strict=True):
                EDITS[edit](opt, param)
        for param in params:
            param.grad = torch.full((1,), 5.0 if step < 3 else -1.0)
        ours.step()
        whole.step()
    torch.testing.assert_close(params[0], params[1])
    assert len(ours.state_dict()["state"]) == 1


def test_loaded_options_choose_the_rule(backend):
    """AdamW's dict loaded into Adam decouples the decay; an amsgrad dict runs torch's own step."""
    for source, target in (
        (lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5), lambda p: torch.optim.Adam(p, lr=0.2)),
        (lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True), lambda p: torch.optim.AdamW(p, lr=0.2)),
    ):
        models = [mlp() for _ in range(3)]
        saved = source(models[0].parameters())
        for step in range(2):
            whole_step(saved, models[0], step)
        ours = gf.GradAccumOptimizer(target(models[1].parameters()), backend=backend)
        plain = target(models[2].parameters())
        for optimizer, model in ((ours, models[1]), (plain, models[2])):
            model.load_state_dict(models[0].state_dict())
            optimizer.load_state_dict(copy.deepcopy(saved.state_dict()))
        for step in range(2, 5):
            window_step(ours, models[1], step)
            whole_step(plain, models[2], step)
        for mine, theirs in zip(models[1].parameters(), models[2].parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, **TRAJECTORY)


def test_state_of_another_shape_is_refused_before_anything_is_loaded(backend):
    param = nn.Parameter(torch.ones(3))
    opt = gf.GradAccumOptimizer(torch.optim.AdamW([param], lr=0.1), backend=backend)
    saved = copy.deepcopy(opt.state_dict())
    saved["state"][0]["exp_avg"] = torch.ones(5)
    saved["param_groups"][0]["lr"] = 9.0
    with pytest.raises(ValueError, match=r"state\[0\]\['exp_avg'\] must have shape \[3\], got \[5\]"):
        opt.load_state_dict(saved)
    assert opt.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("first", ["optimizer", "scheduler"])
def test_P10_copies_keep_their_attached_scheduler(backend, first):
    model, opt = scalar(backend)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.5)
    opt.attach(scheduler=scheduler)
    both = (model, opt, scheduler) if first == "optimizer" else (model, scheduler, opt)
    for copied in (copy.deepcopy(both), pickle.loads(pickle.dumps(both))):
        twin, other, other_scheduler = copied if first == "optimizer" else (copied[0], copied[2], copied[1])
        assert other_scheduler.optimizer is other and type(other_scheduler).__name__ == "StepLR"
        for _ in range(2):
            with other.window() as window:
                window.backward(twin.loss_mean([1.0]), weight=1)
            other_scheduler.step()
        assert other_scheduler.last_epoch == 2 and other.param_groups[0]["lr"] == 0.25
    assert scheduler.last_epoch == 0 and opt.param_groups[0]["lr"] == 1.0


def test_attach_refuses_a_scheduler_of_another_optimizer(backend):
    _, opt = scalar(backend)
    _, other = scalar(backend)
    with pytest.raises(ValueError, match="schedules another optimizer"):
        opt.attach(scheduler=torch.optim.lr_scheduler.ConstantLR(other))
    with pytest.raises(TypeError, match="must be a torch.optim.lr_scheduler scheduler, got SGD"):
        opt.attach(scheduler=opt.inner)


def test_a_hook_that_raises_does_not_hold_the_scheduler_back(backend):
    model, opt = scalar(backend)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: 0.5**n)
    opt.attach(scheduler=scheduler)

    def refuse(*_):
        raise KeyError("hook")

    opt.register_step_post_hook(refuse)
    with pytest.raises(KeyError), opt.window() as window:
        window.backward(model.loss_mean([1.0]), weight=1)
    assert model.value == -1.0 and scheduler.last_epoch == 1


# -- the published path ---------------------------------------------------------------------------------------------


class Keeps(torch.optim.Optimizer):
    """Momentum by keeping the gradient tensor itself; fails on the second parameter when told to."""

    fails = False

    def __init__(self, params, lr=1.0):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for number, param in enumerate(group["params"]):
                if param.grad is None:
                    continue
                if self.fails and number == 1:
                    raise RuntimeError("planted")
                state = self.state[param]
                if len(state) == 0:
                    state["previous"] = torch.zeros_like(param)
                param.sub_(param.grad + state["previous"], alpha=group["lr"])
                state["previous"] = param.grad


def test_a_published_gradient_may_be_kept(backend):
    param = nn.Parameter(torch.zeros(1))
    opt = gf.GradAccumOptimizer(Keeps([param]), backend=backend)
    seen = []
    for value in (1.0, 10.0, 100.0):
        with opt.window() as window:
            window.backward((param * value).sum(), weight=1)
        seen.append(param.item())
    assert seen == [-1.0, -12.0, -122.0]


def test_a_published_step_that_raises_leaves_param_and_main_param_agreed(backend):
    params = [nn.Parameter(torch.zeros(1, dtype=torch.bfloat16)) for _ in range(2)]
    inner = Keeps(params)
    opt = gf.GradAccumOptimizer(inner, backend=backend)
    inner.fails = True
    with pytest.raises(RuntimeError, match="planted"), opt.window() as window:
        window.backward(sum(param.sum() for param in params), weight=1)
    assert params[0].item() == -1.0 and params[1].item() == 0.0  # what the inner step did, as in torch
    inner.fails = False
    with opt.window() as window:
        window.backward(params[0].sum(), weight=1)
    assert params[0].item() == -3.0 and params[1].item() == 0.0


@pytest.mark.parametrize("mode", ["boundary", "counting"])
@pytest.mark.parametrize("inner", [torch.optim.RMSprop, torch.optim.AdamW], ids=["published", "fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_checkpoint_probe_neither_counts_nor_fires(backend, inner, mode, dtype):
    """torch.distributed.checkpoint steps an optimizer without state, at lr 0 and on zero gradients, to make it."""
    model = mlp(dtype=dtype)
    options = {"accumulation_steps": 2, "weighting": "equal"} if mode == "counting" else {}
    opt = gf.GradAccumOptimizer(inner(model.parameters(), lr=0.1), backend=backend, **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: 0.5**n)
    opt.attach(scheduler=scheduler)
    fired = []
    opt.register_step_post_hook(lambda *_: fired.append(1))
    before = [param.detach().clone() for param in model.parameters()]
    state = get_optimizer_state_dict(model, opt)
    assert len(state["state"]) == 6
    assert scheduler.last_epoch == 0 and not fired and opt.last_result is None
    assert_unmoved(before, [param.detach() for param in model.parameters()])
    x, y = batch(0, dtype=dtype)
    for _ in range(2 if mode == "counting" else 1):
        errors(model, x, y).mean().backward()
        opt.step()
    assert fired == [1] and scheduler.last_epoch == 1


@pytest.mark.parametrize(
    "inner, why", [(torch.optim.LBFGS, "through a closure"), (torch.optim.SparseAdam, "sparse gradients")]
)
def test_optimizers_that_cannot_step_on_a_gradient_are_refused(inner, why):
    with pytest.raises(TypeError, match=f"{inner.__name__} cannot step on an accumulated gradient: it .*{why}"):
        gf.GradAccumOptimizer(inner([nn.Parameter(torch.ones(1))]))


# -- odds and ends --------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_listed_twice_is_refused(backend):
    param = nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match="parameter 1 is parameter 0 again"):
        gf.GradAccumOptimizer(torch.optim.SGD([param, param], lr=1.0), backend=backend)


def test_groups_may_hold_tuples(backend):
    model, opt = scalar(backend)
    opt.param_groups[0]["params"] = tuple(opt.param_groups[0]["params"])
    with opt.window() as window:
        window.backward(model.loss_mean([1.0]), weight=1)
    assert model.value == -1.0


def test_numbers_may_be_numpys_and_inf_only_measures(backend):
    model, opt = scalar(backend, accumulation_steps=numpy.int64(2), weighting="given", max_grad_norm=numpy.float32(0.5))
    for _ in range(2):
        model.loss_mean([2.0]).backward()
        opt.step(weight=numpy.int32(3))
    torch.testing.assert_close(model.value, -0.5, rtol=1e-6, atol=0)
    model, opt = scalar(backend, max_grad_norm=float("inf"))
    with opt.window() as window:
        window.backward(model.loss_mean([2.0]), weight=1)
    assert model.value == -2.0 and float(opt.last_result.total_norm) == 2.0


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf"), 1e39])
def test_tensor_weights_on_the_host_are_checked(backend, weight):
    model, opt = scalar(backend)
    with pytest.raises(gf.DenominatorError, match="must be a finite number >= 0"), opt.window() as window:
        window.backward(model.loss_mean([1.0]), weight=torch.tensor(weight, dtype=torch.float64))
    assert model.value == 0.0


def test_weights_too_small_for_fp32_skip_the_step(backend):
    model, opt = scalar(backend)
    with opt.window() as window:
        window.backward(model.loss_sum([1.0]), weight=1e-46, reduction="sum")
    assert model.value == 0.0 and opt.last_result.skipped


def test_on_nonfinite_raise_names_what_overflowed_in_the_sum(backend):
    params = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    opt = gf.GradAccumOptimizer(torch.optim.SGD(params, lr=1.0), on_nonfinite="raise", defer=4, backend=backend)
    with pytest.raises(gf.NonFiniteError, match=r"in 1 parameter\(s\): 1\."), opt.window() as window:
        for _ in range(3):
            window.backward((params[0] * 1.0).sum() + (params[1] * 2e38).sum(), weight=1)


def test_an_optimizer_without_an_lr(backend, recwarn):
    class Plain(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure=None):
            for param in self.param_groups[0]["params"]:
                param.sub_(param.grad)

    param = nn.Parameter(torch.zeros(1))
    opt = gf.GradAccumOptimizer(Plain([param]), backend=backend)
    with opt.window() as window:
        window.backward(param.sum(), weight=1)
    assert param.item() == -1.0 and not [w for w in recwarn if "lr of group" in str(w.message)]


def test_steps_in_inference_mode_leave_usable_state(backend):
    param = nn.Parameter(torch.zeros(3))
    opt = gf.GradAccumOptimizer(torch.optim.AdamW([param], lr=0.1), backend=backend)
    param.grad = torch.ones(3)
    with torch.inference_mode():
        opt.step()
    opt.step()
    assert float(opt.state[param]["step"]) == 2.0


def test_an_instruction_set_this_machine_has_not_is_a_reason(monkeypatch):
    from test_build import python

    done = python("import gradacc_fused as gf; print(gf.backends()['cpu'])", GRADACC_FUSED_ISA="sse9")
    assert done.returncode == 0, done.stderr
    assert "cpu: not available" in done.stdout
