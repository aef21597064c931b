"""Windows as a device sees them, on ``cuda_on_cpu``: what the host copies, and whole captured steps."""

from __future__ import annotations

import pytest
import torch
from harness import cuda_on_cpu
from torch.profiler import ProfilerActivity, profile

import gradacc_fused as gf
from gradacc_fused.backends.device_path import Mirror

if cuda_on_cpu.unavailable_reason() is not None:
    pytest.skip(f"the harness is not here: {cuda_on_cpu.unavailable_reason()}", allow_module_level=True)

F64, CPU = torch.float64, torch.device("cpu")
NO_WEIGHTS = torch.empty(0, dtype=F64)
SHAPES = [(7,), (1,), (0,), (40, 30), (9000,), (2, 3, 4, 4)]
K = 2


# -- what the host decides, copied where it changed ------------------------------------------------------------------


def test_a_mirror_copies_only_what_changed_and_keeps_its_address():
    mirror = Mirror(CPU)
    host = torch.tensor([1.0, 2.0], dtype=F64)
    first = mirror.of(host)
    address, version = first.data_ptr(), first._version
    assert torch.equal(first, host) and first.data_ptr() != host.data_ptr()
    assert mirror.of(host)._version == version
    host[1] = 5.0
    assert torch.equal(mirror.of(host), host) and mirror.of(host).data_ptr() == address
    assert mirror.of(torch.ones(3, dtype=F64)).tolist() == [1.0, 1.0, 1.0]


def test_hyper_parameters_and_touched_are_copied_where_they_changed():
    param = torch.ones(3)
    path = cuda_on_cpu.hot_path([param], torch.zeros(1, dtype=torch.int32), CPU)
    path.set_state("sgd", [], [], [], torch.zeros(1))
    path.set_main_grads([torch.ones(3)])
    one, touched, untouched = torch.ones((), dtype=F64), torch.ones(1, dtype=torch.uint8), torch.zeros(1).byte()

    def copies(lr: float, touched: torch.Tensor) -> int:
        hyper, found_inf = gf.hyper_rows([{"lr": lr}]), torch.zeros(())
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            path.update([], NO_WEIGHTS, True, hyper, [], touched, one, found_inf, float("inf"))
        return sum(event.name == "aten::copy_" for event in seen.events())

    assert copies(0.25, touched) == 3  # and the groups
    assert param.tolist() == [0.75] * 3
    assert copies(0.25, touched) == 0
    assert param.tolist() == [0.5] * 3
    assert copies(0.125, touched) == 1
    assert param.tolist() == [0.375] * 3
    assert copies(0.125, untouched) == 1
    assert param.tolist() == [0.375] * 3


def optimizer(inner: str, seed: int = 0, **options):
    generator = torch.Generator().manual_seed(seed)
    dtypes = [torch.bfloat16, torch.float32, torch.float64]
    params = [
        torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=F64).to(dtype))
        for shape in SHAPES
        for dtype in dtypes
    ]  # fmt: skip
    make = {
        "adamw": lambda: torch.optim.AdamW(params, lr=0.05, weight_decay=0.1),
        "sgd": lambda: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        "lion": lambda: gf.Lion(params, lr=0.05, weight_decay=0.1),
    }[inner]
    options = {"accumulation_steps": K, "weighting": "given", "max_grad_norm": 1.0} | options
    return params, gf.GradAccumOptimizer(make(), backend=cuda_on_cpu.NAME, **options)


def grads_like(params):
    """``K`` micro-batches of gradients in memory of their own; one parameter gets none."""
    return [[None if i == 4 else torch.empty_like(param) for i, param in enumerate(params)] for _ in range(K)]


def refill(grads, seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for grad in (grad for piece in grads for grad in piece if grad is not None):
        grad.copy_(scale * torch.randn(grad.shape, generator=generator, dtype=F64))


def window(params, opt, grads) -> None:
    for weight, piece in enumerate(grads, start=1):
        for param, grad in zip(params, piece, strict=True):
            param.grad = grad
        opt.step(weight=float(weight))


def everything(params, opt) -> list[torch.Tensor]:
    state = [value for entry in opt.state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
    return [param.detach() for param in params] + state


def test_a_usual_window_copies_nothing_to_the_device():
    params, opt = optimizer("adamw", defer=1)
    grads = grads_like(params)
    for seed in range(3):
        refill(grads, seed)
        cuda_on_cpu.runtime.harness_reset_counts()
        window(params, opt, grads)
    assert cuda_on_cpu.runtime.harness_copies() == 0
    assert cuda_on_cpu.runtime.harness_launches() == 4  # a flush, the closing pass, clip, update


def test_gradients_are_recorded_once_for_a_stream():
    """Closing and update both read the held gradients; torch is told once that the stream uses them."""
    params, opt = optimizer("adamw", defer=K)
    before = cuda_on_cpu.module.recorded()
    for seed in range(2):
        grads = grads_like(params)
        refill(grads, seed)
        for weight, piece in enumerate(grads, start=1):
            for param in params:
                param.grad = piece.pop(0)
            opt.step(weight=float(weight))
    present = sum(param.numel() > 0 for i, param in enumerate(params) if i != 4)
    assert cuda_on_cpu.module.recorded() - before == 2 * K * present


# -- capture -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", ["adamw", "sgd", "lion"])
@pytest.mark.parametrize("defer", [1, K])
def test_a_captured_window_replays_the_whole_step(inner, defer):
    (params, opt), (eager_params, eager) = optimizer(inner, defer=defer), optimizer(inner, defer=defer)
    grads, eager_grads = grads_like(params), grads_like(eager_params)
    for seed in (1, 2):
        for each in ((params, opt, grads), (eager_params, eager, eager_grads)):
            refill(each[2], seed)
            window(*each)
    before = [value.clone() for value in everything(params, opt)]
    with cuda_on_cpu.capture():
        window(params, opt, grads)
    for value, old in zip(everything(params, opt), before, strict=True):
        assert torch.equal(value, old)  # recorded, not done
    for seed, scale in ((3, 1.0), (4, 1e-3), (5, float("nan")), (6, 1.0)):
        refill(grads, seed, scale)
        cuda_on_cpu.runtime.harness_replay()
        refill(eager_grads, seed, scale)
        window(eager_params, eager, eager_grads)
        for value, expected in zip(everything(params, opt), everything(eager_params, eager), strict=True):
            assert torch.equal(value, expected)
        assert torch.equal(opt.last_result.found_inf, eager.last_result.found_inf)
        assert bool(opt.last_result.found_inf) == (scale != scale)
        for name in ("total_norm", "weight_sum", "multiplier"):
            mine, theirs = getattr(opt.last_result, name), getattr(eager.last_result, name)
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
    assert not torch.equal(params[1].detach(), before[1])


def test_a_capture_refuses_hyper_parameters_that_the_device_has_not_seen():
    params, opt = optimizer("adamw", defer=1)
    grads = grads_like(params)
    refill(grads, 0)
    window(params, opt, grads)
    opt.param_groups[0]["lr"] = 0.5
    refused = pytest.raises(RuntimeError, match="hyper-parameters or the set of parameters .* Run one window")
    with refused, cuda_on_cpu.capture():
        window(params, opt, grads)
    opt.discard()
    before = params[0].detach().clone()
    window(params, opt, grads)
    assert not torch.equal(before, params[0])


def test_a_graph_is_guarded_by_the_gradients_it_reads():
    params, opt = optimizer("adamw", defer=1)
    grads = grads_like(params)
    refill(grads, 0)
    window(params, opt, grads)
    with cuda_on_cpu.capture():
        window(params, opt, grads)

    class Graph:
        replay = staticmethod(cuda_on_cpu.runtime.harness_replay)

    with pytest.raises(gf.WindowError, match="gradients must yield the captured gradients, got none"):
        gf.GuardedGraph(Graph(), lambda: (param.grad for param in params))  # step() has cleared them
    graph = gf.GuardedGraph(Graph(), lambda: [grad for piece in grads for grad in piece], opt)
    before = params[0].detach().clone()
    graph.replay()
    assert not torch.equal(before, params[0])
    before = params[0].detach().clone()
    kept, grads[1][0] = grads[1][0], grads[1][0].clone()
    with pytest.raises(gf.WindowError, match=r"gradients\[18\] must lie where it lay"):
        graph.replay()
    grads[1][0] = kept
    graph.replay()
    before = params[0].detach().clone()
    opt.load_state_dict(opt.state_dict())
    _ = opt.state
    with pytest.raises(gf.WindowError, match="state or parameters were exchanged since the capture"):
        graph.replay()
    assert torch.equal(before, params[0])


def test_what_a_graph_reads_is_not_changed_by_later_windows():
    """Another lr and another set of gradients, eagerly; the graph keeps those of its capture."""
    params, opt = optimizer("sgd", defer=1, max_grad_norm=None)
    grads = grads_like(params)
    refill(grads, 0)
    window(params, opt, grads)
    with cuda_on_cpu.capture():
        window(params, opt, grads)
    cells = opt.last_result  # a graph's own pool would keep them

    def replayed() -> list[torch.Tensor]:
        """What a replay adds to two parameters, with momentum reset."""
        with torch.no_grad():
            for entry in opt.state.values():
                entry["momentum_buffer"].zero_()
        before = [params[i].detach().clone() for i in (1, 4)]
        cuda_on_cpu.runtime.harness_replay()
        return [params[i].detach() - old for i, old in zip((1, 4), before, strict=True)]

    first = replayed()
    assert bool(first[0].any()) and not bool(first[1].any())
    opt.param_groups[0]["lr"] = 5.0
    others = [[None if i == 1 else torch.ones_like(param) for i, param in enumerate(params)] for _ in range(K)]
    window(params, opt, others)
    again = replayed()
    torch.testing.assert_close(again[0], first[0], rtol=1e-4, atol=1e-6)  # rounded beside another parameter
    assert not bool(again[1].any()) and cells is not opt.last_result


def test_many_optimizers_on_a_stream_keep_their_tables():
    trained = [optimizer("adamw", seed, defer=1) for seed in range(6)]
    kept = [(params, opt, grads_like(params)) for params, opt in trained]
    for number in range(3):
        cuda_on_cpu.runtime.harness_reset_counts()
        for params, opt, grads in kept:
            refill(grads, number)
            window(params, opt, grads)
    assert cuda_on_cpu.runtime.harness_copies() == 0


def test_a_parameter_with_gaps_needs_no_new_table():
    whole = torch.nn.Parameter(torch.randn(6, 8)[:, ::2])
    opt = gf.GradAccumOptimizer(torch.optim.SGD([whole], lr=0.5), backend=cuda_on_cpu.NAME)
    grad = torch.randn(6, 4)
    for _ in range(3):
        before = whole.detach().clone()
        whole.grad = grad.clone()
        cuda_on_cpu.runtime.harness_reset_counts()
        opt.step()
        torch.testing.assert_close(whole.detach(), before - 0.5 * grad)
    assert cuda_on_cpu.runtime.harness_copies() == 0
