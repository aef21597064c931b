"""csrc/cuda executed on the CPU, beyond the conformance suite: bits of cpu, launches, orders, grids, the address ring.

The suite itself has ``cuda_on_cpu`` as one more backend. None of this says anything about speed.
"""

from __future__ import annotations

import math

import pytest
import torch
from cases import BF16, CASES, F16, F32, F64, NONFINITE_CASES, Case, Entry, sizes
from harness import cuda_on_cpu
from updates import RULES, UPDATE_CASES, Updated

import gradacc_fused as gf
from gradacc_fused.backends import registry

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.skipif(cuda_on_cpu.unavailable_reason() is not None, reason=str(cuda_on_cpu.unavailable_reason())),
]
NOTHING = torch.empty(0, dtype=F64)


def weights_of(case: Case) -> torch.Tensor:
    return torch.tensor(case.weights, dtype=F64)


def closing(case: Case, store: bool = True, overwrite: bool = False, norm_type: float = 2.0, ops=cuda_on_cpu):
    """(main grads, partials, found_inf) after a closing pass."""
    main_grads = case.main_grads()
    partials, found_inf = torch.full((gf.n_partials(main_grads),), -1.0, dtype=F64), torch.full((), -1.0)
    ops.accumulate_(
        main_grads, case.grads(), weights_of(case), partials, found_inf,
        overwrite=overwrite, store=store, norm_type=norm_type,
    )  # fmt: skip
    return main_grads, partials, found_inf


def assert_same_bits(mine, theirs):
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("overwrite", [False, True], ids=["add", "overwrite"])
@pytest.mark.parametrize("case", CASES + NONFINITE_CASES, ids=str)
def test_sums_have_the_bits_of_the_cpu_backend(case, overwrite):
    mine, partials, found_inf = closing(case, overwrite=overwrite)
    theirs, cpu_partials, cpu_found_inf = closing(case, overwrite=overwrite, ops=registry.get("cpu"))
    assert_same_bits(mine, theirs)
    assert torch.equal(found_inf, cpu_found_inf)
    torch.testing.assert_close(partials, cpu_partials, rtol=1e-14, atol=0, equal_nan=True)  # another order of adding


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", UPDATE_CASES, ids=str)
def test_updates_are_within_one_ulp_of_the_cpu_backend(case, rule):
    mine, theirs = Updated(case, rule), Updated(case, rule)
    for step in range(3):
        grads = case.grads(seed=step)
        mine.step(cuda_on_cpu, grads, case.weights, multiplier=0.37)
        theirs.step(registry.get("cpu"), grads, case.weights, multiplier=0.37)
    for one, other in zip(mine.snapshot(), theirs.snapshot(), strict=True):
        if one.dtype in (BF16, F16):
            one, other = one.float(), other.float()
        ulp = torch.nextafter(other.abs(), torch.full_like(other, math.inf)) - other.abs()
        assert ((one - other).abs() <= ulp).all()


# -- launches --------------------------------------------------------------------------------------------------------


def counted_windows(shapes, dtypes, k, m, groups=1, unused=()):
    """(launches, copies) of the third window of an AdamW in counting mode."""
    params = [
        torch.nn.Parameter(torch.zeros(shape, dtype=dtypes[i % len(dtypes)])) for i, shape in enumerate(shapes)
    ]  # fmt: skip
    listed = [{"params": params[g::groups], "lr": 0.1 * (g + 1)} for g in range(groups)]
    opt = gf.GradAccumOptimizer(
        torch.optim.AdamW(listed), accumulation_steps=k, weighting="equal", max_grad_norm=1.0, defer=m,
        backend=cuda_on_cpu.NAME,
    )  # fmt: skip
    used = [param for i, param in enumerate(params) if i not in unused]
    grads = [torch.full_like(param, 0.5) for param in used]
    with cuda_on_cpu.small_arrays_on_device():  # where the mirrors of a device path lie
        for _window in range(3):
            cuda_on_cpu.runtime.harness_reset_counts()
            for _ in range(k):
                torch.autograd.backward(used, grads)
                opt.step()
    for i in unused:
        assert not params[i].any()
    assert all(param.all() for param in used)
    return cuda_on_cpu.runtime.harness_launches(), cuda_on_cpu.runtime.harness_copies()


@pytest.mark.parametrize(
    "tensors, groups, k, m, launches, copies",
    [
        (4000, 4, 8, 1, 10, 0),  # 7 flushes, closing pass, clip, update
        (1000, 1, 8, 4, 4, 0),  # 1 flush, closing pass, clip, update: 4,000 addresses are a kernel parameter
        (4000, 4, 8, 4, 4, 3),  # 16,000 addresses: the flush, the closing pass and the update copy a table each
        (50, 1, 4, 4, 3, 0),  # nothing is stored: closing pass, clip, update
        (50, 1, 1, 1, 3, 0),
    ],
)
def test_launches_of_a_window(tensors, groups, k, m, launches, copies):
    found = counted_windows([(3,)] * tensors, [BF16, F32], k, m, groups, unused=(7,))
    assert found == (launches, copies)


def test_launches_do_not_grow_with_elements():
    small, large = ([(8,)] * 5, [F32]), ([(300_000,)] * 5, [F32])
    assert counted_windows(*small, 4, 1) == counted_windows(*large, 4, 1) == (6, 0)


# -- the same bits whatever the device does --------------------------------------------------------------------------

ORDER_CASE = Case(
    "order", (Entry((40_000,), BF16), Entry((9000,), F32, "misaligned"), Entry((5,), F16), Entry((70_001,), F64)),
    (1.5, 0.5, 2.0),
)  # fmt: skip


def everything(rule="adamw"):
    main_grads, partials, found_inf = closing(ORDER_CASE)
    updated = Updated(ORDER_CASE, rule)
    updated.step(cuda_on_cpu, ORDER_CASE.grads(), ORDER_CASE.weights, multiplier=0.3)
    return [*main_grads, partials, found_inf, *updated.snapshot()]


@pytest.mark.parametrize("wish", ["desc", "1", "2", "77"])
def test_the_order_of_threads_and_blocks_changes_no_bit(wish):
    before = everything()
    with cuda_on_cpu.order(wish):
        assert_same_bits(everything(), before)


@pytest.mark.parametrize("count", [1, 3, 17, 2000])
def test_the_number_of_blocks_changes_no_bit(count):
    before = everything()
    with cuda_on_cpu.processors(count):
        assert_same_bits(everything(), before)


def test_two_thousand_blocks():
    """More tensors than blocks and more slices than blocks, and as many blocks as slices."""
    case = Case("many", sizes(*([3] * 1990), 8192 * 12 + 1), (1.0,))
    results = []
    for count in (1, 2000):
        with cuda_on_cpu.processors(count):
            main_grads, partials, _ = closing(case)
        results.append([*main_grads, partials])
    assert_same_bits(*results)


def test_small_arrays_on_the_device_have_the_same_bits():
    before = everything()
    with cuda_on_cpu.small_arrays_on_device():
        assert_same_bits(everything(), before)
    cells = [torch.zeros((), dtype=F64) for _ in range(8)]
    arguments = torch.tensor([9.0, 16.0], dtype=F64), torch.tensor([1.5, 2.5], dtype=F64), torch.tensor(0.5)
    cuda_on_cpu.clip_(*arguments, *cells[:4], norm_type=2.0, max_norm=1.0)
    with cuda_on_cpu.small_arrays_on_device():
        cuda_on_cpu.clip_(*arguments, *cells[4:], norm_type=2.0, max_norm=1.0)
    assert_same_bits(cells[:4], cells[4:])
    assert float(cells[0]) == 2.5 and float(cells[3]) == 4.0  # 5 over 4 times a half


@pytest.mark.parametrize("device_weights", [False, True])
def test_more_weights_than_a_launch_takes(device_weights):
    case = Case("weights", sizes(100, 9000), tuple(float(w % 3) for w in range(40)))
    expected, _, _ = closing(case, ops=registry.get("cpu"))
    cuda_on_cpu.module.set_small_arrays_on_host(not device_weights)
    try:
        mine, _, _ = closing(case)
    finally:
        cuda_on_cpu.module.set_small_arrays_on_host(True)
    assert_same_bits(mine, expected)


# -- streams ---------------------------------------------------------------------------------------------------------

RING_TENSORS, RING_FLUSHES = 1100, 20  # 4 micro-batches are 4,400 addresses; the ring has 8 slots


def ring_flushes():
    """Main grads after flushes of different gradients, each by an address table of its own."""
    main_grads = [torch.zeros(2) for _ in range(RING_TENSORS)]
    pieces = [
        [torch.full((2,), float(flush + j)) for j in range(4) for _ in range(RING_TENSORS)]
        for flush in range(RING_FLUSHES)
    ]  # fmt: skip
    for piece in pieces:
        cuda_on_cpu.accumulate_(
            main_grads, piece, torch.ones(4, dtype=F64), NOTHING, NOTHING, overwrite=False, store=True, norm_type=2.0
        )  # fmt: skip
    return main_grads, pieces


def test_a_table_is_not_written_while_its_copy_is_pending():
    total = float(sum(flush + j for flush in range(RING_FLUSHES) for j in range(4)))
    cuda_on_cpu.runtime.harness_reset_counts()
    with cuda_on_cpu.delayed_stream():
        main_grads, pieces = ring_flushes()
    for main_grad in main_grads:
        assert main_grad.tolist() == [total, total]
    assert cuda_on_cpu.runtime.harness_copies() >= RING_FLUSHES
    assert cuda_on_cpu.runtime.harness_event_waits() > 0  # more tables than slots were under way
    assert cuda_on_cpu.runtime.harness_cudaGetLastError() == 0  # the next op of torch's would raise it
    del pieces


def test_gradients_are_recorded_for_the_stream():
    case = Case("recorded", sizes(10, 0, 20), (1.0, 0.0, 2.0), absent=((0, 2),))
    before = cuda_on_cpu.module.recorded()
    closing(case)
    assert cuda_on_cpu.module.recorded() - before == 3  # of 9: three are empty, two weigh nothing, one is absent


def test_a_capture_takes_what_was_run_before_and_refuses_what_was_not():
    case = Case("captured", sizes(10, 3000), (1.0, 2.0))
    main_grads, grads, weights = case.main_grads(), case.grads(), weights_of(case)
    partials, found_inf = torch.zeros(2, dtype=F64), torch.zeros(())

    def run(tensors):
        cuda_on_cpu.accumulate_(
            tensors, grads, weights, partials, found_inf, overwrite=True, store=True, norm_type=2.0
        )  # fmt: skip

    run(main_grads)
    with cuda_on_cpu.capture():
        run(main_grads)
        with pytest.raises(RuntimeError, match="accumulate_: these tensors are new.* Run one window"):
            run(case.main_grads())
        updated = Updated(case, "adamw")
        with pytest.raises(RuntimeError, match="update_: hyper lies on the host.* Run one window"):
            updated.step(cuda_on_cpu, grads, case.weights)


def test_a_captured_graph_keeps_an_address_table_of_its_own():
    """Later tables do not overwrite the one that a replay will read."""
    main_grads = [torch.zeros(2) for _ in range(RING_TENSORS)]
    captured = [torch.full((2,), 3.0) for _ in range(4 * RING_TENSORS)]

    def flush():
        cuda_on_cpu.accumulate_(
            main_grads, captured, torch.ones(4, dtype=F64), NOTHING, NOTHING,
            overwrite=True, store=True, norm_type=2.0,
        )  # fmt: skip

    flush()  # the static table, which a capture does not make
    for main_grad in main_grads:
        main_grad.zero_()
    with cuda_on_cpu.delayed_stream():
        with cuda_on_cpu.capture():
            flush()
        kept = ring_flushes()
    del kept
    assert all(main_grad.tolist() == [0.0, 0.0] for main_grad in main_grads)  # recorded, not done
    cuda_on_cpu.runtime.harness_replay()
    assert all(main_grad.tolist() == [12.0, 12.0] for main_grad in main_grads)


def test_tables_that_a_graph_reads_are_kept():
    """More lists than the cache holds come and go; the captured one is found again in a capture, with no copy."""
    case = Case("kept", sizes(10, 3000), (1.0,))
    main_grads, grads, weights = case.main_grads(), case.grads(), weights_of(case)

    def run(tensors):
        cuda_on_cpu.accumulate_(
            tensors, grads, weights, NOTHING, NOTHING, overwrite=True, store=True, norm_type=2.0
        )  # fmt: skip

    def run_captured():
        with cuda_on_cpu.capture():
            run(main_grads)

    run(main_grads)
    run_captured()
    others = [case.main_grads() for _ in range(20)]
    for tensors in others:
        run(tensors)
    run_captured()  # would be refused if its table had gone
