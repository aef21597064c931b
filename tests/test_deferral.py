"""Deferral: how many micro-batches are held, that they are really ours, and what memory it takes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import gradacc_fused as gf
from tests.models import batch, errors, mlp

N = 4096


def bf16(elements: int = N) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(elements, dtype=torch.bfloat16))]


def optimizer(params, **options) -> gf.GradAccumOptimizer:
    return gf.GradAccumOptimizer(torch.optim.AdamW(params, lr=0.1), **options)


def run_window(opt, params, k):
    with opt.window() as window:
        for j in range(k):
            window.backward(params[0].float().sum() * (j + 1), weight=1)


def run_counting(opt, params, k):
    for j in range(k):
        (params[0].float().sum() * (j + 1)).backward()
        opt.step()


def passes(run) -> int:
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        run()
    return sum(event.name == "gradacc_fused::accumulate_" for event in profiler.events())


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("options", "k", "expected"),
    [
        ({"defer": 1}, 8, 8),
        ({"defer": 4}, 8, 2),
        ({"defer": 8}, 8, 1),
        ({}, 8, 3),  # the budget is the main grads' 4 bytes per element: two bf16 micro-batches beside the one in hand
        ({"defer_bytes": 0}, 8, 8),
        ({"defer_bytes": 2 * N - 1}, 8, 8),
        ({"defer_bytes": 2 * N}, 8, 4),
        ({"defer_bytes": 6 * N}, 8, 2),
    ],
)
def test_as_many_are_held_as_the_budget_allows(options, k, expected):
    params = bf16()
    opt = optimizer(params, **options)
    run_window(opt, params, k)
    assert passes(lambda: run_window(opt, params, k)) == expected


@pytest.mark.compiled
@pytest.mark.parametrize(("k", "expected", "main_grads"), [(5, 1, 0), (6, 2, 4 * N)])
def test_a_window_of_known_length_is_held_in_place_of_the_main_grads(k, expected, main_grads):
    """Five bf16 micro-batches take 10 bytes per element: no more than one, the main grads and the budget would."""
    params = bf16()
    opt = optimizer(params, accumulation_steps=k, weighting="equal")
    assert passes(lambda: run_counting(opt, params, k)) == expected
    report = opt.memory_report()
    assert report.main_grads == main_grads
    assert report.peak_window <= (2 + 4 + 4) * N


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("defer", "k", "main_grads", "peak_held"),
    [(1, 1, 0, 2), (1, 4, 4, 2), (4, 4, 0, 8), (4, 8, 4, 8), (8, 4, 0, 8), ("auto", 8, 4, 6), ("auto", 3, 0, 6)],
)
def test_memory_report_says_what_the_design_says(defer, k, main_grads, peak_held):
    """Bytes per element: 2 per held bf16 micro-batch, 4 of main grads unless K <= m, 4 of main param, 8 of moments."""
    params = bf16()
    opt = optimizer(params, defer=defer)
    run_window(opt, params, k)
    report = opt.memory_report()
    assert report.elements == N
    assert (report.main_grads, report.peak_held_grads) == (main_grads * N, peak_held * N)
    assert (report.main_params, report.held_grads) == (4 * N, 0)
    assert report.state == 8 * N + 4  # one fp32 step count
    assert report.peak_window == (main_grads + peak_held) * N
    assert report.total == report.main_grads + 12 * N + 4 + report.tables
    assert report.peak == report.total - report.main_grads + report.peak_window
    assert f"{report.peak:,}" in str(report)


@pytest.mark.compiled
def test_the_report_counts_what_an_open_window_holds():
    params = bf16()
    opt = optimizer(params, accumulation_steps=3, weighting="equal")
    params[0].float().sum().backward()
    opt.step()
    assert opt.memory_report().held_grads == 2 * N
    opt.discard()
    assert opt.memory_report().held_grads == 0
    with opt.window() as window:
        window.backward(params[0].float().sum(), weight=1)
        window.backward(params[0].float().sum(), weight=1)
        assert opt.memory_report().held_grads == 4 * N


RESIDENT = """
import os
import torch
import gradacc_fused as gf

elements, k = 16 << 20, 4
params = [torch.nn.Parameter(torch.ones(elements, dtype=torch.bfloat16))]
opt = gf.GradAccumOptimizer(torch.optim.AdamW(params), defer=k)
grad = torch.ones(elements, dtype=torch.bfloat16)

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

with opt.window() as window:
    window.backward((params[0] * grad).sum(), weight=1)
before = resident()
with opt.window() as window:
    for _ in range(k):
        window.backward((params[0] * grad).sum(), weight=1)
    print(resident() - before, opt.memory_report().held_grads, opt.memory_report().main_grads)
print(resident() - before)
"""


@pytest.mark.compiled
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's account of resident memory")
def test_the_report_agrees_with_the_process():
    """What the system says of a fresh process, for sizes that malloc hands back at once."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    out = subprocess.run([sys.executable, "-c", RESIDENT], capture_output=True, text=True, env=environment, check=True)
    held, reported, main_grads, afterwards = map(int, out.stdout.split())
    assert (reported, main_grads) == (4 * 2 * (16 << 20), 0)
    assert held == pytest.approx(reported, rel=0.1)
    assert afterwards < 2 * (16 << 20)  # given back


def same_as_undeferred(make):
    """``make(defer)`` returns tensors: the bits with and without deferral are the same."""
    held, flushed = make(4), make(1)
    for mine, theirs in zip(held, flushed, strict=True):
        assert torch.equal(mine, theirs)


def test_reentrant_checkpoints(backend):
    """A reentrant checkpoint runs a backward inside a backward; gradients are taken once the outer one is done."""

    def make(defer):
        torch.manual_seed(0)
        model = mlp()
        start = [param.detach().clone() for param in model.parameters()]
        opt = gf.GradAccumOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), defer=defer, backend=backend)
        with opt.window() as window:
            for j in range(3):
                x, y = batch(j)
                hidden = checkpoint(model[:3], x.requires_grad_(), use_reentrant=True)
                window.backward(errors(model[3:], hidden, y).sum(), weight=len(x), reduction="sum")
        return [value - param.detach() for param, value in zip(model.parameters(), start, strict=True)]

    same_as_undeferred(make)
    torch.manual_seed(0)
    model = mlp()
    count = 0
    for j in range(3):
        x, y = batch(j)
        errors(model, x, y).sum().backward()
        count += len(x)
    for param, moved in zip(model.parameters(), make(4), strict=True):
        torch.testing.assert_close(moved, param.grad / count, rtol=1e-5, atol=1e-6)


def test_shared_storage(backend):
    """Two gradients in one storage are held if the piece has both and nobody else any."""
    for keep in (False, True):
        params = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(3))]
        opt = gf.GradAccumOptimizer(
            torch.optim.SGD(params, lr=1.0), accumulation_steps=3, weighting="equal", defer=4, backend=backend
        )
        kept = []
        for value in (1.0, 2.0, 6.0):
            both = torch.full((6,), value)
            params[0].grad, params[1].grad = both[:3], both[3:]
            if keep:
                kept.append(both)
            del both
            opt.step()
            for mine in kept:  # whoever keeps the storage may write it
                mine.fill_(99.0)
        for param in params:
            assert torch.equal(param.detach(), torch.full((3,), -3.0))


def test_in_place_changes_of_a_kept_gradient(backend):
    """Somebody who kept a gradient may write it after step(): what was taken is what was there."""
    params = [torch.nn.Parameter(torch.zeros(3))]
    opt = gf.GradAccumOptimizer(
        torch.optim.SGD(params, lr=1.0), accumulation_steps=3, weighting="equal", defer=4, backend=backend
    )
    for value in (1.0, 2.0, 6.0):
        (params[0].sum() * value).backward()
        kept = params[0].grad
        opt.step()
        kept.mul_(float("nan"))
    assert torch.equal(params[0].detach(), torch.full((3,), -3.0))


@pytest.mark.compiled
def test_memory_that_comes_back_while_it_is_held_is_an_error():
    """The collector compares addresses with those of the held pieces, parameter by parameter."""
    from gradacc_fused import _C

    params = [torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(4))]
    touched = torch.zeros(2, dtype=torch.uint8)
    collector = _C.Collector(params, [True, True], torch.empty(0))
    params[1].grad = torch.ones(4)
    first, _ = collector.collect([params], touched, True, [])
    params[1].grad = first.tensors(torch.empty(0))[1]
    _, came_back = collector.collect([params], touched, True, [first])
    assert came_back == 1


@pytest.mark.compiled
def test_the_window_that_meets_it_is_discarded(monkeypatch):
    params = bf16(8)
    opt = optimizer(params, defer=4)
    real = opt._engine.collect
    monkeypatch.setattr(opt._engine, "collect", lambda clear, held: (real(clear, held)[0], 0 if held else -1))
    before = params[0].detach().clone()
    with pytest.raises(gf.WindowError, match="parameter 0 lies where one lies that the window still holds.*defer=1"):
        run_window(opt, params, 2)
    assert torch.equal(params[0].detach(), before) and params[0].grad is None
    monkeypatch.undo()
    run_window(opt, params, 2)
    assert not torch.equal(params[0].detach(), before)


@pytest.mark.parametrize("bucket_view", [False, True])
def test_ddp_bucket_views(backend, bucket_view, tmp_path):
    """Gradients that are views of DDP's buckets are written again by the next backward; they are not held."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:

        def make(defer):
            torch.manual_seed(0)
            model = mlp()
            wrapped = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=bucket_view)
            opt = gf.GradAccumOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), defer=defer, backend=backend)
            start = [param.detach().clone() for param in model.parameters()]
            for _ in range(2):
                with opt.window() as window:
                    for j in range(3):
                        x, y = batch(j)
                        window.backward(errors(wrapped, x, y).sum(), weight=len(x), reduction="sum")
            return [param.detach() - value for param, value in zip(model.parameters(), start, strict=True)]

        same_as_undeferred(make)
        torch.manual_seed(0)
        model = mlp()
        whole = torch.optim.SGD(model.parameters(), lr=1.0)
        start = [param.detach().clone() for param in model.parameters()]
        for _ in range(2):
            whole.zero_grad()
            count = sum(len(batch(j)[0]) for j in range(3))
            for j in range(3):
                (errors(model, *batch(j)).sum() / count).backward()
            whole.step()
        for mine, param, value in zip(make(4), model.parameters(), start, strict=True):
            torch.testing.assert_close(mine, param.detach() - value, rtol=1e-4, atol=1e-6)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"defer": "all"}, "defer must be a positive int or 'auto', got 'all'"),
        ({"defer": True}, "defer must be a positive int or 'auto'"),
        ({"defer_bytes": -1}, "defer_bytes must be an int >= 0, got -1"),
        ({"defer": 2, "defer_bytes": 8}, "defer_bytes is the budget of defer='auto', but defer is 2"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        optimizer(bf16(), **options)
