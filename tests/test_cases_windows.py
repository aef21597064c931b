"""CASES W: what a window holds, when it steps, and that it is applied whole or not at all."""

from __future__ import annotations

import pytest
import torch
from models import assert_unmoved, batch, errors, mlp, scalar, snapshot, window_step

import gradacc_fused as gf


def counted(backend, gradients, k, flush=True, **options):
    model, opt = scalar(backend, accumulation_steps=k, weighting="equal", **options)
    for gradient in gradients:
        model.loss_mean([gradient]).backward()
        opt.step()
    if flush:
        opt.flush()
    return model, opt


def test_W1_a_partial_last_window_is_normalised_by_what_was_seen(backend):
    model, _ = counted(backend, [1, 1, 1, 1, 1], k=2)
    assert model.value == -3.0


def test_W2_windows_of_two_epochs(backend):
    model, opt = scalar(backend, accumulation_steps=2, weighting="equal")
    sizes = []
    opt.register_step_post_hook(lambda *_: sizes.append(opt.last_result.micro_batches))
    for _ in range(2):
        for _ in range(5):
            model.loss_mean([1.0]).backward()
            opt.step()
        opt.flush()
    assert sizes == [2, 2, 1, 2, 2, 1]
    assert opt.flush() is None  # nothing left


def test_W3_fewer_micro_batches_than_steps(backend):
    model, opt = counted(backend, [1, 1, 4], k=4, flush=False)
    assert model.value == 0.0
    result = opt.flush()
    assert model.value == -2.0 and result is opt.last_result and result.micro_batches == 3


@pytest.mark.parametrize("set_to_none", [True, False])
def test_W4_evaluation_and_zero_grad_in_mid_window(backend, set_to_none):
    model, opt = scalar(backend, accumulation_steps=3, weighting="equal")
    for gradient in (1.0, 2.0, 6.0):
        model.loss_mean([gradient]).backward()
        opt.step()
        model.eval()
        with torch.no_grad():
            model.loss_mean([100.0])
        model.train()
        model.zero_grad(set_to_none=set_to_none)
        opt.zero_grad()
    assert model.value == -3.0


def test_W4_a_gradient_of_somebody_elses_in_a_window_is_refused(backend):
    """A backward of an evaluation in mid-window would be added to the next micro-batch: refused, and nothing leaks."""
    model, opt = scalar(backend)
    with pytest.raises(gf.WindowError, match=r"parameter 0 has a \.grad of somebody"), opt.window() as window:
        window.backward(model.loss_mean([1.0]), weight=1)
        model.loss_mean([100.0]).backward()
        window.backward(model.loss_mean([1.0]), weight=1)
    assert model.value == 0.0 and model.p.grad is None
    model.loss_mean([100.0]).backward()
    with pytest.raises(gf.WindowError, match="zero_grad"), opt.window() as window:
        pass
    with opt.window() as window:
        window.backward(model.loss_mean([1.0]), weight=1)
    assert model.value == -1.0


class AdamWs:
    """A model in counting mode, driven micro-batch by micro-batch."""

    def __init__(self, backend, inner=torch.optim.AdamW, dtype=torch.float32, seed=0, **options) -> None:
        self.model = mlp(seed, dtype)
        options = {"accumulation_steps": 4, "weighting": "given", "max_grad_norm": 0.5, **options}
        self.opt = gf.GradAccumOptimizer(inner(self.model.parameters(), lr=0.05), backend=backend, **options)

    def micro_batch(self, number, device_weight=False):
        x, y = batch(number, dtype=next(self.model.parameters()).dtype)
        size = 2 + number % 3
        loss = errors(self.model, x[:size], y[:size]).mean()
        loss.backward()
        self.opt.step(weight=torch.tensor(float(size)) if device_weight else size, loss=loss, samples=size)

    def everything(self):
        result = self.opt.last_result
        return [*snapshot(self.opt), result.loss_mean, result.loss_sum, result.total_norm, torch.tensor(result.samples)]


@pytest.mark.parametrize("taken", [1, 2, 3])
@pytest.mark.parametrize(
    "inner", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop], ids=lambda inner: inner.__name__
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("defer", [1, "auto"])
def test_W5_an_open_window_is_saved_and_resumed_bit_for_bit(host_backend, tmp_path, inner, dtype, defer, taken):
    """Saved after some of four pieces, loaded elsewhere, the rest runs there: as if nothing had been interrupted."""
    whole = AdamWs(host_backend, inner, dtype)
    for number in range(12):
        whole.micro_batch(number, device_weight=number == 5)
    first = AdamWs(host_backend, inner, dtype, defer=defer)
    for number in range(4 + taken):
        first.micro_batch(number, device_weight=number == 5)
    torch.save({"model": first.model.state_dict(), "opt": first.opt.state_dict()}, tmp_path / "checkpoint.pt")
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    second = AdamWs(host_backend, inner, dtype, seed=9)
    second.model.load_state_dict(saved["model"])
    second.opt.load_state_dict(saved["opt"])
    for resumed in (first, second):  # saving has changed nothing
        for number in range(4 + taken, 12):
            resumed.micro_batch(number, device_weight=number == 5)
        assert_unmoved(whole.everything(), resumed.everything())
        assert "window" not in resumed.opt.state_dict()["param_groups"][0]


def test_W5_a_parameter_without_a_gradient_so_far_is_none_when_resumed(backend):
    """P1 and W5: the unused one does not decay."""
    made = [torch.optim.AdamW([torch.nn.Parameter(torch.ones(2)) for _ in range(2)], lr=0.1) for _ in range(2)]
    one, two = (gf.GradAccumOptimizer(o, accumulation_steps=2, weighting="equal", backend=backend) for o in made)
    one.param_groups[0]["params"][0].sum().backward()
    one.step()
    two.load_state_dict(one.state_dict())
    two.param_groups[0]["params"][0].sum().backward()
    two.step()
    used, unused = two.param_groups[0]["params"]
    assert torch.equal(unused, torch.ones(2)) and not torch.equal(used, torch.ones(2))


def test_W5_what_cannot_go_on_is_refused(backend):
    trained = AdamWs(backend)
    for number in range(3):
        trained.micro_batch(number)
    saved = trained.opt.state_dict()
    model = mlp()
    boundary = gf.GradAccumOptimizer(torch.optim.AdamW(model.parameters()), backend=backend)
    with pytest.raises(ValueError, match=r"holds an open window of 3 micro-batch.*does not count.*accumulation_steps"):
        boundary.load_state_dict(saved)
    with pytest.raises(ValueError, match="open window of 3 micro-batches, and accumulation_steps is 2"):
        AdamWs(backend, accumulation_steps=2).opt.load_state_dict(saved)
    with pytest.raises(ValueError, match="open window with weighting='given', and this optimizer has 'equal'"):
        AdamWs(backend, weighting="equal").opt.load_state_dict(saved)
    wrong = {**saved, "state": {**saved["state"], 0: {**saved["state"][0], "window_sum": torch.zeros(3)}}}
    other = AdamWs(backend)
    with pytest.raises(ValueError, match=r"state\[0\]\['window_sum'\] must have shape"):
        other.opt.load_state_dict(wrong)
    assert other.opt.flush() is None
    torch.optim.AdamW(mlp().parameters()).load_state_dict(saved)  # plain torch uses neither sums nor scalars
    trained.opt.backward(errors(trained.model, *batch(3)).mean(), weight=12)
    with pytest.raises(gf.WindowError, match=r"state_dict: micro-batch 3 was not taken by step\(\) yet"):
        trained.opt.state_dict()
    with pytest.raises(gf.WindowError, match="state_dict: a window with 1"), boundary.window() as window:
        window.backward(errors(model, *batch(0)).mean())
        boundary.state_dict()


@pytest.mark.parametrize("position", range(4))
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_W6_a_non_finite_micro_batch_skips_one_step(backend, position, value):
    model, opt = scalar(backend, accumulation_steps=4, weighting="equal")
    gradients = [1.0] * 4
    gradients[position] = value
    for gradient in gradients:
        model.loss_mean([gradient]).backward()
        opt.step()
    assert model.value == 0.0 and opt.last_result.skipped and float(opt.last_result.found_inf) == 1.0
    for _ in range(4):
        model.loss_mean([1.0]).backward()
        opt.step()
    assert model.value == -1.0 and not opt.last_result.skipped


def test_W7_two_wrappers_in_one_loop(backend):
    (one, first), (two, second) = (
        scalar(backend, accumulation_steps=k, weighting="equal") for k in (2, 3)
    )  # fmt: skip
    steps = {"first": 0, "second": 0}
    first.register_step_post_hook(lambda *_: steps.__setitem__("first", steps["first"] + 1))
    second.register_step_post_hook(lambda *_: steps.__setitem__("second", steps["second"] + 1))
    for _ in range(6):
        (one.loss_mean([1.0]) + two.loss_mean([1.0])).backward()
        first.step()
        second.step()
    assert steps == {"first": 3, "second": 2}
    assert one.value == -3.0 and two.value == -2.0


class FailAt(torch.autograd.Function):
    """Identity whose backward raises when told to."""

    armed = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if FailAt.armed:
            raise RuntimeError("planted failure")
        return grad


class Fragile(torch.nn.Module):
    """Fails in the middle: the later layers have their gradients when it raises."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x):
        return self.layers[2:](FailAt.apply(self.layers[:2](x)))


@pytest.fixture
def fragile():
    model = Fragile()
    yield model
    FailAt.armed = False


def adamw(model, backend, **options):
    opt = gf.GradAccumOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), backend=backend, **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: 0.5**n)
    opt.attach(scheduler=scheduler)
    return opt, scheduler


def train_window(opt, model, fail_at=None, step=0):
    x, y = batch(step)
    with opt.window() as window:
        for j in range(4):
            FailAt.armed = j == fail_at
            window.backward(errors(model, x[3 * j : 3 * j + 3], y[3 * j : 3 * j + 3]).mean(), weight=3)


@pytest.mark.parametrize("fail_at", range(4))
def test_W8_a_backward_that_raises_in_a_window_moves_nothing(backend, fragile, fail_at):
    opt, scheduler = adamw(fragile, backend)
    train_window(opt, fragile)
    before, epoch, result = snapshot(opt), scheduler.last_epoch, opt.last_result
    with pytest.raises(RuntimeError, match="planted failure"):
        train_window(opt, fragile, fail_at)
    assert_unmoved(before, snapshot(opt))
    assert scheduler.last_epoch == epoch == 1 and opt.param_groups[0]["lr"] == 0.05
    assert opt.last_result is result
    assert all(param.grad is None for param in fragile.parameters())
    # the next window starts at zero: equal to a run in which the failed one never was
    twin = Fragile()
    twin_opt, _ = adamw(twin, backend)
    train_window(twin_opt, twin)
    FailAt.armed = False
    for model, optimizer in ((fragile, opt), (twin, twin_opt)):
        train_window(optimizer, model, step=1)
    assert_unmoved(snapshot(opt), snapshot(twin_opt))


def test_W8_a_failure_swallowed_inside_the_block_cannot_be_committed(backend, fragile):
    opt, _ = adamw(fragile, backend)
    before = snapshot(opt)
    x, y = batch(0)
    with pytest.raises(gf.WindowError, match="discarded.*micro-batch 1 raised RuntimeError"), opt.window() as window:
        window.backward(errors(fragile, x, y).mean(), weight=12)
        FailAt.armed = True
        with pytest.raises(RuntimeError, match="planted"):
            window.backward(errors(fragile, x, y).mean(), weight=12)
        FailAt.armed = False
    assert_unmoved(before, snapshot(opt))


@pytest.mark.parametrize("fail_at", range(4))
@pytest.mark.parametrize("guarded", [True, False], ids=["opt.backward", "loss.backward"])
def test_W8_in_counting_mode_a_swallowed_failure_is_noticed(backend, fragile, fail_at, guarded):
    opt, scheduler = adamw(fragile, backend, accumulation_steps=4, weighting="equal")
    before = snapshot(opt)
    x, y = batch(0)
    for j in range(fail_at + 1):
        FailAt.armed = j == fail_at
        loss = errors(fragile, x[3 * j : 3 * j + 3], y[3 * j : 3 * j + 3]).mean()
        try:
            opt.backward(loss) if guarded else loss.backward()
        except RuntimeError:
            break
        opt.step()
    FailAt.armed = False
    if not guarded:
        with pytest.raises(gf.WindowError, match=f"backward of micro-batch {fail_at} began and did not finish"):
            opt.step()
    assert_unmoved(before, snapshot(opt))
    assert scheduler.last_epoch == 0
    assert all(param.grad is None for param in fragile.parameters())
    twin = Fragile()
    twin_opt, _ = adamw(twin, backend, accumulation_steps=4, weighting="equal")
    for model, optimizer in ((fragile, opt), (twin, twin_opt)):
        for j in range(4):
            errors(model, x[3 * j : 3 * j + 3], y[3 * j : 3 * j + 3]).mean().backward()
            optimizer.step()
    assert_unmoved(snapshot(opt), snapshot(twin_opt))


def test_W8_in_boundary_mode_opt_backward_clears_what_was_half_written(backend, fragile):
    opt, _ = adamw(fragile, backend)
    before = snapshot(opt)
    x, y = batch(0)
    opt.backward(errors(fragile, x, y).mean(), weight=12)
    FailAt.armed = True
    with pytest.raises(RuntimeError, match="planted failure"):
        opt.backward(errors(fragile, x, y).mean(), weight=12)
    with pytest.raises(gf.WindowError, match="not complete: backward of micro-batch 1 raised RuntimeError"):
        opt.step()
    assert_unmoved(before, snapshot(opt))
    with pytest.raises(RuntimeError, match="planted failure"):
        opt.backward(errors(fragile, x, y).mean(), weight=12)
    FailAt.armed = False  # the micro-batch after a failed one is refused as well
    with pytest.raises(gf.WindowError, match="not complete"):
        opt.backward(errors(fragile, x, y).mean(), weight=12)
    opt.zero_grad()
    opt.backward(errors(fragile, x, y).mean(), weight=12)
    opt.step()
    assert opt.last_result.micro_batches == 1


def test_an_exception_of_the_callers_discards(backend):
    model, opt = scalar(backend)
    with pytest.raises(KeyError), opt.window() as window:
        window.backward(model.loss_mean([1.0]), weight=1)
        raise KeyError("data loader")
    assert model.value == 0.0 and window.status == "discarded"
    with pytest.raises(gf.WindowError, match="KeyError was raised"):
        window.backward(model.loss_mean([1.0]), weight=1)


def test_discard_drops_the_window(backend):
    model, opt = scalar(backend, accumulation_steps=2, weighting="equal")
    model.loss_mean([9.0]).backward()
    opt.step()
    model.loss_mean([9.0]).backward()
    opt.discard()
    assert model.p.grad is None
    for _ in range(2):
        model.loss_mean([1.0]).backward()
        opt.step()
    assert model.value == -1.0


def test_windows_do_not_nest_and_are_used_once(backend):
    model, opt = scalar(backend)
    with opt.window() as window:
        with pytest.raises(gf.WindowError, match="do not nest"), opt.window():
            pass
        window.backward(model.loss_mean([1.0]), weight=1)
        with pytest.raises(gf.WindowError, match="block is open"):
            opt.step()
        with pytest.raises(gf.WindowError, match="window with 1 micro-batch"):
            opt.state_dict()
    assert model.value == -1.0
    with pytest.raises(gf.WindowError, match="used once"), window:
        pass
    with pytest.raises(gf.WindowError, match="committed"):
        window.backward(model.loss_mean([1.0]), weight=1)
    with pytest.raises(gf.WindowError, match="with block"):
        opt.window().backward(model.loss_mean([1.0]), weight=1)


def test_an_empty_window_makes_no_step_and_says_so(backend):
    model, opt = scalar(backend)
    with pytest.warns(UserWarning, match="without a micro-batch"), opt.window():
        pass
    assert model.value == 0.0 and opt.last_result is None


def test_a_step_without_a_gradient_is_refused_in_counting_mode(backend):
    model, opt = scalar(backend, accumulation_steps=2, weighting="equal")
    with pytest.raises(gf.WindowError, match="micro-batch 0 has no gradient"):
        opt.step()
    for _ in range(2):
        model.loss_mean([1.0]).backward()
        opt.step()
    assert model.value == -1.0


@pytest.mark.parametrize("loss", [torch.ones(3, requires_grad=True), 1.0, None], ids=["vector", "float", "none"])
def test_a_loss_that_is_no_scalar_is_refused(backend, loss):
    model, opt = scalar(backend)
    with pytest.raises(ValueError, match="loss must be a tensor with one element"), opt.window() as window:
        window.backward(loss, weight=1)
    assert model.value == 0.0


def test_gradients_that_somebody_else_can_write_are_not_held(backend):
    """A static buffer assigned as .grad and overwritten for the next micro-batch: each is taken at its own value."""
    model, opt = scalar(backend)
    static = torch.zeros(1)

    class Static(torch.autograd.Function):
        @staticmethod
        def forward(ctx, p, value):
            ctx.value = value
            return p.sum()

        @staticmethod
        def backward(ctx, grad):
            static.fill_(ctx.value)
            return static, None

    for defer in (1, 4):
        opt = gf.GradAccumOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), backend=backend, defer=defer)
        with torch.no_grad():
            model.p.zero_()
        with opt.window() as window:
            for value in (1.0, 2.0, 6.0):
                window.backward(Static.apply(model.p, value), weight=1)
                static.fill_(99.0)
        assert model.value == -3.0


@pytest.mark.compiled
@pytest.mark.parametrize("kept", [False, True], ids=["dropped", "kept"])
def test_a_gradient_that_python_looked_at_is_held_unless_python_keeps_it(kept):
    """Logging reads p.grad: that is no reason to flush early. A reference that is kept is one."""
    model = mlp()
    opt = gf.GradAccumOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), accumulation_steps=2, weighting="equal", defer=2
    )
    for step in range(2):
        x, y = batch(step)
        errors(model, x, y).mean().backward()
        seen = [param.grad for param in model.parameters()]
        assert all(torch.isfinite(grad).all() for grad in seen)
        if not kept:
            del seen
        opt.step()
    assert (opt._engine._main_grads is not None) == kept


def test_W9_calls_and_a_zero_weight_call_make_the_same_gradient(backend):
    """One call, two calls, two and a third of weight 0: nothing is erased."""
    changes = []
    for calls in ([(0, 12)], [(0, 5), (5, 12)], [(0, 5), (5, 12), (0, 0)]):
        model = mlp()
        opt = gf.GradAccumOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), backend=backend)
        window_step(opt, model, 0, splits=calls)
        changes.append([a.detach() - b.detach() for a, b in zip(model.parameters(), mlp().parameters(), strict=True)])
    once, twice, third = changes
    for a, b, c in zip(once, twice, third, strict=True):
        assert torch.equal(b, c)
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_W10_one_piece_of_eight_against_two_of_four(backend):
    """Within 1e-6 of each other (another order of sums), and the same bits when run again."""
    found = []
    for pieces in (1, 1, 2, 2):
        model = mlp()
        opt = gf.GradAccumOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), backend=backend)
        planned = gf.plan_batch([1] * 8, limits=gf.Limits(max_samples=8 // pieces))
        x, y = batch(1, 8)
        with opt.window(planned, terms="samples") as window:
            for piece in planned.pieces:
                rows = list(piece.samples)
                window.backward(errors(model, x[rows], y[rows]).sum(), piece=piece)
        found.append([a.detach() - b.detach() for a, b in zip(model.parameters(), mlp().parameters(), strict=True)])
    assert_unmoved(found[0], found[1])
    assert_unmoved(found[2], found[3])
    gap = sum(float((a - b).double().square().sum()) for a, b in zip(found[0], found[2], strict=True))
    norm = sum(float(a.double().square().sum()) for a in found[0])
    assert gap**0.5 < 1e-6 * norm**0.5
