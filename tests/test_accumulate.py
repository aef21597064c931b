"""accumulate_ and norm_ on every backend: case x backend against float64, and bit equality where it is promised."""

from __future__ import annotations

import math

import pytest
import torch
from cases import CASES, NONFINITE_CASES, Case
from sweep import assert_same_bits, sweep, threads
from tolerances import NORM, accumulate_bound

import gradacc_fused as gf

CPU_CASES = pytest.mark.parametrize("case", CASES, ids=str)


def truth(case: Case, grads, main_grads, overwrite: bool):
    """float64 sums and the sums of magnitudes, written out with plain loops."""
    count = len(case.entries)
    sums, magnitudes = [], []
    for i, entry in enumerate(case.entries):
        total = torch.zeros(entry.shape, dtype=torch.float64) if overwrite else main_grads[i].double()
        magnitude = total.abs()
        for j, weight in enumerate(case.weights):
            grad = grads[j * count + i]
            if weight == 0 or grad.numel() == 0:
                continue
            total = total + grad.double() * weight
            magnitude = magnitude + grad.double().abs() * weight
        sums.append(total)
        magnitudes.append(magnitude)
    return sums, magnitudes


def cells(main_grads):
    return torch.full((gf.n_partials(main_grads) + 1,), -1.0, dtype=torch.float64), torch.full((), -1.0)


def run(ops, case, grads, main_grads, overwrite=False, store=True, norm_type=2.0, norm=True):
    partials, found_inf = cells(case.main_grads()) if norm else (torch.empty(0, dtype=torch.float64), torch.empty(0))
    ops.accumulate_(
        main_grads, grads, torch.tensor(case.weights, dtype=torch.float64), partials, found_inf,
        overwrite=overwrite, store=store, norm_type=norm_type,
    )  # fmt: skip
    return partials, found_inf


@CPU_CASES
@pytest.mark.parametrize("overwrite", [False, True], ids=["add", "overwrite"])
def test_accumulate_matches_float64(ops, case, overwrite):
    grads, main_grads = case.grads(), case.main_grads()
    read_only = [grad.clone() for grad in grads]
    sums, magnitudes = truth(case, grads, main_grads, overwrite)
    if overwrite:
        for main_grad in main_grads:
            main_grad.fill_(math.nan)  # whatever was there must not be read
    run(ops, case, grads, main_grads, overwrite, norm=False)
    for i, (main_grad, total, magnitude) in enumerate(zip(main_grads, sums, magnitudes, strict=True)):
        bound = accumulate_bound(magnitude, 2 * len(case.weights) + 1, main_grad.dtype)
        assert ((main_grad.double() - total).abs() <= bound).all(), f"tensor {i}"
    for grad, before in zip(grads, read_only, strict=True):
        torch.testing.assert_close(grad, before, rtol=0, atol=0, equal_nan=True)


@CPU_CASES
@pytest.mark.parametrize("norm_type", [2.0, math.inf], ids=["l2", "inf"])
@pytest.mark.parametrize("store", [True, False], ids=["stored", "unstored"])
def test_closing_flush_norm_matches_float64(ops, case, norm_type, store):
    grads, main_grads = case.grads(), case.main_grads()
    sums, _ = truth(case, grads, main_grads, overwrite=False)
    before = [main_grad.clone() for main_grad in main_grads]
    partials, found_inf = run(ops, case, grads, main_grads, store=store, norm_type=norm_type)
    flat = torch.cat([total.reshape(-1) for total in sums]) if sums else torch.empty(0, dtype=torch.float64)
    expected = torch.linalg.vector_norm(flat, norm_type) if flat.numel() else torch.zeros((), dtype=torch.float64)
    got = partials.sum().sqrt() if norm_type == 2.0 else partials.max()
    torch.testing.assert_close(got, expected, **NORM)
    assert float(found_inf) == 0.0
    assert float(partials[-1]) == 0.0  # one more than needed was given: zeroed
    if not store:
        for main_grad, old in zip(main_grads, before, strict=True):
            torch.testing.assert_close(main_grad, old, rtol=0, atol=0)


@CPU_CASES
def test_norm_of_its_own_has_the_bits_of_the_closing_flush(ops, case):
    grads, main_grads = case.grads(), case.main_grads()
    partials, found_inf = run(ops, case, grads, main_grads)
    again, found_again = cells(main_grads)
    ops.norm_(main_grads, again, found_again, norm_type=2.0)
    assert torch.equal(partials, again)
    assert torch.equal(found_inf, found_again)


@CPU_CASES
def test_no_main_grads_means_a_sum_that_starts_from_zero(ops, case):
    grads = case.grads()
    main_grads = case.main_grads()
    partials, found_inf = run(ops, case, grads, [], overwrite=True, store=False)
    stored_partials, stored_found = run(ops, case, grads, main_grads, overwrite=True)
    if all(entry.grad_layout is None for entry in case.entries):
        assert torch.equal(partials.sort().values, stored_partials.sort().values)
    torch.testing.assert_close(partials.sum(), stored_partials.sum(), **NORM)  # the gradients' own memory order
    assert torch.equal(found_inf, stored_found)


@CPU_CASES
def test_any_grouping_has_the_same_bits(ops, case):
    """m = 3 in one flush, one at a time, or 2 + 1: the same fused multiply-adds in the same order."""
    grads, count = case.grads(), len(case.entries)
    weights = torch.tensor(case.weights, dtype=torch.float64)
    nothing = torch.empty(0, dtype=torch.float64)
    results = []
    for size in (len(case.weights), 1, 2):
        main_grads = case.main_grads()
        for start in range(0, len(case.weights), size):
            piece = grads[start * count : (start + size) * count]
            ops.accumulate_(
                main_grads, piece, weights[start : start + size].clone(), nothing, nothing,
                overwrite=start == 0, store=True, norm_type=2.0,
            )  # fmt: skip
        results.append(main_grads)
    for other in results[1:]:
        for mine, theirs in zip(results[0], other, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("case", NONFINITE_CASES, ids=str)
def test_found_inf_is_by_element(ops, case):
    grads, main_grads = case.grads(), case.main_grads()
    _, found_inf = run(ops, case, grads, main_grads)
    assert float(found_inf) == 1.0


def test_large_finite_gradients_are_no_overflow(ops):
    """1e19 squared overflows fp32, not the norm; 1e-30 squared vanishes in fp32, not in the norm."""
    for value in (1e19, 1e-30):
        grads = [torch.full((1000,), value)]
        partials, found_inf = torch.empty(1, dtype=torch.float64), torch.empty(())
        ops.accumulate_(
            [], grads, torch.ones(1, dtype=torch.float64), partials, found_inf, overwrite=True, store=False,
            norm_type=2.0,
        )  # fmt: skip
        assert float(found_inf) == 0.0
        assert math.isclose(float(partials.sum().sqrt()), value * math.sqrt(1000), rel_tol=1e-6)


def test_written_tensors_change_version(ops):
    """As torch's in-place ops do, so that autograd notices a write between forward and backward."""
    main_grad = torch.zeros(5)
    version = main_grad._version
    nothing = torch.empty(0, dtype=torch.float64)
    ops.accumulate_(
        [main_grad], [torch.ones(5)], torch.ones(1, dtype=torch.float64), nothing, nothing, overwrite=True, store=True,
        norm_type=2.0,
    )  # fmt: skip
    assert main_grad._version > version


@pytest.mark.compiled
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_every_16_bit_pattern_is_widened_exactly(dtype):
    from gradacc_fused.backends import registry

    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    main_grad = torch.empty(patterns.shape)
    nothing = torch.empty(0, dtype=torch.float64)
    registry.get("cpu").accumulate_(
        [main_grad], [patterns], torch.ones(1, dtype=torch.float64), nothing, nothing, overwrite=True, store=True,
        norm_type=2.0,
    )  # fmt: skip
    torch.testing.assert_close(main_grad, patterns.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.compiled
@CPU_CASES
def test_isa_and_threads_have_the_same_bits(case):
    from gradacc_fused.backends import registry

    def once() -> list[torch.Tensor]:
        main_grads = case.main_grads()
        partials, _ = run(registry.get("cpu"), case, case.grads(), main_grads)
        return [partials, *main_grads]

    assert_same_bits(sweep(once))


@pytest.mark.compiled
def test_B6_twenty_runs_on_one_and_two_threads_have_the_same_bits():
    from gradacc_fused.backends import registry

    case = next(case for case in CASES if case.name == "mixed-dtypes")
    seen = set()
    for number in range(20):
        with threads(1 + number % 2):
            main_grads = case.main_grads()
            partials, _ = run(registry.get("cpu"), case, case.grads(), main_grads)
            seen.add(tuple(tensor.numpy().tobytes() for tensor in (partials, *main_grads)))
    assert len(seen) == 1
