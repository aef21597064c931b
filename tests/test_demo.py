"""The demo and the command line, from end to end, short."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from gradacc_fused.demo import text

KEYS = {
    "grad_rel_diff_window", "grad_rel_diff_usual", "rel_diff_window", "rel_diff_usual", "op_calls_per_window",
    "stock_op_calls_per_window", "tensors", "micro_batches", "ms_window", "ms_stock_window", "loss_sum", "loss_mean",
    "token_count", "loss_first", "loss_last",
}  # fmt: skip


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    run = [sys.executable, "-m", "gradacc_fused.cli", *arguments]
    return subprocess.run(run, capture_output=True, text=True, check=True)


def test_demo_follows_whole_batch_training(tmp_path):
    output = command("demo", "--windows", "8", "--repeats", "2", "--output", str(tmp_path)).stdout
    numbers = json.loads(output.splitlines()[-1])
    assert set(numbers) == KEYS
    assert numbers["grad_rel_diff_window"] <= 1e-6 and numbers["rel_diff_window"] <= 1e-4
    assert numbers["grad_rel_diff_usual"] >= 100 * numbers["grad_rel_diff_window"]
    assert numbers["rel_diff_usual"] >= 100 * numbers["rel_diff_window"]
    assert numbers["loss_last"] < numbers["loss_first"]
    assert abs(numbers["loss_sum"] / numbers["token_count"] - numbers["loss_mean"]) < 1e-9
    assert (tmp_path / "loss_curve.png").stat().st_size > 10_000


@pytest.mark.compiled
def test_demo_counts_few_operator_events(tmp_path):
    output = command("demo", "--windows", "2", "--repeats", "1", "--output", str(tmp_path)).stdout
    numbers = json.loads(output.splitlines()[-1])
    assert numbers["op_calls_per_window"] <= 3 * numbers["micro_batches"] + 10 < numbers["stock_op_calls_per_window"]
    few, many = (int(word.strip(",")) for word in output.split("with 10 tensors: ")[1].split()[:5:4])
    assert few == many <= 3 * numbers["micro_batches"] + 10


def test_doctor_names_every_backend():
    output = command("doctor").stdout
    for name in ("cuda", "triton", "cpu", "reference"):
        assert name in output
    assert "CPU tensors run on" in output


def test_text_is_split_without_loss():
    samples = text.paragraphs(96)
    assert len(samples) > 1000 and samples == text.paragraphs(96)
    batch = next(iter(text.logical_batches(samples, 24, 1)))
    pieces = text.split(batch, (10, 7, 5, 2))
    assert sorted(sample for piece in pieces for sample in piece) == sorted(batch)
    inputs, labels = text.tensors(batch)
    assert int((labels != text.IGNORED).sum()) == sum(len(sample) - 1 for sample in batch)
    row = max(range(24), key=lambda k: len(batch[k]))
    assert bytes(inputs[row].tolist()) == batch[row][:-1] and bytes(labels[row].tolist()) == batch[row][1:]
