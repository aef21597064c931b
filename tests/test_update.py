"""update_ on every backend against torch.optim in float64: rule x dtype x layout, over steps, signed gradients.

lr, decay, betas and momentum are large, so that a wrong order of operations is far outside the tolerance.
"""

from __future__ import annotations

import math

import pytest
import torch
from cases import BF16, CASES, F16, F32, F64, Case, Entry, sizes
from sweep import assert_same_bits, sweep
from tolerances import STORED, UPDATE
from updates import RULES, UPDATE_CASES, Updated

import gradacc_fused as gf


def check(param, main_param, exact):
    dtype = param.dtype
    if dtype in (BF16, F16):
        torch.testing.assert_close(main_param.double(), exact, **UPDATE[F32])
        assert torch.equal(param, main_param.to(dtype))  # the write-back is the rounded main param
    else:
        torch.testing.assert_close(param.double(), exact, **UPDATE[dtype])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", UPDATE_CASES, ids=str)
def test_update_matches_torch_in_float64(ops, rule, case):
    updated = Updated(case, rule)
    for step in range(3):
        grads = case.grads(seed=step)
        updated.step(ops, grads, case.weights, multiplier=0.37)
        updated.twin_step(grads, case.weights, multiplier=0.37)
    for param, main_param, exact in zip(updated.params, updated.main_params, updated.exact(), strict=True):
        check(param, main_param, exact)
    if updated.rule == "lion":  # its moment never shows in one step's size
        for exp_avg, twin in zip(updated.exp_avgs, updated.twins, strict=True):
            torch.testing.assert_close(exp_avg.double(), updated.twin.state[twin]["m"], **UPDATE[exp_avg.dtype])
    if updated.exp_avgs:
        assert torch.equal(updated.steps, torch.full_like(updated.steps, 3.0))


@pytest.mark.parametrize("rule", RULES)
def test_clip_by_value_comes_after_the_multiplier(ops, rule):
    case = Case("value", sizes(500, 1000), (2.0,))
    updated = Updated(case, rule)
    grads = case.grads()
    updated.step(ops, grads, case.weights, multiplier=0.5, bound=0.3)
    updated.twin_step(grads, case.weights, multiplier=0.5, bound=0.3)
    for param, exact in zip(updated.params, updated.exact(), strict=True):
        torch.testing.assert_close(param.double(), exact, **UPDATE[F32])


@pytest.mark.parametrize("case", UPDATE_CASES, ids=str)
def test_unstored_sum_has_the_bits_of_the_stored_one(ops, case):
    """The update gathers the main grad and the last micro-batches itself: the same bits as after a storing flush."""
    stored, unstored = Updated(case, "adamw"), Updated(case, "adamw")
    grads, main_grads = case.grads(), case.main_grads()
    weights = torch.tensor(case.weights, dtype=torch.float64)
    unstored.step(ops, grads, case.weights, main_grads, multiplier=0.7)
    nothing = torch.empty(0, dtype=torch.float64)
    ops.accumulate_(main_grads, grads, weights, nothing, nothing, overwrite=False, store=True, norm_type=2.0)
    stored.step(ops, [], (), main_grads, multiplier=0.7)
    for mine, theirs in zip(stored.snapshot(), unstored.snapshot(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("found_inf, multiplier", [(1.0, 1.0), (0.0, math.nan), (0.0, math.inf)])
def test_a_skipped_step_writes_nothing(ops, rule, found_inf, multiplier):
    case = Case("skip", (Entry((50,), BF16), Entry((70,))), (1.0,))
    updated = Updated(case, rule)
    before = updated.snapshot()
    updated.step(ops, case.grads(), case.weights, multiplier=multiplier, found_inf=found_inf)
    for mine, old in zip(updated.snapshot(), before, strict=True):
        assert torch.equal(mine, old)


def test_an_untouched_parameter_is_left_alone(ops):
    case = Case("untouched", sizes(5, 6, 7), (1.0,))
    updated = Updated(case, "adamw")
    updated.touched[1] = 0
    before = updated.snapshot()
    updated.step(ops, case.grads(), case.weights)
    after = updated.snapshot()
    assert torch.equal(after[1], before[1]) and not torch.equal(after[0], before[0])
    assert updated.steps.tolist() == [1.0, 0.0, 1.0]


def test_groups_have_rows_and_parameters_have_steps_of_their_own(ops):
    case = Case("groups", sizes(5, 5, 5), (1.0,))
    updated = Updated(case, "adamw")
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8}, {"lr": 0.3, "betas": (0.5, 0.9), "weight_decay": 0.2}]
    updated.hyper = gf.hyper_rows(groups)
    updated.group_ids = torch.tensor([1, 0, 1], dtype=torch.int32)
    updated.steps = torch.tensor([0.0, 4.0, 9.0])
    twins = [param.double() for param in updated.params]
    grads = case.grads()
    updated.step(ops, grads, case.weights)
    for i, (twin, grad) in enumerate(zip(twins, grads, strict=True)):
        group, step = groups[updated.group_ids[i]], [1, 5, 10][i]
        beta1, beta2 = group["betas"]
        exp_avg, exp_avg_sq = (1 - beta1) * grad.double(), (1 - beta2) * grad.double() ** 2
        denominator = (exp_avg_sq / (1 - beta2**step)).sqrt() + group.get("eps", 0.0)
        twin = twin * (1 - group["lr"] * group.get("weight_decay", 0.0))
        twin = twin - group["lr"] * exp_avg / (1 - beta1**step) / denominator
        torch.testing.assert_close(updated.params[i].double(), twin, **UPDATE[F32])


@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "fp16"])
def test_without_main_params_low_precision_is_updated_as_it_is(ops, dtype):
    case = Case("no-main", (Entry((2000,), dtype),), (1.0,))
    updated = Updated(case, "adamw", main_params=False)
    grads = case.grads()
    updated.step(ops, grads, case.weights)
    updated.twin_step(grads, case.weights)
    exact = updated.twins[0].detach()
    error = (updated.params[0].double() - exact).abs()
    assert (error <= exact.abs() * STORED[dtype] + 1e-6).all()


@pytest.mark.compiled
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "fp16"])
def test_write_back_rounds_to_nearest_even(dtype):
    """SGD with lr -1 from zero copies the gradient: ties, subnormals, overflow, infinities and NaN as torch rounds."""
    from gradacc_fused.backends import registry

    bits = torch.arange(0, 2**32, 9973, dtype=torch.int64).to(torch.int32)
    values = torch.cat([bits.view(F32), torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).float()])
    stored = values[values.abs() < 6e4].to(dtype)
    ties = (stored.float() + torch.nextafter(stored, torch.tensor(math.inf, dtype=dtype)).float()) / 2
    values = torch.cat([values, ties])
    main_param, param = values.clone(), torch.zeros(values.shape, dtype=dtype)
    one = torch.ones(1, dtype=torch.uint8)
    registry.get("cpu").update_(
        [param], [main_param], [], [], torch.zeros(1), [], [torch.zeros(values.shape)], torch.ones(1, dtype=F64),
        gf.hyper_rows([{"lr": 0.0}]), torch.zeros(1, dtype=torch.int32), one, torch.ones((), dtype=F64),
        torch.zeros(()), rule="sgd", max_grad_value=math.inf,
    )  # fmt: skip
    torch.testing.assert_close(param, values.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.compiled
@pytest.mark.parametrize("rule", RULES)
def test_isa_and_threads_have_the_same_bits(rule):
    from gradacc_fused.backends import registry

    case = next(case for case in CASES if case.name == "mixed-dtypes")

    def once() -> list[torch.Tensor]:
        updated = Updated(case, rule)
        for step in range(2):
            updated.step(registry.get("cpu"), case.grads(seed=step), case.weights, multiplier=0.37)
        return updated.snapshot()

    assert_same_bits(sweep(once))
