"""The examples run as they are, and the numbers they print are right."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_exact_batches_equals_the_whole_batch(capsys):
    numbers = example("exact_batches").main()
    printed = capsys.readouterr().out
    assert json.loads(printed.splitlines()[-1]) == numbers
    assert numbers["grad_rel_diff"] < 1e-6 and numbers["loss_rel_diff"] < 1e-6
    assert numbers["output_rel_diff"] < 1e-5 and numbers["samples"] == 24
    assert numbers["micro_batches"] > numbers["pieces"] == 5  # one was split
    assert "out of memory in the backward of 5 samples" in printed
