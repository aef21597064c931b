"""The optimizer's own path and the registered ops: the same bits, whatever carries the work out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import gradacc_fused as gf
from tests.sweep import assert_same_bits, sweep

pytestmark = pytest.mark.compiled

# Tails of every length class, a whole chunk and more, empty, one element.
SHAPES = [(1,), (0,), (7, 3), (100,), (256,), (700,), (65536 + 300,), (2, 3, 8, 8)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def make_params() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    params = []
    for number, shape in enumerate(SHAPES):
        for dtype in DTYPES:
            value = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
            if len(shape) == 4:
                value = value.contiguous(memory_format=torch.channels_last)
            if shape == (7, 3):  # with gaps, and transposed
                value = torch.stack([value, value], dim=-1)[..., 0].t()
            params.append(torch.nn.Parameter(value, requires_grad=number != 5 or dtype != torch.float16))
    return params


def set_grads(params, step: int) -> None:
    """Gradients in mixed dtypes and memory orders; some are missing."""
    generator = torch.Generator().manual_seed(step)
    for number, param in enumerate(params):
        param.grad = None
        if not param.requires_grad or (number + step) % 7 == 0:
            continue
        grad = torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param.dtype)
        param.grad = grad.contiguous(memory_format=torch.channels_last) if grad.dim() == 4 and step % 2 else grad


INNERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.05, weight_decay=0.1),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.05, weight_decay=0.1),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, weight_decay=0.1),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, dampening=0.2),
}


def train(inner: str, by_ops: bool = False, defer: int = 1, norm_type: float = 2.0) -> list[torch.Tensor]:
    params = make_params()
    opt = gf.GradAccumOptimizer(
        INNERS[inner]([{"params": params[:9]}, {"params": params[9:], "lr": 0.01}]),
        accumulation_steps=4, weighting="given", max_grad_norm=1.0, max_grad_value=0.3, norm_type=norm_type,
        defer=defer, backend="cpu",
    )  # fmt: skip
    if by_ops:
        through_ops(opt)
    norms = []
    for step in range(8):
        set_grads(params, step)
        opt.step(weight=1.0 + step)
        if opt.last_result is not None:
            norms.append(opt.last_result.total_norm.clone())
    state = [value for entry in opt.state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
    return [param.detach() for param in params] + state + norms


def through_ops(opt: gf.GradAccumOptimizer) -> None:
    """Puts the reference's way in front of the compiled ops."""
    from gradacc_fused.backends import cpu
    from gradacc_fused.backends.ops_path import OpsPath

    engine = opt._engine
    engine.path = OpsPath(cpu, engine.layout.params, torch.tensor(engine.layout.group_ids, dtype=torch.int32))
    _ = engine.state, engine.main_grads
    state = engine._state
    engine.path.set_state(engine.rule.name, state.main_params, state.exp_avgs, state.exp_avg_sqs, state.steps)
    engine.path.set_main_grads(engine.main_grads)


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_both_ways_give_the_same_bits(inner, norm_type):
    assert_same_bits([train(inner, by_ops, norm_type=norm_type) for by_ops in (False, True)])


@contextmanager
def streaming_from(elements: int) -> Iterator[None]:
    from gradacc_fused import _C

    before = _C.streaming_threshold()
    _C.set_streaming_threshold(elements)
    try:
        yield
    finally:
        _C.set_streaming_threshold(before)


@pytest.mark.parametrize("streaming", [0, 1 << 40], ids=["past the cache", "through the cache"])
def test_threads_instruction_sets_and_streaming_change_no_bit(streaming):
    with streaming_from(1 << 40):
        expected = train("adamw")
    with streaming_from(streaming):
        assert_same_bits([expected, *sweep(lambda: train("adamw"))])


def wide(generator) -> torch.Tensor:
    """Signed values over many magnitudes, so that an order of additions shows."""
    values = torch.randn(70_000, generator=generator)
    return values * torch.pow(10.0, torch.randint(-6, 6, values.shape, generator=generator).float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("k", [1, 2, 4, 5, 9])
def test_the_number_held_and_where_the_sum_lies_change_no_bit(dtype, k):
    """m = 1, 2, 4, k micro-batches per pass; the last sum stored or not."""
    generator = torch.Generator().manual_seed(k)
    grads = [wide(generator).clamp(-6e4, 6e4).to(dtype) for _ in range(k)]
    weights = torch.rand(k, generator=generator, dtype=torch.float64) + 0.5
    results = []
    for m in (1, 2, 4, k):
        for stored in (True, False):
            main_grad, partials, found_inf = torch.empty(70_000), torch.empty(2, dtype=torch.float64), torch.empty(())
            for first in range(0, k, m):
                piece, piece_weights = grads[first : first + m], weights[first : first + m]
                closing = first + m >= k
                gf.accumulate_(
                    [main_grad], piece, piece_weights, overwrite=first == 0, store=stored or not closing,
                    partials=partials if closing else None, found_inf=found_inf if closing else None,
                )  # fmt: skip
            results.append([partials, found_inf, *([main_grad] if stored else [])][:2])
            if stored:
                sums = main_grad
    assert_same_bits(results)
    expected = torch.zeros(70_000, dtype=torch.float64)
    for grad, weight in zip(grads, weights, strict=True):  # an fp32 fma, by hand: exact product and sum, rounded once
        expected = (expected + grad.double() * weight.float().double()).float().double()
    torch.testing.assert_close(sums.double(), expected, rtol=0, atol=0)
    torch.testing.assert_close(partials.sum(), expected.square().sum(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("position", [0, 15, 16, 255, 256, 299])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_a_non_finite_element_is_found_wherever_it_is(bad, position, norm_type):
    grad = torch.ones(300)
    grad[position] = bad

    def run() -> list[torch.Tensor]:
        partials, found_inf = torch.empty(1, dtype=torch.float64), torch.empty(())
        gf.accumulate_(
            [torch.empty(300)], [grad], torch.ones(1, dtype=torch.float64), overwrite=True, store=False,
            partials=partials, found_inf=found_inf, norm_type=norm_type,
        )  # fmt: skip
        return [found_inf]

    results = sweep(run)
    assert all(float(found_inf) == 1.0 for (found_inf,) in results)
    grad[position] = 3.4e38  # its square is no number of fp32
    assert all(float(found_inf) == 0.0 for (found_inf,) in sweep(run))


def test_state_whose_memory_was_exchanged_is_found_again():
    """``tensor.data = ...`` gives a tensor other memory and leaves no other trace."""
    params = [torch.nn.Parameter(torch.ones(300)) for _ in range(3)]
    opt = gf.GradAccumOptimizer(torch.optim.AdamW(params, lr=0.1), backend="cpu")

    def step() -> None:
        for param in params:
            param.grad = torch.full_like(param, 0.5)
        opt.step()

    step()
    moment = opt.state[params[1]]["exp_avg"]
    moment.data = torch.full((300,), 7.0)
    params[2].data = torch.full((300,), 5.0)
    step()
    torch.testing.assert_close(moment, torch.full((300,), 7.0 + 0.1 * (0.5 - 7.0)))
    assert (params[2].detach() < 5.0).all() and (params[2].detach() > 4.8).all()
    moment.data = torch.zeros(299)
    before = [param.detach().clone() for param in params]
    with pytest.raises(ValueError, match=r"exp_avgs\[1\] must have shape \[300\]"):
        step()
    for param, value in zip(params, before, strict=True):
        assert torch.equal(param.detach(), value)


@pytest.mark.parametrize("wide", [False, True])
def test_the_cells_of_a_window_are_tensors_of_their_own(wide):
    from gradacc_fused import _C

    cells = _C.HotPath.window_cells(wide)
    for number, cell in enumerate(cells):
        cell.fill_(number + 0.5)
    assert [float(cell) for cell in cells] == [0.5, 1.5, 2.5, 3.5, 4.5]
    norm = torch.float64 if wide else torch.float32
    assert [cell.dtype for cell in cells] == [norm, norm, torch.float64, torch.float64, torch.float32]
    assert all(cell.shape == () and cell.is_contiguous() and not cell.requires_grad for cell in cells)
    assert float(cells[1].clone()) == 1.5 and float(cells[4] + cells[2]) == 7.0
