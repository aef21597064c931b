"""The optimizer's own path and the registered ops: the same bits, whatever carries the work out."""

from __future__ import annotations

import pytest
import torch

import gradacc_fused as gf
from gradacc_fused.backends import registry
from gradacc_fused.backends.device_path import DevicePath
from gradacc_fused.backends.ops_path import OpsPath
from tests.sweep import assert_same_bits, streaming_from, sweep

pytestmark = pytest.mark.compiled

CPU = torch.device("cpu")
WAYS = (None, OpsPath, DevicePath)  # the backend's own, and those over the registered ops
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
    "lion": lambda groups: gf.Lion(groups, lr=0.02, weight_decay=0.1),
}


def train(
    inner: str, path: type | None = None, defer: int | str = 1, norm_type: float = 2.0, backend: str = "cpu"
) -> list[torch.Tensor]:  # fmt: skip
    params = make_params()
    opt = gf.GradAccumOptimizer(
        INNERS[inner]([{"params": params[:9]}, {"params": params[9:], "lr": 0.01}]),
        accumulation_steps=4, weighting="given", max_grad_norm=1.0, max_grad_value=0.3, norm_type=norm_type,
        defer=defer, backend=backend,
    )  # fmt: skip
    if path is not None:
        go_through(path, opt)
    norms = []
    for step in range(8):
        set_grads(params, step)
        opt.step(weight=1.0 + step)
        if opt.last_result is not None:
            norms.append(opt.last_result.total_norm.clone())
    state = [value for entry in opt.state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
    return [param.detach() for param in params] + state + norms


def go_through(path: type, opt: gf.GradAccumOptimizer) -> None:
    """Puts a Python path over the registered ops in place of the backend's own."""
    engine = opt._engine
    group_ids = torch.tensor(engine.layout.group_ids, dtype=torch.int32)
    engine.path = path(engine.backend, engine.layout.params, group_ids, CPU)
    _ = engine.state, engine.main_grads
    state = engine._state
    engine.path.set_state(engine.rule.name, state.main_params, state.exp_avgs, state.exp_avg_sqs, state.steps)
    engine.path.set_main_grads(engine.main_grads)


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@pytest.mark.parametrize("defer", [1, 2, "auto"])
def test_all_ways_give_the_same_bits(backend, inner, norm_type, defer):
    assert_same_bits([train(inner, way, defer, norm_type, backend) for way in WAYS])


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
def test_the_cells_of_a_window_are_tensors_of_their_own(backend, wide):
    path = registry.get(backend).hot_path([torch.ones(1)], torch.zeros(1, dtype=torch.int32), CPU)
    cells = path.window_cells(wide)
    for number, cell in enumerate(cells):
        cell.fill_(number + 0.5)
    assert [float(cell) for cell in cells] == [0.5, 1.5, 2.5, 3.5, 4.5]
    norm = torch.float64 if wide else torch.float32
    assert [cell.dtype for cell in cells] == [norm, norm, torch.float64, torch.float64, torch.float32]
    assert all(cell.shape == () and cell.is_contiguous() and not cell.requires_grad for cell in cells)
    assert float(cells[1].clone()) == 1.5 and float(cells[4] + cells[2]) == 7.0


def path_of_one(backend: str, way: type | None):
    """A path over one parameter of three ones, whose main grad is ones; SGD without momentum."""
    param, group_ids = torch.ones(3), torch.zeros(1, dtype=torch.int32)
    module = registry.get(backend)
    path = module.hot_path([param], group_ids, CPU) if way is None else way(module, [param], group_ids, CPU)
    path.set_state("sgd", [], [], [], torch.zeros(1))
    path.set_main_grads([torch.ones(3)])
    return param, path


@pytest.mark.parametrize("way", WAYS)
def test_an_lr_that_only_the_device_knows_is_read_there_at_each_step(backend, way):
    param, path = path_of_one(backend, way)
    hyper, lr = gf.hyper_rows([{"lr": 0.0}]), torch.tensor([0.25])
    rest = torch.ones(1, dtype=torch.uint8), torch.ones((), dtype=torch.float64), torch.zeros(()), float("inf")
    none = torch.empty(0, dtype=torch.float64)
    path.update([], none, True, hyper, [(0, 0, lr)], *rest)
    assert param.tolist() == [0.75] * 3
    lr.fill_(0.125)
    path.update([], none, True, hyper, [(0, 0, lr)], *rest)
    assert param.tolist() == [0.625] * 3
    path.update([], none, True, gf.hyper_rows([{"lr": 0.0}]), [], *rest)  # the host's own again
    assert param.tolist() == [0.625] * 3


def test_parameters_that_moved_within_one_storage_are_found(backend):
    flat = torch.zeros(8)
    params = [torch.nn.Parameter(torch.empty(0)) for _ in range(2)]
    params[0].data, params[1].data = flat[:4], flat[4:]
    opt = gf.GradAccumOptimizer(torch.optim.SGD(params, lr=1.0), backend=backend)

    def step() -> None:
        for number, param in enumerate(params, start=1):
            param.grad = torch.full((4,), float(number))
        opt.step()

    step()
    params[0].data, params[1].data = params[1].data, params[0].data
    step()
    assert flat.tolist() == [-1.0 - 2.0] * 4 + [-2.0 - 1.0] * 4


@pytest.mark.parametrize("inner", ["adamw", "momentum"])
def test_another_memory_order_is_taken_up(backend, inner):
    """``model.to(memory_format=...)`` after the optimizer was made: state follows, and nothing is refused."""
    torch.manual_seed(0)
    start = torch.randn(3, 4, 5, 6)
    param, twin = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    opt = gf.GradAccumOptimizer(INNERS[inner]([param]), backend=backend)
    other = INNERS[inner]([twin])
    for step in range(4):
        if step == 2:
            param.data = param.data.to(memory_format=torch.channels_last)
        grad = torch.randn(3, 4, 5, 6)
        param.grad, twin.grad = grad.clone().to(memory_format=torch.channels_last), grad.clone()
        opt.step()
        other.step()
        torch.testing.assert_close(param.detach(), twin.detach(), rtol=2e-6, atol=1e-6)
