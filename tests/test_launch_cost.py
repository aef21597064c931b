"""bench.launch_cost: what it calls, what it counts, and that a sleep in either part is that part's time."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import launch_cost, study  # noqa: E402

pytestmark = pytest.mark.compiled
CPU = torch.device("cpu")
has_triton = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not has_triton, reason="Triton is not installed")


@pytest.mark.skipif(has_triton, reason="Triton is installed")
def test_without_triton_it_says_so():
    with pytest.raises(SystemExit, match="launch_cost: Triton is not installed"):
        launch_cost.measure(2, 5, CPU)


@needs_triton
def test_both_paths_make_the_same_call():
    """The C++ op does the arithmetic; the launches of Triton end at the driver, one for each call."""
    from gradacc_fused.backends import registry

    calls = launch_cost.Calls(3, CPU)
    with launch_cost.triton_backend(CPU) as (triton, dispatch):
        from triton.runtime import driver

        for number, name in enumerate(("accumulate", "clip", "update"), 1):
            getattr(calls, name)(triton, calls.grads(moved=False))
            assert driver.active.launched == dispatch.calls == number
        assert calls.partials.sum() == 0.0 and torch.equal(calls.steps, torch.zeros(3))
    cpu = registry.get("cpu")
    calls.accumulate(cpu, calls.grads(moved=False))
    assert calls.partials.sum() == 3 * launch_cost.M**2
    calls.clip(cpu, [])
    assert float(calls.cells[0]) == pytest.approx(3**0.5)  # 4 * sqrt(3) over the weights' sum
    calls.update(cpu, calls.grads(moved=False))
    assert torch.equal(calls.steps, torch.ones(3))


def test_gradients_that_move_come_back_after_all_tables_are_gone():
    calls = launch_cost.Calls(1, CPU)
    first = [calls.grads(moved=False)[0].data_ptr() for _ in range(3)]
    assert len(set(first)) == 1
    places = [tuple(grad.data_ptr() for grad in calls.grads(moved=True)) for _ in range(2 * launch_cost.PLACES)]
    assert len(set(places)) == launch_cost.PLACES and places[0] == places[launch_cost.PLACES]
    assert all(len(place) == launch_cost.M for place in places)


@needs_triton
def test_a_sleep_is_measured_in_its_part(monkeypatch, clock):
    def nap(seconds):
        return lambda *arguments, **options: time.sleep(seconds)

    dispatch = study.Stopwatch()
    calls = launch_cost.Calls(2, CPU)
    monkeypatch.setattr(calls, "clip", lambda ops, grads: (time.sleep(0.03), dispatch.wrap(nap(0.05))()))
    whole, inside = launch_cost.sampler(calls, "clip", None, False, dispatch)()
    assert (whole, inside) == pytest.approx((80_000.0, 50_000.0))


@needs_triton
def test_the_table_has_every_call(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(launch_cost, "QUICK_COUNTS", (2,))
    out = tmp_path / "rows.json"
    rows = launch_cost.main(["--quick", "--device", "cpu", "--json", str(out)])
    kinds = [("accumulate", "same"), ("accumulate", "moved"), ("clip", "same"), ("update", "same"), ("update", "moved")]
    assert [(row.call, row.addresses) for row in rows] == [kind for kind in kinds for _ in range(2)]
    for cpp, triton in zip(rows[::2], rows[1::2], strict=True):
        assert (cpp.path, triton.path) == (launch_cost.CPP, launch_cost.TRITON)
        assert cpp.prepare_us is cpp.dispatch_us is None and cpp.to_cpp == 1.0
        assert triton.to_cpp == pytest.approx(triton.us / cpp.us)
        assert 0 < triton.dispatch_us < triton.high_us and 0 < triton.prepare_us < triton.high_us
    assert len(json.loads(out.read_text())["rows"]) == len(rows)
    assert "A call of a stage: host microseconds" in capsys.readouterr().out
