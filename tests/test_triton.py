"""The Triton kernels beside the cpu backend, in the interpreter; and the interpreter's corrections themselves.

The conformance suite takes ``triton_on_cpu`` as one more backend; this file has what only concerns Triton.
"""

from __future__ import annotations

import math
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from cases import CASES, NONFINITE_CASES, Case, sizes
from harness import triton_on_cpu
from updates import RULES, UPDATE_CASES, Updated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.device_numbers import closing, updated, within_one_ulp  # noqa: E402

if triton_on_cpu.unavailable_reason() is not None:
    pytest.skip(f"no Triton: {triton_on_cpu.unavailable_reason()}", allow_module_level=True)

import numpy as np  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from gradacc_fused.triton_kernels._order import DenseTensors  # noqa: E402
from harness import triton_interpreter as interpreter  # noqa: E402

from gradacc_fused.backends import cpu  # noqa: E402
from gradacc_fused.backends import triton as backend  # noqa: E402

CPU = torch.device("cpu")
BF16 = torch.bfloat16


# -- beside the cpu backend ------------------------------------------------------------------------------------------


@pytest.mark.compiled
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize("case", (*CASES, *NONFINITE_CASES), ids=str)
def test_sums_have_the_bits_of_cpu(case, store, norm_type):
    mine, theirs = (closing(ops, case, CPU, store, norm_type) for ops in (backend, cpu))
    for a, b in zip(mine[:-2], theirs[:-2], strict=True):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    torch.testing.assert_close(mine[-2], theirs[-2], rtol=1e-13, atol=0, equal_nan=True)
    assert torch.equal(mine[-1], theirs[-1])


@pytest.mark.compiled
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", [case for case in UPDATE_CASES if not case.name.startswith("many")], ids=str)
def test_updates_are_within_one_ulp_of_cpu(case, rule):
    pairs = zip(updated(backend, case, rule, CPU), updated(cpu, case, rule, CPU), strict=True)
    assert all(within_one_ulp(mine, theirs) for mine, theirs in pairs)


TILED = Case("tiles", sizes(9000, 17, 16_384, 1, dtype=BF16) + sizes(8192, 700), (1.0, 0.5))


@pytest.fixture(params=[False, True], ids=["cuda", "hip"])
def shipped_blocks(request, monkeypatch):
    """The tiles that are launched on a GPU: several to a slice."""
    block, update_block = backend.blocks(request.param)
    monkeypatch.setattr(backend, "BLOCK", block)
    monkeypatch.setattr(backend, "UPDATE_BLOCK", update_block)


@pytest.mark.compiled
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_sums_by_the_tiles_of_a_gpu(shipped_blocks, norm_type):
    mine, theirs = (closing(ops, TILED, CPU, True, norm_type) for ops in (backend, cpu))
    assert all(torch.equal(a, b) for a, b in zip(mine[:-2], theirs[:-2], strict=True))
    torch.testing.assert_close(mine[-2], theirs[-2], rtol=1e-13, atol=0)


@pytest.mark.compiled
@pytest.mark.parametrize("rule", ["adamw", "adam-l2", "sgd-decay", "sgd-nesterov", "lion"])
def test_updates_by_the_tiles_of_a_gpu(shipped_blocks, rule):
    pairs = zip(updated(backend, TILED, rule, CPU), updated(cpu, TILED, rule, CPU), strict=True)
    assert all(within_one_ulp(mine, theirs) for mine, theirs in pairs)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_order_of_programs_changes_no_bit(seed, monkeypatch):
    case = Case("ordered", sizes(9000, 17, 70_000, 1, dtype=BF16), (1.0, 0.5))
    expected = closing(backend, case, CPU, True, 2.0)
    monkeypatch.setattr(backend, "programs", lambda device, slices: 5)
    with interpreter.shuffled(seed):
        mine = closing(backend, case, CPU, True, 2.0)
    assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))


@pytest.fixture
def copies_allowed(monkeypatch):
    """Tensors with gaps are copied: the checker knows the copies too."""
    read = DenseTensors.read

    def seen(self, tensor, strides):
        dense = read(self, tensor, strides)
        interpreter.allow(dense)
        return dense

    monkeypatch.setattr(DenseTensors, "read", seen)


FEW_TENSORS = [case for case in CASES if not case.name.startswith("many")]


@pytest.mark.parametrize("rule", ["adamw", "sgd", "lion"])
def test_no_access_of_an_update_leaves_its_tensor(rule, copies_allowed):
    state = Updated(Case("mixed", sizes(9000, 17, 1, dtype=BF16) + sizes(700, 0, 8193), (1.0, 0.5)), rule)
    grads = [torch.ones_like(param) for _ in range(2) for param in state.params]
    lists = (state.params, state.main_params, state.exp_avgs, state.exp_avg_sqs, grads)
    before = state.snapshot()
    with interpreter.checked(*(tensor for tensors in lists for tensor in tensors)):
        state.step(backend, grads, (1.0, 0.5))
    assert not all(torch.equal(a, b) for a, b in zip(before, state.snapshot(), strict=True))


@pytest.mark.parametrize("case", FEW_TENSORS[::4], ids=str)
def test_no_access_leaves_its_tensor_and_no_two_programs_collide(case, copies_allowed):
    main_grads, grads = case.main_grads(), case.grads()
    weights = torch.tensor(case.weights, dtype=torch.float64)
    partials, found_inf = torch.zeros(64, dtype=torch.float64), torch.zeros(())
    with interpreter.checked(*main_grads, *grads):
        backend.accumulate_(
            main_grads, grads, weights, partials, found_inf, overwrite=False, store=True, norm_type=2.0
        )  # fmt: skip


# -- the interpreter's corrections -----------------------------------------------------------------------------------


@triton.jit
def _copy(source_ptr, target_ptr, n, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source_ptr + place, mask=place < n, other=0.0)
    tl.store(target_ptr + place, values.to(target_ptr.dtype.element_ty), mask=place < n)


@triton.jit
def _fma(x_ptr, y_ptr, z_ptr, out_ptr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(out_ptr + place, tl.fma(tl.load(x_ptr + place), tl.load(y_ptr + place), tl.load(z_ptr + place)))


@triton.jit
def _unmasked(source_ptr, target_ptr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(target_ptr + place, tl.load(source_ptr + place))


@triton.jit
def _overlapping(target_ptr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * (BLOCK - 1) + tl.arange(0, BLOCK)
    tl.store(target_ptr + place, 1.0)


def test_every_bf16_is_widened_as_it_is():
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(BF16)
    wide = torch.empty(65536)
    _copy[(16,)](patterns, wide, 65536, BLOCK=4096)
    assert torch.equal(wide.nan_to_num(7.0), patterns.float().nan_to_num(7.0))


def test_fp32_is_rounded_to_the_nearest_even_bf16():
    bits = torch.arange(0, 2**32, 65521, dtype=torch.int64)
    halves = (torch.arange(65536, dtype=torch.int64) << 16) + 0x8000  # exactly between two
    wide = torch.cat([bits, halves]).to(torch.int32).view(torch.float32)
    narrow = torch.empty(wide.numel(), dtype=BF16)
    _copy[(-(-wide.numel() // 8192),)](wide, narrow, wide.numel(), BLOCK=8192)
    assert torch.equal(narrow.float().nan_to_num(7.0), wide.to(BF16).float().nan_to_num(7.0))


def rounded(exact: Fraction, dtype: torch.dtype) -> float:
    """The nearest number of a dtype, ties to even, by integers."""
    if exact == 0:
        return 0.0
    digits = 53 if dtype == torch.float64 else 24
    exponent = math.frexp(float(exact))[1] - digits
    scaled = abs(exact) / Fraction(2) ** exponent
    whole = scaled.numerator // scaled.denominator
    rest = scaled - whole
    whole += rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2 == 1)
    return math.copysign(float(whole * Fraction(2) ** exponent), exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fma_is_rounded_once(dtype):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(2048, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    # Sums that cancel, and sums close to the middle between two numbers: there rounding twice shows.
    z = -(x * y) + torch.randn(2048, generator=generator, dtype=torch.float64).to(dtype) * (x * y) * 2.0**-20
    z[1024:] = 2.0 ** torch.randint(-3, 30, (1024,), generator=generator).to(dtype)
    out = torch.empty_like(x)
    _fma[(1,)](x, y, z, out, BLOCK=2048)
    exact = [
        Fraction(a) * Fraction(b) + Fraction(c) for a, b, c in zip(x.tolist(), y.tolist(), z.tolist(), strict=True)
    ]
    assert out.tolist() == [rounded(value, dtype) for value in exact]


def test_fma_of_what_is_not_finite():
    x = torch.tensor([math.inf, math.nan, 1e38, 1.0])
    out = torch.empty(4)
    _fma[(1,)](x, torch.full((4,), 1e5), torch.tensor([1.0, 1.0, 1.0, math.inf]), out, BLOCK=4)
    assert out[0] == math.inf and out[1].isnan() and out[2] == math.inf and out[3] == math.inf


def test_an_access_beyond_a_tensor_is_found():
    source, target = torch.ones(1000), torch.zeros(1024)
    with interpreter.checked(), pytest.raises(Exception, match=r"load of 24 element\(s\) outside every known tensor"):
        _unmasked[(1,)](source, target, BLOCK=1024)


def test_two_programs_that_store_to_one_place_are_found():
    with interpreter.checked(), pytest.raises(Exception, match=r"race: store by program \(1, 0, 0\)"):
        _overlapping[(2,)](torch.zeros(4096), BLOCK=1024)


def test_programs_are_shuffled():
    seen = []
    original = interpreter.interpreter.InterpreterBuilder.set_grid_idx
    order = {}
    for seed in (None, 1, 2):
        seen.clear()

        def spy(self, x, y, z):
            seen.append(x)
            return original(self, x, y, z)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(interpreter.interpreter.InterpreterBuilder, "set_grid_idx", spy)
            if seed is None:
                _copy[(6,)](torch.ones(6), torch.zeros(6), 6, BLOCK=1)
            else:
                with interpreter.shuffled(seed):
                    _copy[(6,)](torch.ones(6), torch.zeros(6), 6, BLOCK=1)
        order[seed] = list(seen)
    assert order[None] == list(range(6)) and sorted(order[1]) == list(range(6))
    assert order[1] != order[None] or order[2] != order[None]
    assert np.all(np.array(order[1]) >= 0)
