"""find_micro_batch: the largest that fits what is free, measured; and what the allocator's numbers are, on a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import gradacc_fused as gf
from gradacc_fused.batch import memory
from gradacc_fused.report.events import peak_bytes

EACH, FIXED = 1000, 50_000


def allocates(samples: int) -> None:
    """Exactly 50,000 bytes and 1,000 per sample at once."""
    fixed = torch.empty(FIXED, dtype=torch.uint8)
    torch.empty(samples * EACH, dtype=torch.uint8)
    del fixed
    torch.empty(10, dtype=torch.uint8)


def test_peak_bytes_is_the_most_at_once():
    assert peak_bytes(lambda: allocates(7)) == (FIXED + 7 * EACH, 0)

    def one_after_the_other():
        for _ in range(3):
            torch.empty(12_345, dtype=torch.uint8)

    assert peak_bytes(one_after_the_other) == (12_345, 0)
    assert peak_bytes(lambda: None) == (0, 0)
    kept = []
    assert peak_bytes(lambda: kept.append(torch.empty(500, dtype=torch.uint8))) == (500, 500)


@pytest.mark.parametrize("head_room", [0.1, 0.15, 0.2])
@pytest.mark.parametrize("budget", [66_000, 123_456, 1_000_000])
def test_the_largest_that_fits_by_hand(budget, head_room):
    found = gf.find_micro_batch(allocates, budget_bytes=budget, head_room=head_room)
    assert found.samples == (int(budget * (1 - head_room)) - FIXED) // EACH
    assert found.bytes_per_sample == EACH and found.fixed_bytes == FIXED
    assert found.peaks[found.samples] <= found.usable_bytes < FIXED + (found.samples + 1) * EACH
    assert len(found.peaks) <= 8
    assert found.limits.max_samples == found.samples and found.accumulation_steps is None


def test_the_effective_batch_is_kept():
    found = gf.find_micro_batch(allocates, budget_bytes=63_000, head_room=0.0, effective_batch=32)
    assert (found.samples, found.accumulation_steps, found.sizes) == (13, 3, (11, 11, 10))
    assert sum(found.sizes) == 32
    assert "3 accumulation step(s) of 11, 11, 10 samples" in str(found) and "13" in str(found)
    small = gf.find_micro_batch(allocates, budget_bytes=10**9, effective_batch=32)
    assert (small.samples, small.accumulation_steps, small.sizes) == (32, 1, (32,))
    assert max(small.peaks) == 32  # no larger one was tried


def test_limits_bound_what_is_tried():
    assert gf.find_micro_batch(allocates, gf.Limits(max_samples=5), budget_bytes=10**9).samples == 5
    limits = gf.Limits(max_sequence_length=128, max_tokens=1024)
    found = gf.find_micro_batch(allocates, limits, budget_bytes=10**9)
    assert found.samples == 8 and found.limits == gf.Limits(8, 128, 1024)
    plan = gf.plan_batch([100] * 20, limits=found.limits)
    assert [len(piece.samples) for piece in plan.pieces] == [8, 8, 4]


@pytest.mark.parametrize("knee", [1, 40, 500])
def test_memory_that_does_not_grow_on_a_line(knee):
    """Flat up to a knee, then steep: the first line predicts far too much, and memory runs out where it is tried."""

    def fn(samples):
        if samples > 2000:
            raise torch.OutOfMemoryError("planted")
        torch.empty(10_000 + max(samples - knee, 0) * 100, dtype=torch.uint8)

    found = gf.find_micro_batch(fn, budget_bytes=60_000, head_room=0.0)
    assert found.samples == knee + 500
    assert found.peaks[found.samples + 1] > 60_000
    assert len(found.peaks) < 25


def test_room_is_left_for_what_the_optimizer_will_allocate(backend):
    model = nn.Linear(100, 100)
    fp32 = model.weight.nbytes + model.bias.nbytes

    def fn(samples):
        model(torch.zeros(samples, 100)).sum().backward()

    sizes = []
    for defer in (1, 3, "auto"):
        opt = gf.GradAccumOptimizer(torch.optim.AdamW(model.parameters()), backend=backend, defer=defer)
        found = gf.find_micro_batch(fn, budget_bytes=2_000_000, optimizer=opt, head_room=0.1)
        main_grads = opt._engine.layout.main_grad_bytes
        held = {1: 0, 3: 2 * fp32, "auto": main_grads}[defer]
        assert found.bytes_to_come == main_grads + held
        assert found.usable_bytes == 1_800_000 - found.bytes_to_come
        assert len(opt.inner.state) == 2  # its state is there already, and not to come
        assert all(param.grad is None for param in model.parameters())
        sizes.append(found.samples)
        with opt.window() as window:
            for _ in range(4):
                window.backward(model(torch.ones(1, 100)).sum(), weight=1)
        again = gf.find_micro_batch(fn, budget_bytes=2_000_000, optimizer=opt, head_room=0.1)
        if defer == 1:
            assert again.bytes_to_come == 0  # the main grads are there now
    assert sizes[0] > sizes[1]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"budget_bytes": 40_000},
            MemoryError,
            "one sample needs 51,000 bytes, and 34,000 are usable of 40,000.*checkpoint",
        ),
        ({}, ValueError, "budget_bytes must be given on cpu"),
        ({"budget_bytes": 0}, ValueError, "budget_bytes must be at least 1, got 0"),
        ({"budget_bytes": 1, "head_room": 1.0}, ValueError, "head_room must be a share from 0 up to 1, got 1.0"),
        ({"budget_bytes": 1, "limits": gf.Limits(max_tokens=20)}, ValueError, "need max_sequence_length too"),
        ({"budget_bytes": 1, "effective_batch": 0}, ValueError, "effective_batch must be at least 1 sample, got 0"),
    ],
)
def test_refused(options, error, message):
    with pytest.raises(error, match=message):
        gf.find_micro_batch(allocates, **options)


def test_gradients_that_are_left_behind_are_warned_about():
    model = nn.Linear(100, 100)

    def fn(samples):
        model(torch.zeros(samples, 100)).sum().backward()

    with pytest.warns(UserWarning, match=r"fn\(1\) left 40,400 bytes allocated.*pass optimizer="):
        gf.find_micro_batch(fn, gf.Limits(max_samples=1), budget_bytes=10**6)


def test_an_error_of_another_kind_is_not_memory():
    def fn(samples):
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        gf.find_micro_batch(fn, budget_bytes=1000)


def test_on_cuda_the_allocators_statistics_are_read(monkeypatch):
    """The allocator is simulated: 1,000,000 bytes free, 300,000 kept in reserve of which 100,000 are in use."""
    state = SimpleNamespace(allocated=100_000, peak=0, calls=[])

    def fn(samples):
        state.peak = max(state.peak, state.allocated + FIXED + samples * EACH)

    def reset(device):
        state.calls.append("reset")
        state.peak = state.allocated

    fakes = {
        "mem_get_info": lambda device: (1_000_000, 10**9),
        "memory_reserved": lambda device: 300_000,
        "memory_allocated": lambda device: state.allocated,
        "max_memory_allocated": lambda device: state.peak,
        "reset_peak_memory_stats": reset,
        "synchronize": lambda device: state.calls.append("synchronize"),
        "empty_cache": lambda: None,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(memory.torch.cuda, name, fake)
    found = gf.find_micro_batch(fn, device="cuda", head_room=0.2)
    assert found.budget_bytes == 1_200_000 and found.samples == (960_000 - FIXED) // EACH
    assert found.peaks[1] == FIXED + EACH
    assert state.calls == ["reset", "synchronize"] * len(found.peaks)
