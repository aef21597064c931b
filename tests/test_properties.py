"""Property tests: any shapes, strides, splits, weights and special values."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from cases import Case, Entry
from conftest import AVAILABLE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import batch, errors, mlp, whole_step
from test_accumulate import run, truth
from tolerances import NORM, TRAJECTORY, accumulate_bound

import gradacc_fused as gf
from gradacc_fused.backends import registry

SETTINGS = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
dtypes = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16])
layouts = st.sampled_from(["contiguous", "transposed", "gaps", "misaligned"])
shapes = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple) | st.integers(0, 70000).map(lambda n: (n,))
entries = st.builds(Entry, shapes, dtypes, layouts, st.none() | layouts)
weights = st.floats(0, 1e4, width=32) | st.sampled_from([0.0, 1.0, 1 / 3])
backends = pytest.mark.parametrize("name", AVAILABLE)


@backends
@SETTINGS
@given(st.lists(entries, max_size=4), st.lists(weights, min_size=1, max_size=4), st.booleans(), st.integers(0, 99))
def test_accumulate_and_norm(name, items, factors, overwrite, seed):
    case = Case("any", tuple(items), tuple(factors))
    grads, main_grads = case.grads(seed), case.main_grads(seed)
    sums, magnitudes = truth(case, grads, main_grads, overwrite)
    partials, found_inf = run(registry.get(name), case, grads, main_grads, overwrite)
    for main_grad, total, magnitude in zip(main_grads, sums, magnitudes, strict=True):
        bound = accumulate_bound(magnitude, 2 * len(factors) + 1, main_grad.dtype)
        assert ((main_grad.double() - total).abs() <= bound).all()
    stored = [main_grad.double().reshape(-1) for main_grad in main_grads]
    exact = torch.cat(stored).square().sum() if stored else torch.zeros((), dtype=torch.float64)
    torch.testing.assert_close(partials.sum(), exact, **NORM)
    assert float(found_inf) == 0.0


@backends
@SETTINGS
@given(
    st.sampled_from([math.nan, math.inf, -math.inf]), st.integers(1, 5000), st.data(), dtypes, st.integers(1, 3),
)  # fmt: skip
def test_found_inf_wherever_it_is(name, value, numel, data, dtype, m):
    position = data.draw(st.integers(0, numel - 1))
    piece = data.draw(st.integers(0, m - 1))
    ignored = data.draw(st.booleans())
    factors = tuple(0.0 if ignored and j == piece else 1.0 for j in range(m))
    case = Case("bad", (Entry((numel,), dtype),), factors, special={(piece, 0, position): value})
    _, found_inf = run(registry.get(name), case, case.grads(), case.main_grads())
    assert float(found_inf) == (0.0 if ignored else 1.0)


@backends
@SETTINGS
@given(st.lists(st.integers(1, 11), max_size=6, unique=True), st.integers(1, 4), st.permutations(range(12)))
def test_any_split_of_a_batch_is_the_batch(name, cuts, defer, order):
    """Any split, in any order of samples: the whole batch's step."""
    edges = [0, *sorted(cuts), 12]
    model = mlp()
    other = copy.deepcopy(model)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    opt = gf.GradAccumOptimizer(inner, max_grad_norm=0.5, defer=defer, backend=name)
    whole = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        x, y = batch(step)
        with opt.window() as window:
            for start, stop in zip(edges, edges[1:], strict=False):
                chosen = list(order[start:stop])
                window.backward(errors(model, x[chosen], y[chosen]).mean(), weight=stop - start)
        whole_step(whole, other, step, max_norm=0.5)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, **TRAJECTORY)
