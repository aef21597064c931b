"""The benchmark: its parameter lists, its loops against float64 AdamW, what it counts, and the rows it makes."""

from __future__ import annotations

import copy
import statistics
import sys
from functools import cache, partial
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench is not installed

from bench import harness, peers, triad
from bench.paths import TORCH, Compiled, PlainFp32Grad, compiler_missing, grad_dtype_missing, make_params, ours
from bench.shapes import PARAMETER_LISTS, elements
from gradacc_fused.floor import floor
from gradacc_fused.report.paths import MAX_NORM, Fused, Stock, copies, make_grads

TINY = [(3, 5), (7,), (2, 3, 4), (1,)]
SIZE = elements(TINY)
K = 3
LR = 0.1  # large: the change of a parameter is then far above the rounding of its bf16 copy


@pytest.mark.parametrize(
    ("name", "tensors", "total"),
    [("small", 400, 832_000), ("lora", 128, 1_048_576), ("gpt2", 148, 124_439_808), ("resnet50", 161, 25_557_032)],
)
def test_lists_have_the_published_totals(name, tensors, total):
    shapes = PARAMETER_LISTS[name]()
    assert (len(shapes), elements(shapes)) == (tensors, total)


# -- the loops against an independent truth ------------------------------------------------------------------------


def windows():
    """Three windows: gradients below the clipping threshold, far above it, and below it again."""
    params = make_params(TINY)
    for seed, scale in enumerate((0.03, 10.0, 0.05)):
        yield [[grad * scale for grad in piece] for piece in make_grads(params, K, seed=seed)]


def exact():
    """(start, end) of the parameters in float64, by torch.optim.AdamW on the sum of the gradients."""
    params = copies(make_params(TINY), torch.float64)
    start = [param.detach().clone() for param in params]
    optimizer = torch.optim.AdamW(params, lr=LR)
    norms = []
    for grads in windows():
        for param, pieces in zip(params, zip(*grads, strict=True), strict=True):
            param.grad = torch.stack([piece.double() for piece in pieces]).sum(dim=0)
        norms.append(float(torch.nn.utils.clip_grad_norm_(params, MAX_NORM)))
        optimizer.step()
    assert min(norms) < MAX_NORM < max(norms)  # some windows are clipped, not all
    return start, [param.detach() for param in params]


NEEDS = {"compiled": compiler_missing, "plain_fp32_grad": grad_dtype_missing}
LOOPS = {"stock": Stock, "fused": Fused, "fused-m=k": partial(Fused, m=K)}
LOOPS |= {name: make for name, (make, _) in TORCH.items()} | {name: make for name, (make, _) in peers.PEERS.items()}


@pytest.mark.parametrize("name", LOOPS)
def test_loops_follow_adamw_on_the_sum(name):
    why = TORCH[name][1]() if name in TORCH else peers.missing(name) if name in peers.PEERS else None
    if why:
        pytest.skip(why)
    path = LOOPS[name](make_params(TINY), K, lr=LR)
    for grads in windows():
        before = copy.deepcopy(grads)
        path.window(grads)
        torch.testing.assert_close(grads, before, rtol=0, atol=0)  # they are used again: read only
        assert all(param.grad is None for param in path.params)
    start, end = exact()
    if path.main_params is None:  # three updates rounded to bf16, and moments of 8 bits: a few percent of the change
        change = torch.cat([(b - a).flatten() for a, b in zip(start, end, strict=True)])
        error = torch.cat([(p.detach() - b).flatten() for p, b in zip(path.params, end, strict=True)])
        assert error.norm() < 0.05 * change.norm()
        return
    for param, main_param, expected in zip(path.params, path.main_params, end, strict=True):
        torch.testing.assert_close(main_param.detach().double(), expected, rtol=1e-4, atol=1e-6)
        assert torch.equal(param.detach(), main_param.detach().to(param.dtype))


@pytest.mark.skipif(compiler_missing() is not None, reason="torch.compile needs a C++ compiler")
def test_the_compiled_loop_keeps_views_of_one_flat_parameter():
    path = Compiled(make_params(TINY), 1)
    start = path.flat.data_ptr()
    assert [stepped.data_ptr() - start for stepped in path.stepped] == [0, 60, 88, 184]  # 4 bytes an element
    assert path.flat.numel() == SIZE


# -- bytes, events, allocations ------------------------------------------------------------------------------------


@pytest.mark.compiled
def test_bytes_come_from_the_floor():
    for k, m in ((1, 1), (4, 1), (4, 4), (8, 4)):
        assert Fused(make_params(TINY), k, m=m).bytes() == floor(k, m).bytes_per_element * SIZE
    assert Stock(make_params(TINY), 8).bytes() == 130 * SIZE
    by_hand = {"stock_copy": 122, "plain": 7 * 6 + 6 + 14, "compiled": None}
    for name, expected in by_hand.items():
        moved = TORCH[name][0](make_params(TINY), 8).bytes()
        assert moved == (None if expected is None else expected * SIZE)
    if grad_dtype_missing() is None:
        assert PlainFp32Grad(make_params(TINY), 8).bytes() == (7 * 12 + 12 + 28 + 6) * SIZE


def fused_events(tensors, m):
    shapes = [(33,)] * tensors
    params = make_params(shapes)
    path, grads = Fused(params, K, m=m), make_grads(params, K)
    path.window(grads)  # the first one makes the state
    return harness.window_turn(path, grads).rows[0].events()


@pytest.mark.compiled
def test_events_do_not_grow_with_the_tensors():
    events = fused_events(10, m=1)
    assert K + 1 <= events.operators <= 3 * K + 10
    assert fused_events(100, m=1) == events


@pytest.mark.compiled
def test_gradients_are_held_when_deferred():
    """Else the bytes of rows with m > 1 would be claimed and not measured."""
    assert fused_events(10, m=K).operators == fused_events(10, m=1).operators - (K - 1)


def test_events_leave_autograd_and_annotations_out():
    params = make_params(TINY)
    path, grads = Stock(params, 1), make_grads(params, 1)
    path.window(grads)

    def operators(run):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            run()
        return sum(event.name.startswith("aten::") for event in profiler.events())

    of_autograd = operators(lambda: torch.autograd.backward(params, grads[0]))
    path.take()
    everything = operators(lambda: path.window(grads))
    assert of_autograd > 0
    assert harness.window_turn(path, grads).rows[0].events().operators == everything - of_autograd


# -- groups and rows -----------------------------------------------------------------------------------------------


def test_families_fit_in_memory_and_lose_no_path():
    makers = {f"path{i}": TORCH["plain" if i == 5 else "stock_copy"][0] for i in range(10)}
    assert harness.families(makers, 1_000_000) == [list(makers)]
    gpt2 = elements(PARAMETER_LISTS["gpt2"]())
    large = harness.families(makers, gpt2)
    assert [name for family in large for name in family] == list(makers)
    assert ["path4", "path5"] in large and len(large) == 9  # plain holds less
    for family in large:
        held = 22 + sum(10 if name == "path5" else 22 for name in family)
        assert held * gpt2 <= harness.FAMILY_BYTES
    assert len(harness.families(makers, 10**12)) == 10
    assert harness.families({}, 10) == [[]]


def triad_of(monkeypatch, elements=4096):
    monkeypatch.setattr(triad, "shared", cache(partial(triad.Triad, elements)))


def test_window_rows(monkeypatch):
    triad_of(monkeypatch)
    grads = make_grads(make_params(TINY), 4)
    makers = ours(4) | {name: TORCH[name][0] for name in ("stock_copy", "plain")}
    found = harness.measure_windows("tiny", TINY, 4, grads, makers, 0.0)
    keys = ["gradacc_fused-m1", "gradacc_fused-m4", "stock_copy", "plain"]
    assert list(found) == ["stock", *keys]
    for result in found.values():
        row = result.row
        assert row.ms == pytest.approx(statistics.median(result.samples) * 1e3)
        assert len(result.samples) >= 5
        assert row.ratio == pytest.approx(found["stock"].row.ms / row.ms)
        assert row.op_calls > 0
        if row.bytes_per_element is not None:
            assert row.gb_s == pytest.approx(row.bytes_per_element * SIZE / row.ms / 1e6)
            assert row.triad_share is None or row.triad_share > 0
    assert found["stock"].row.ratio == 1.0
    assert found["stock"].row.bytes_per_element == 90
    assert (found["gradacc_fused-m4"].row.k, found["gradacc_fused-m4"].row.m) == (4, 4)


@pytest.mark.compiled
def test_pass_rows(monkeypatch):
    triad_of(monkeypatch)
    grads = make_grads(make_params(TINY), 2)
    names = ("flush_first", "flush", "closing", "update", "torch_fused_adamw")
    for m, moved in {1: (6, 10, 6, 32, 28), 4: (12, 16, 12, 38, 28)}.items():
        found = harness.measure_stages("tiny", TINY, m, grads, 0.0)
        assert [found[name].row.bytes_per_element for name in names] == list(moved)
        assert set(found) - set(names) <= {"triad"}
        for result in found.values():
            assert result.row.ms > 0 and result.row.ratio is None and result.row.m == m
        assert [found[name].row.k for name in names] == [3 * m] * 4 + [None]
        assert found["flush"].row.op_calls == 1  # one pass for all m


# -- triad ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(triad.unavailable_reason() is not None, reason="the triad needs a C++ compiler")
@pytest.mark.parametrize("loop", ["plain", "stream"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_triad_computes_a_triad(loop, threads):
    bench = triad.Triad(16 * 101)
    if loop not in bench.loops:
        pytest.skip("no streaming stores on this machine")
    bench.b.copy_(torch.arange(16 * 101))
    bench.c.copy_(torch.arange(16 * 101).flip(0) * 0.5)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        bench.loops = {loop: bench.loops[loop]}
        assert bench()[loop] > 0
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(bench.a, bench.b + 3.0 * bench.c, rtol=0, atol=0)
    assert bench.moved == 12 * 16 * 101


def test_triad_without_a_compiler_says_so(monkeypatch, tmp_path):
    triad._library.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    try:
        assert triad.unavailable_reason() == "the triad needs a C++ compiler: none is on PATH"
    finally:
        triad._library.cache_clear()
