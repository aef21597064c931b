"""The registered ops: opcheck, torch.compile, no host sync, errors by text on every backend."""

from __future__ import annotations

import math

import pytest
import torch
from cases import F32, F64, Case, Entry, sizes
from models import batch, errors, mlp
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import gradacc_fused as gf
from gradacc_fused import _ops

CASE = Case("ops", (Entry((33,), torch.bfloat16), Entry((5, 7)), Entry((70000,)), Entry((3,), F64)), (2.0, 0.5))


def accumulate_arguments():
    main_grads = CASE.main_grads()
    args = (
        main_grads, CASE.grads(), torch.tensor(CASE.weights, dtype=F64),
        torch.zeros(gf.n_partials(main_grads), dtype=F64), torch.zeros(()),
    )  # fmt: skip
    return args, {"overwrite": False, "store": True, "norm_type": 2.0}


def norm_arguments():
    main_grads = CASE.main_grads()
    return (main_grads, torch.zeros(gf.n_partials(main_grads), dtype=F64), torch.zeros(())), {"norm_type": math.inf}


def clip_arguments():
    one = torch.ones(3, dtype=F64)
    cells = [torch.zeros(()), torch.zeros(()), torch.zeros((), dtype=F64), torch.zeros((), dtype=F64)]
    return (one, one.clone(), torch.ones(1), *cells), {"norm_type": 2.0, "max_norm": 0.5}


def update_arguments(rule="adamw"):
    params = [entry.empty().fill_(0.5) for entry in CASE.entries]
    maths = [entry.empty(entry.math).zero_() for entry in CASE.entries]
    args = (
        params,
        [param.float() if param.dtype == torch.bfloat16 else torch.empty(0) for param in params],
        [tensor.clone() for tensor in maths],
        [tensor.clone() for tensor in maths] if rule in ("adamw", "adam") else [],
        torch.zeros(len(params)), CASE.main_grads(), CASE.grads(), torch.tensor(CASE.weights, dtype=F64),
        gf.hyper_rows([{"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "momentum": 0.9}]),
        torch.zeros(len(params), dtype=torch.int32), torch.ones(len(params), dtype=torch.uint8),
        torch.full((), 0.5, dtype=F64), torch.zeros(()),
    )  # fmt: skip
    return args, {"rule": rule, "max_grad_value": math.inf}


OPS = {
    "accumulate_": accumulate_arguments,
    "norm_": norm_arguments,
    "clip_": clip_arguments,
    "update_": update_arguments,
}


@pytest.mark.parametrize("name", OPS)
def test_opcheck(name):
    args, kwargs = OPS[name]()
    torch.library.opcheck(_ops.op(name), args, kwargs)


def test_opcheck_with_empty_lists():
    args, kwargs = update_arguments("sgd")
    torch.library.opcheck(_ops.op("update_"), args, kwargs)
    nothing = torch.empty(0, dtype=F64)
    grads = [torch.ones(3)]
    torch.library.opcheck(
        _ops.op("accumulate_"), ([], grads, torch.ones(1, dtype=F64), torch.zeros(1, dtype=F64), torch.zeros(())),
        {"overwrite": True, "store": False, "norm_type": 2.0},
    )  # fmt: skip
    torch.library.opcheck(
        _ops.op("accumulate_"), ([torch.ones(3)], grads, torch.ones(1, dtype=F64), nothing, torch.zeros(0)),
        {"overwrite": True, "store": True, "norm_type": 2.0},
    )  # fmt: skip


def one_window(main_grads, grads, weights, params, exp_avgs, exp_avg_sqs, steps, hyper, group_ids, touched):
    """The functional door: the three stages as a user embeds them."""
    partials = torch.empty(gf.n_partials(main_grads), dtype=F64)
    found_inf, total_norm, clip_coef = torch.empty(()), torch.empty(()), torch.empty(())
    multiplier, weight_sum = torch.empty((), dtype=F64), torch.empty((), dtype=F64)
    count = len(main_grads)
    gf.accumulate_(main_grads, grads[:count], weights[:1].clone(), overwrite=True)
    last = grads[count:]
    gf.accumulate_(main_grads, last, weights[1:].clone(), partials=partials, found_inf=found_inf, store=False)
    gf.clip_(partials, weights, torch.ones(1), total_norm, clip_coef, multiplier, weight_sum, max_norm=0.5)
    gf.update_(
        params, [], exp_avgs, exp_avg_sqs, steps, main_grads, last, weights[1:].clone(), hyper, group_ids, touched,
        multiplier, found_inf, rule="adamw",
    )  # fmt: skip
    return total_norm * 1.0


def window_arguments():
    case = Case("compiled", sizes(5, 300, 70000), (1.0, 3.0))
    zeros = [torch.zeros(entry.shape) for entry in case.entries]
    return [
        [torch.full(entry.shape, math.nan) for entry in case.entries], case.grads(),
        torch.tensor(case.weights, dtype=F64), [torch.ones(entry.shape) for entry in case.entries],
        zeros, [zero.clone() for zero in zeros], torch.zeros(3),
        gf.hyper_rows([{"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8}]), torch.zeros(3, dtype=torch.int32),
        torch.ones(3, dtype=torch.uint8),
    ]  # fmt: skip


def test_functional_stages_under_compile_fullgraph():
    eager, compiled = window_arguments(), window_arguments()
    norm = one_window(*eager)
    torch._dynamo.reset()
    again = torch.compile(one_window, fullgraph=True)(*compiled)
    assert torch.equal(norm, again)
    for mine, theirs in zip(
        eager[3] + eager[4] + eager[5] + [eager[6]],
        compiled[3] + compiled[4] + compiled[5] + [compiled[6]],
        strict=True,
    ):
        assert torch.equal(mine, theirs)
    assert not torch.equal(eager[3][0], torch.ones(5))


@pytest.mark.compiled
def test_the_functional_door_has_the_bits_of_the_optimizer():
    """Stages called by hand and the optimizer's own path: equal parameters."""
    arguments = window_arguments()
    one_window(*arguments)
    case = Case("compiled", sizes(5, 300, 70000), (1.0, 3.0))
    params = [torch.nn.Parameter(torch.ones(entry.shape)) for entry in case.entries]
    inner = torch.optim.AdamW(params, lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)
    opt = gf.GradAccumOptimizer(inner, accumulation_steps=2, weighting="given", max_grad_norm=0.5)
    grads = case.grads()
    for j, weight in enumerate(case.weights):
        for param, grad in zip(params, grads[3 * j : 3 * j + 3], strict=True):
            param.grad = grad
        opt.step(weight=weight)
    for param, other in zip(params, arguments[3], strict=True):
        assert torch.equal(param.detach(), other)


class NoSync(TorchDispatchMode):
    """Raises on every operator that reads a tensor's value on the host; counts all others."""

    FORBIDDEN = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "_to_copy")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.seen.append(name)
        if name in self.FORBIDDEN:
            raise AssertionError(f"host sync: {name}")
        return func(*args, **(kwargs or {}))


@pytest.mark.compiled
@pytest.mark.parametrize("mode", ["window", "counting", "boundary"])
def test_B5_no_host_sync_in_a_step(mode, monkeypatch):
    """Python's ways to sync raise, the dispatcher's raise under a mode, and the profiler sees none in C++."""
    model = mlp()
    options = {"accumulation_steps": 2, "weighting": "given"} if mode == "counting" else {}
    opt = gf.GradAccumOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), max_grad_norm=1.0, **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: 0.9**n)
    opt.attach(scheduler=scheduler)
    x, y = batch(0)

    def window():
        opt.zero_grad()
        if mode == "window":
            with opt.window() as open_window:
                for _ in range(2):
                    open_window.backward(errors(model, x, y).mean(), weight=torch.tensor(3), tokens=3)
            return
        for _ in range(2):
            loss = errors(model, x, y).mean()
            loss.backward()
            if mode == "counting":
                opt.step(weight=torch.tensor(3.0), loss=loss)
        if mode == "boundary":
            opt.step(loss=loss)

    window()

    def refuse(*args, **kwargs):
        raise AssertionError("host sync from Python")

    for name in ("item", "cpu", "tolist", "numpy", "__bool__", "__float__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    updates = opt.state[next(model.parameters())]["step"].clone()
    with NoSync() as watched:
        window()
    assert "addmm" in watched.seen  # the mode did watch
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        window()
    monkeypatch.undo()
    names = [event.name for event in profiler.events()]
    assert names.count("gradacc_fused::update_") == 1
    assert opt.state[next(model.parameters())]["step"] == updates + 2
    assert not [name for name in names if "_local_scalar_dense" in name or name.endswith("::item")]
    assert scheduler.last_epoch == 3


def refused(ops, name, change, error, message):
    args, kwargs = OPS[name]()
    args = list(args)
    change(args, kwargs)
    tensors = [tensor for arg in args for tensor in (arg if isinstance(arg, list) else [arg])]
    before = [tensor.clone() for tensor in tensors]
    with pytest.raises(error, match=message):
        getattr(ops, name)(*args, **kwargs)
    for old, new in zip(before, tensors, strict=True):
        torch.testing.assert_close(old, new, rtol=0, atol=0, equal_nan=True)


def put(position, value):
    return lambda args, kwargs: args.__setitem__(position, value)


def put_in(position, index, value):
    return lambda args, kwargs: args[position].__setitem__(index, value)


def say(**values):
    return lambda args, kwargs: kwargs.update(values)


REFUSALS = {
    "accumulate_": [
        (put(2, torch.ones(2)), TypeError, r"accumulate_: weights must be float64, got float32\."),
        (put(2, torch.ones(1, 2, dtype=F64)), ValueError, r"accumulate_: weights must be a contiguous 1-d tensor"),
        (put(1, []), ValueError, r"accumulate_: grads must have 8 tensors \(2 micro-batches of 4 parameters"),
        (put(0, []), ValueError, r"accumulate_: main_grads must have 4 tensors, one per parameter, got 0"),
        (put_in(0, 1, torch.ones(5, 7).bfloat16()), TypeError, r"main_grads\[1\] must be float32 or float64, got bf.*"),
        (put_in(1, 5, torch.ones(5, 6)), ValueError, r"grads\[5\] must have shape \[5, 7\], got \[5, 6\].*empty"),
        (put_in(1, 4, torch.ones(33).to(torch.int64)), TypeError, r"grads\[4\] must be float32, .*got int64"),
        (put_in(1, 5, torch.ones(5, 7).to_sparse()), ValueError, r"grads\[5\] must be dense.*to_dense"),
        (put(3, torch.zeros(1, dtype=F64)), ValueError, r"partials must be contiguous with at least 5 elements, got 1"),
        (put(3, torch.zeros(9)), TypeError, r"accumulate_: partials must be float64, got float32"),
        (put(4, torch.zeros(2)), ValueError, r"accumulate_: found_inf must have one element, got 2"),
        (put(4, torch.zeros((), dtype=torch.int32)), TypeError, r"found_inf must be float32 or float64, got int32"),
        (say(norm_type=1.0), ValueError, r"accumulate_: norm_type must be 2 or inf, got 1\."),
    ],
    "norm_": [
        (put(1, torch.zeros(0, dtype=F64)), ValueError, r"norm_: partials must have one element per chunk"),
        (put_in(0, 2, torch.ones(70000).half()), TypeError, r"norm_: main_grads\[2\] must be float32 or float64"),
        (say(norm_type=3.0), ValueError, r"norm_: norm_type must be 2 or inf, got 3\."),
    ],
    "clip_": [
        (say(max_norm=0.0), ValueError, r"clip_: max_norm must be positive \(inf: no clipping\), got 0\."),
        (put(0, torch.ones(3)), TypeError, r"clip_: partials must be float64, got float32"),
        (put(1, torch.ones(3)), TypeError, r"clip_: counts must be float64, got float32"),
        (put(2, torch.ones(2)), ValueError, r"clip_: loss_scale must have one element, got 2"),
        (put(5, torch.zeros((), dtype=torch.half)), TypeError, r"clip_: multiplier must be float32 .*, got float16"),
    ],
    "update_": [
        (say(rule="lamb"), ValueError, r"update_: rule must be adamw, adam, sgd or lion, got 'lamb'\."),
        (say(max_grad_value=0.0), ValueError, r"update_: max_grad_value must be positive"),
        (put(2, []), ValueError, r"update_: exp_avgs must have 4 tensors, one per parameter, got 0"),
        (put(4, torch.zeros(3)), ValueError, r"update_: steps must be contiguous with at least 4 elements, got 3"),
        (put(9, torch.zeros(4)), TypeError, r"update_: group_ids must be int32, got float32"),
        (put(10, torch.ones(4)), TypeError, r"update_: touched must be uint8, got float32"),
        (put(8, torch.zeros(1, 4, dtype=F64)), ValueError, r"hyper must have shape \[groups, 9\], got \[1, 4\].*"),
        (put_in(0, 1, torch.ones(5, 7, dtype=torch.int32)), TypeError, r"params\[1\] must be float32, .*got int32"),
        (put_in(2, 1, torch.ones(5, 7).bfloat16()), TypeError, r"exp_avgs\[1\] must be float32, got bf.*math dtype"),
        (put_in(3, 3, torch.ones(3)), TypeError, r"exp_avg_sqs\[3\] must be float64, got float32"),
        (put_in(1, 0, torch.ones(32)), ValueError, r"main_params\[0\] must have shape \[33\], got \[32\]"),
        (put_in(5, 0, torch.ones(33, dtype=F64)), TypeError, r"main_grads\[0\] must be float32, got float64"),
        (put(12, torch.zeros(2)), ValueError, r"update_: found_inf must have one element, got 2"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    "name, change, error, message",
    [(name, *row) for name, rows in REFUSALS.items() for row in rows],
    ids=[f"{name}{number}" for name, rows in REFUSALS.items() for number in range(len(rows))],
)
def test_bad_arguments_are_named(ops, name, change, error, message):
    refused(ops, name, change, error, message)


def test_store_without_main_grads_is_refused(ops):
    nothing = torch.empty(0, dtype=F64)
    with pytest.raises(ValueError, match="store=True needs main_grads to write to, got none"):
        ops.accumulate_(
            [], [torch.ones(2)], torch.ones(1, dtype=F64), nothing, torch.empty(0), overwrite=True, store=True,
            norm_type=2.0,
        )  # fmt: skip


def test_group_ids_outside_hyper_are_refused(ops):
    args, kwargs = update_arguments()
    args = list(args)
    args[9] = torch.tensor([0, 1, 0, 0], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"group_ids\[1\] must name a row of hyper \(1 rows\), got 1"):
        ops.update_(*args, **kwargs)


def test_reference_has_a_float64_mode():
    from gradacc_fused.backends import reference

    case = Case("float64", sizes(100), (0.1, 0.7))
    main_grads = [torch.zeros(100, dtype=F64)]
    nothing = torch.empty(0, dtype=F64)
    reference.accumulate_(
        main_grads, case.grads(), torch.tensor(case.weights, dtype=F64), nothing, nothing, overwrite=True, store=True,
        norm_type=2.0, math=F64,
    )  # fmt: skip
    exact = sum(grad.double() * weight for grad, weight in zip(case.grads(), case.weights, strict=True))
    assert torch.equal(main_grads[0], exact) and case.grads()[0].dtype == F32
