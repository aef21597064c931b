"""bench.plan_cost: what it plans, that a sleep in a plan is its time, and what it writes."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import plan_cost  # noqa: E402


def test_the_yardstick_sorts_and_cuts():
    lengths = [5, 3, 9, 1] * 40
    runs = plan_cost.sort_and_cut(lengths)
    assert [len(run) for run in runs] == [64, 64, 32] and sorted(sum(runs, [])) == list(range(160))
    assert [lengths[sample] for sample in sum(runs, [])] == sorted(lengths)


def test_a_sleep_is_the_plans_time(clock, monkeypatch):
    monkeypatch.setattr(plan_cost, "sort_and_cut", lambda lengths: time.sleep(0.001))
    plan = plan_cost.planned

    def slow(lengths, layout, *way):
        time.sleep(0.002 if layout == "padded" else 0.004)
        return plan(lengths, layout, *way)

    monkeypatch.setattr(plan_cost, "planned", slow)
    rows = plan_cost.measure(50, repeats=5)
    assert len(rows) == 8 and all(row.pieces % 8 == 0 for row in rows)
    for row in rows:
        expected = 2.0 if row.layout == "padded" else 4.0
        assert row.ms == pytest.approx(expected) and row.to_sort == pytest.approx(expected)


def test_the_study_prints_and_writes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(plan_cost, "QUICK_COUNTS", (20,))
    rows = plan_cost.main(["--quick", "--json", str(tmp_path / "rows.json"), "--plot", str(tmp_path)])
    assert "Planning a logical batch" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "rows.json").read_text())["rows"]) == len(rows) == 8
    assert (tmp_path / "plan_cost.png").stat().st_size > 10_000
