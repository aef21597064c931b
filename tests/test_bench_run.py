"""``python -m bench`` from end to end: pytest-benchmark underneath gets the real samples, and the rows are its."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench is not installed

from bench import triad
from bench.conftest import Replay
from bench.shapes import PARAMETER_LISTS

ROOT = Path(__file__).resolve().parents[1]


def test_replay_hands_pytest_benchmark_the_samples_it_was_given():
    timer, samples = Replay(), [0.25, 0.125, 4.0]
    timer.load(samples)
    taken = []
    for _ in samples:
        start = timer()
        taken.append(timer() - start)
    assert taken == samples


FIELDS = {
    "params", "k", "m", "path", "ms", "ratio", "op_calls", "tensors", "bytes_per_element", "gb_s", "triad_share",
}  # fmt: skip


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """(output, JSON of ours, rows of the CSV, JSON of pytest-benchmark) of a short run without torch.compile."""
    folder = tmp_path_factory.mktemp("bench")
    files = [folder / name for name in ("rows.json", "rows.csv")]
    command = [sys.executable, "-m", "bench", "--params", "lora", "--k", "4", "--seconds", "0", "--json", str(files[0]),
               "--csv", str(files[1]), "--benchmark-save=run", "--benchmark-save-data", f"--benchmark-storage={folder}",
               "-k", "fused or stock or flush or closing or update or triad"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    saved = next(folder.rglob("*_run.json"))
    rows = list(csv.DictReader(files[1].open()))
    return done.stdout, json.loads(files[0].read_text()), rows, json.loads(saved.read_text())


def test_rows_of_a_run(ran):
    output, written, table, _ = ran
    rows = written["rows"]
    windows = [(row["k"], row["m"], row["path"]) for row in rows if row["ratio"] is not None]
    assert windows == [(4, 1, "gradacc_fused"), (4, 4, "gradacc_fused"), (4, None, "stock"), (4, None, "stock_copy")]
    passes = [(row["k"], row["m"], row["path"]) for row in rows if row["ratio"] is None]
    expected = []
    for m in (1, 4):
        expected += [(3 * m, m, stage) for stage in ("flush_first", "flush", "closing", "update")]
        expected += [(None, m, "torch_fused_adamw")]
        expected += [(None, m, "triad")] if triad.unavailable_reason() is None else []
    assert passes == expected
    for row in rows:
        assert set(row) == FIELDS
        assert row["params"] == "lora" and row["ms"] > 0
        assert row["op_calls"] > 0 or row["path"] == "triad"
        assert f"{row['ms']:.2f}" in output and row["path"] in output
    assert [float(row["ms"]) for row in table] == [row["ms"] for row in rows]
    assert written["environment"]["torch"] == torch.__version__
    assert "lora: 128 tensors, 1,048,576 elements; windows of 4" in output


def test_pytest_benchmark_has_the_real_samples(ran):
    _, written, _, saved = ran
    saved_by_key = {tuple(each["extra_info"][key] for key in ("k", "m", "path")): each for each in saved["benchmarks"]}
    assert len(saved_by_key) == len(written["rows"])
    for row in written["rows"]:
        benchmark = saved_by_key[row["k"], row["m"], row["path"]]
        data = benchmark["stats"]["data"]
        assert len(data) >= 5 and len(set(data)) > 1
        assert row["ms"] == pytest.approx(benchmark["stats"]["median"] * 1e3)
        assert benchmark["name"].startswith("bench_")
    stock = next(row for row in written["rows"] if row["path"] == "stock")
    for row in written["rows"]:
        if row["ratio"] is not None:
            assert row["ratio"] == pytest.approx(stock["ms"] / row["ms"])


def test_wishes_that_cannot_be_met_are_refused():
    command = [sys.executable, "-m", "bench", "--params", "llama"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode != 0
    assert "invalid choice: 'llama'" in done.stdout + done.stderr
    assert all(name in done.stdout + done.stderr for name in PARAMETER_LISTS)
