"""The benchmark: its parameter lists, its paths against float64 AdamW, what it counts, and one run of it."""

from __future__ import annotations

import copy
import csv
import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench is not installed

from bench.__main__ import main
from bench.harness import count_operator_calls, window_bytes
from bench.paths import MAX_NORM, Fused, Plain, Stock, all_paths, make_grads, make_params
from bench.shapes import PARAMETER_LISTS, elements

TINY = [(3, 5), (7,), (2, 3, 4), (1,)]
K = 3
LR = 0.1  # large: the change of a parameter is then far above the rounding of its bf16 copy


@pytest.mark.parametrize(
    ("name", "tensors", "total"),
    [("small", 400, 832_000), ("lora", 128, 1_048_576), ("gpt2", 148, 124_439_808), ("resnet50", 161, 25_557_032)],
)
def test_lists_have_the_published_totals(name, tensors, total):
    shapes = PARAMETER_LISTS[name]()
    assert (len(shapes), elements(shapes)) == (tensors, total)


def windows():
    """Three windows: gradients below the clipping threshold, far above it, and below it again."""
    for seed, scale in enumerate((0.1, 30.0, 1.0)):
        yield [[grad * scale for grad in piece] for piece in make_grads(TINY, K, seed=seed)]


def exact():
    """(start, end) of the parameters in float64, by torch.optim.AdamW on the mean of the gradients."""
    params = [torch.nn.Parameter(param.detach().double()) for param in make_params(TINY)]
    start = [param.detach().clone() for param in params]
    optimizer = torch.optim.AdamW(params, lr=LR)
    norms = []
    for grads in windows():
        for param, pieces in zip(params, zip(*grads, strict=True), strict=True):
            param.grad = torch.stack([piece.double() for piece in pieces]).mean(dim=0)
        norms.append(float(torch.nn.utils.clip_grad_norm_(params, MAX_NORM)))
        optimizer.step()
    assert min(norms) < MAX_NORM < max(norms)  # some windows are clipped, not all
    return start, [param.detach() for param in params]


MAKERS = {"stock": Stock, "plain": Plain, "fused": Fused, "fused-m=k": partial(Fused, m=K)}


@pytest.mark.parametrize("name", MAKERS)
def test_paths_follow_adamw_on_the_mean(name):
    path = MAKERS[name](make_params(TINY), K, lr=LR)
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
        torch.testing.assert_close(main_param.double(), expected, rtol=1e-4, atol=1e-6)
        assert torch.equal(param.detach(), main_param.bfloat16())


def test_window_bytes():
    """The table of the design: 10 k + 24 with m = 1, no buffer at all with m >= k."""
    known = {(1, 1): 30, (4, 1): 64, (8, 1): 104, (8, 2): 74, (8, 4): 62, (4, 4): 42, (3, 8): 38}
    assert {pair: window_bytes(*pair) for pair in known} == known


def fused_calls(tensors, m):
    shapes = [(33,)] * tensors
    path = Fused(make_params(shapes), K, m=m)
    grads = make_grads(shapes, K)
    path.window(grads)  # the first one makes the state
    return count_operator_calls(path, grads)


@pytest.mark.compiled
def test_operator_calls_do_not_grow_with_the_tensors():
    calls = fused_calls(10, m=1)
    assert K + 1 <= calls <= 3 * K + 10
    assert fused_calls(100, m=1) == calls


@pytest.mark.compiled
def test_gradients_are_held_when_deferred():
    """Else the bytes of rows with m > 1 would be claimed and not measured."""
    assert fused_calls(10, m=K) == fused_calls(10, m=1) - (K - 1)


def test_operator_calls_leave_autograd_and_annotations_out():
    path = Stock(make_params(TINY), 1)
    grads = make_grads(TINY, 1)
    path.window(grads)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.autograd.backward(path.params, grads[0])
        path.take()
    of_autograd = sum(event.name.startswith("aten::") for event in profiler.events())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        path.window(grads)
    everything = sum(event.name.startswith("aten::") for event in profiler.events())
    assert of_autograd > 0
    assert count_operator_calls(path, grads) == everything - of_autograd


def test_every_path_has_its_own_parameters():
    paths = all_paths(TINY, 4)
    assert [(path.name, path.m) for path in paths] == [
        ("gradacc_fused", 1), ("gradacc_fused", 4), ("stock", None), ("plain", None),
    ]  # fmt: skip
    assert len({id(param) for path in paths for param in path.params}) == 4 * len(TINY)


def test_main(tmp_path, capsys):
    files = tmp_path / "rows.json", tmp_path / "rows.csv"
    rows = main(["--params", "lora", "--quick", "--seconds", "0", "--json", str(files[0]), "--csv", str(files[1])])
    assert [(row.k, row.m, row.path) for row in rows] == [
        (4, 1, "gradacc_fused"), (4, 4, "gradacc_fused"), (4, None, "stock"), (4, None, "plain"),
        (1, 1, "gradacc_fused"), (1, None, "stock"), (1, None, "plain"),
    ]  # fmt: skip
    for row in rows:
        assert row.ms > 0
        assert row.op_calls > 0
        assert (row.ratio == 1.0) == (row.path == "stock")
    printed = capsys.readouterr().out
    assert f"torch: {torch.__version__}" in printed
    assert "plain" in printed
    written = json.loads(files[0].read_text())
    assert written["environment"]["threads"] == torch.get_num_threads()
    assert [row["ms"] for row in written["rows"]] == [row.ms for row in rows]
    assert len(list(csv.DictReader(files[1].open()))) == len(rows)
