"""The floor against numbers worked out by hand, and against the tensors that a window really reads and writes."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

import gradacc_fused as gf
from gradacc_fused import cli
from gradacc_fused import floor as floors
from gradacc_fused.backends import reference
from gradacc_fused.floor import floor, further_flush, pass_bytes, stock

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def test_bf16_adamw_windows():
    """K = 1 has no buffer; m = 1 is 10K + 24; holding m saves (m - 1) reads and writes of the sum."""
    known = {
        (1, 1): 30,
        (2, 1): 44,
        (4, 1): 64,
        (8, 1): 104,
        (8, 2): 74,
        (8, 4): 62,
        (4, 4): 42,
        (3, 8): 38,
        (5, 4): 50,
    }
    assert {pair: floor(*pair).bytes_per_element for pair in known} == known
    for k in range(2, 12):
        assert floor(k).bytes_per_element == 10 * k + 24
        assert floor(k, closing="stored").bytes_per_element == 10 * k + 26
        assert floor(k, closing="reduced").bytes_per_element == 10 * k + 30
        assert floor(k).launches == k + 1
        assert floor(k, closing="reduced").launches == k + 2


def test_rows_of_a_window():
    rows = [(row.name, row.times, row.bytes_per_element, row.launches) for row in floor(8, 2).passes]
    assert rows == [("flush_first", 1, 8, 1), ("flush", 2, 12, 1), ("closing", 1, 8, 1), ("clip", 1, 0, 0),
                    ("update", 1, 34, 1)]  # fmt: skip
    assert floor(8, 4).launches == 3
    assert [row.name for row in floor(4, 4).passes] == ["closing", "clip", "update"]


@pytest.mark.parametrize("m", [1, 2, 3, 4, 7])
def test_a_flush_costs_a_micro_batch_2m_plus_8_over_m(m):
    assert further_flush(m).bytes_per_micro_batch == (2 * m + 8) / m
    assert floor(2 * m, m).row("flush_first").bytes_per_element == 2 * m + 4


@pytest.mark.parametrize(
    ("grad", "param", "rule", "state"),
    [
        (BF16, BF16, "adamw", 26),  # main param and two moments read and written, 2 for the parameter
        (FP16, FP16, "adam", 26),
        (BF16, FP32, "adamw", 24),  # the parameter itself instead of a main param
        (FP32, FP32, "adamw", 24),
        (FP64, FP64, "adamw", 48),
        (BF16, BF16, "sgd", 10),
        (BF16, BF16, "sgd_momentum", 18),
        (FP32, FP32, "sgd", 8),
        (FP32, FP32, "sgd_momentum", 16),
        (BF16, BF16, "lion", 18),
        (FP32, FP32, "lion", 16),
    ],
)
def test_dtypes_and_rules(grad, param, rule, state):
    g, s = grad.itemsize, 8 if param is FP64 else 4
    assert floor(1, 1, grad, param, rule).bytes_per_element == 2 * g + state
    first, further, closing, update = g + s, g + 2 * s, g + s, g + s + state
    assert floor(4, 1, grad, param, rule).bytes_per_element == first + 2 * further + closing + update
    assert floor(4, 4, grad, param, rule).bytes_per_element == 8 * g + state


def test_low_precision_without_main_params():
    assert floor(1, main_params=False).bytes_per_element == 2 + 2 + 4 + 16  # bf16 parameter, fp32 moments


def test_memory():
    assert (floor(8, 4).buffer_bytes, floor(8, 4).held_bytes) == (4, 6)
    assert (floor(4, 8).buffer_bytes, floor(4, 8).held_bytes) == (0, 6)
    assert floor(4, 8, closing="reduced").buffer_bytes == 4


def test_stock_loops():
    """Zero 4, add 10 each, norm 4 and clip 8, fused AdamW 28, copy back 6: Megatron's 130 at k = 8."""
    assert stock(8).bytes_per_element == 4 + 80 + 12 + 28 + 6 == 130
    assert stock(8, first="copy").bytes_per_element == 6 + 70 + 12 + 28 + 6
    assert stock(4, FP32, FP32).bytes_per_element == 3 * 12 + 12 + 28
    assert stock(4, first="take").bytes_per_element == 3 * 6 + 6 + 14  # everything in bf16
    assert stock(1, FP32, FP32, "sgd_momentum").bytes_per_element == 12 + 20
    lion = stock(1, FP32, FP32, "lion")  # lerp 12, lerp_ 12, sign_ 8, mul_ 8, add_ 12
    assert (lion.bytes_per_element, lion.row("update").launches) == (12 + 52, 5)
    assert 130 in [row.bytes_per_element for row in floors.PUBLISHED]


def test_parts_of_several_dtypes_add_up():
    parts = [(floor(4), 100), (floor(4, 1, FP32, FP32), 10)]
    found = pass_bytes(parts)
    assert list(found) == ["flush_first", "flush", "closing", "clip", "update"]
    assert found["flush"] == 2 * 10 * 100 + 2 * 12 * 10
    assert sum(found.values()) == 64 * 100 + floor(4, 1, FP32, FP32).bytes_per_element * 10


def touched_bytes(monkeypatch, k, dtype, inner):
    """Bytes of the tensors that the backend's ops get in one real window, each once per pass and direction."""
    moved = 0

    def size(tensors):
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def accumulate(main_grads, grads, weights, partials, found_inf, *, overwrite, store, norm_type):
        nonlocal moved
        moved += size(grads) + (0 if overwrite else size(main_grads)) + (size(main_grads) if store else 0)
        original["accumulate_"](
            main_grads, grads, weights, partials, found_inf, overwrite=overwrite, store=store, norm_type=norm_type
        )

    def update(params, main_params, exp_avgs, exp_avg_sqs, steps, main_grads, grads, *others, **options):
        nonlocal moved
        written = size(params) if main_params else 2 * size(params)
        moved += written + 2 * size([*main_params, *exp_avgs, *exp_avg_sqs]) + size([*main_grads, *grads])
        original["update_"](
            params, main_params, exp_avgs, exp_avg_sqs, steps, main_grads, grads, *others, **options
        )  # fmt: skip

    original = {name: getattr(reference, name) for name in ("accumulate_", "update_")}
    monkeypatch.setattr(reference, "accumulate_", accumulate)
    monkeypatch.setattr(reference, "update_", update)
    param = torch.nn.Parameter(torch.ones(64, dtype=dtype))
    opt = gf.GradAccumOptimizer(
        inner([param]), accumulation_steps=k, weighting="equal", max_grad_norm=1.0, defer=1, backend="reference"
    )
    for _ in range(k):
        torch.autograd.backward([param], [torch.ones(64, dtype=dtype)])
        opt.step()
    return moved / 64


@pytest.mark.parametrize("rule", floors.MOMENTS)
@pytest.mark.parametrize("dtype", [BF16, FP32, FP64], ids=str)
@pytest.mark.parametrize("k", [1, 2, 3, 7])
def test_a_real_window_hands_the_backend_just_these_bytes(monkeypatch, k, dtype, rule):
    inner = {
        "adamw": torch.optim.AdamW,
        "adam": torch.optim.Adam,
        "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
        "sgd_momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        "lion": gf.Lion,
    }[rule]
    assert touched_bytes(monkeypatch, k, dtype, inner) == floor(k, 1, dtype, dtype, rule).bytes_per_element


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: floor(0), "k and m must be at least 1, got k=0, m=1"),
        (lambda: floor(1, 0), "got k=1, m=0"),
        (lambda: floor(1, rule="lamb"), "rule must be one of adamw, adam, sgd, sgd_momentum, lion, got 'lamb'"),
        (lambda: floor(1, closing="open"), "closing must be one of unstored, stored, reduced, got 'open'"),
        (lambda: stock(1, first="add"), "first must be 'zero', 'copy' or 'take', got 'add'"),
        (lambda: stock(1, rule="lamb"), "rule must be one of"),
    ],
)
def test_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_pass_that_is_not_run_has_no_row():
    with pytest.raises(KeyError, match="k=1, m=1 has no pass 'flush'"):
        floor(1).row("flush")


def command(*arguments: str) -> str:
    done = CliRunner().invoke(cli._app(), ["floor", *arguments], env={"COLUMNS": "160"})
    assert done.exit_code == 0, done.output
    return done.output


def test_command_prints_the_table_and_the_others():
    printed = command("--k", "8", "--m", "4")
    lines = {line.split()[0]: line.split() for line in printed.splitlines() if line.strip()}
    assert lines["flush_first"][1:] == ["1", "12", "3", "1", "12", "1.493"]
    assert lines["update"][1:] == ["1", "38", "1", "38", "4.729"]
    assert lines["window"][1:] == ["3", "62", "7.715"]  # 62 * 124,439,808 bytes
    assert lines["Megatron"][1:] == ["130", "16.177", "2.10"]
    assert lines["DeepSpeed"][1:] == ["BF16_Optimizer", "258", "32.105", "4.16"]
    assert "Megatron" not in command("--k", "4")
    assert "Megatron" not in command("--k", "8", "--param-dtype", "float32")
