"""bench/device_check.py on the cpu backend: every check runs, is counted and written, and a failed one is told."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench import device_numbers  # noqa: E402

pytestmark = pytest.mark.compiled


@pytest.fixture(scope="module")
def device_check():
    spec = importlib.util.spec_from_file_location("device_check", ROOT / "bench" / "device_check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def test_the_dry_run_writes_every_row(device_check, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(device_check, "COUNTED", ((10, 1, 1), (10, 8, 4)))
    monkeypatch.setattr(device_check, "TIMED", {"lora": 4})
    out = tmp_path / "rows.json"
    assert device_check.main(["--device", "cpu", "--no-build", "--few", "--repeats", "1", "--json", str(out)]) == 0
    written = json.loads(out.read_text())
    assert written["environment"]["device"] == "cpu"
    rows = {(row["check"], row["what"]): row for row in written["rows"]}
    assert {check for check, _ in rows} >= {
        "conformance",
        "launches",
        "sync",
        "graph",
        "host",
        "speed",
        "memory",
        "peer",
        "sanitizer",
    }
    assert rows["launches", "10 tensors, K = 8, m = 4"]["value"] == 4
    for row in rows.values():
        assert row["passed"] is not False
        if row["check"] in ("conformance", "launches"):
            assert row["passed"] is True
        if row["check"] == "speed":
            assert row["value"] > 0
    assert f"{len(rows)} rows, 0 failed" in capsys.readouterr().out


def test_a_wrong_backend_fails_the_check(device_check, monkeypatch, capsys):
    """Sums that are off by one bit in one element are found, and the exit status says so."""
    from gradacc_fused.backends import cpu, registry

    class Off:
        norm_, clip_, update_ = cpu.norm_, cpu.clip_, cpu.update_

        @staticmethod
        def accumulate_(main_grads, *arguments, **options):
            cpu.accumulate_(main_grads, *arguments, **options)
            if options["store"] and main_grads and main_grads[-1].numel() > 0:
                last = main_grads[-1].view(-1) if main_grads[-1].is_contiguous() else main_grads[-1].flatten()
                last[-1] = torch.nextafter(last[-1], torch.tensor(9e30, dtype=last.dtype))

    real = registry.get
    asked = []

    def get(name, device=None):
        asked.append(name)
        return Off if len(asked) == 1 else real(name, device)  # the first is the one that is checked

    monkeypatch.setattr(registry, "get", get)
    assert device_check.main(["--device", "cpu", "--no-build", "--few", "--only", "conformance"]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_another_backend_gets_some_of_the_cases(device_check, monkeypatch, capsys):
    """A backend asked for by name is checked whole, and its optimizers are its own; the others there are, in part."""
    from gradacc_fused.backends import registry

    other = registry.Row("other", ("cpu",), "gradacc_fused.backends.cpu")
    monkeypatch.setattr(registry, "ROWS", (other, *registry.ROWS))
    monkeypatch.setenv(registry.VARIABLE, "")
    arguments = ["--device", "cpu", "--no-build", "--few", "--only", "conformance"]
    assert device_check.main([*arguments, "--backend", "other"]) == 0
    assert registry.choose(torch.device("cpu")) is registry.get("other")
    rows = capsys.readouterr().out
    assert "cpu: updates within 1 ulp of cpu" in rows and "other: " not in rows
    with pytest.raises(ValueError, match="backend must be one of other, cuda"):
        device_check.main([*arguments, "--backend", "none"])


@pytest.mark.parametrize("wrong", [False, True])
def test_one_ulp_is_one_ulp(wrong):
    exact = torch.tensor([1.0, -2.0, 0.0, 1e-40])
    other = torch.nextafter(exact, torch.full_like(exact, 9.0))
    if wrong:
        other = torch.nextafter(other, torch.full_like(exact, 9.0))
    assert device_numbers.within_one_ulp(other, exact) is not wrong


def test_a_tensor_is_moved_as_it_lies():
    whole = torch.arange(24.0).view(4, 6)
    for tensor in (whole, whole.t(), whole[1:, ::2], whole.view(-1)[3:], torch.empty(0)):
        (copy,) = device_numbers.moved([tensor], torch.device("cpu"))
        assert torch.equal(copy, tensor) and copy.stride() == tensor.stride()
        assert copy.storage_offset() == tensor.storage_offset()
        assert tensor.numel() == 0 or copy.data_ptr() != tensor.data_ptr()
