"""``gradacc-fused bench``: its numbers against hand counts, what it writes, what it refuses; the shared measuring."""

from __future__ import annotations

import csv
import time

import pytest
import torch
from typer.testing import CliRunner
from updates import PlainLion

from gradacc_fused import cli
from gradacc_fused.floor import floor
from gradacc_fused.report import bench, events, model, timing
from gradacc_fused.report.paths import Fused, Noise, Stock, copies, make_grads

BF16, FP32 = torch.bfloat16, torch.float32


def params_of(*shapes, dtype=BF16):
    torch.manual_seed(7)
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


# -- measuring -----------------------------------------------------------------------------------------------------


def test_events_by_section():
    source = torch.ones(8)

    def run():
        torch.add(source, 1.0)
        with events.section("one"):
            torch.empty(3)
            torch.mul(source, source)  # tensor * tensor: one operator, one allocation
        for _ in range(2):
            with events.section("two"), events.section("nested"):
                source.neg_()

    found = events.count(run)
    assert found["one"] == events.Events(operators=2, tensors=2)
    assert found["two"] == found["nested"] == events.Events(operators=2, tensors=0)
    assert found[""].operators > 4 and found[""].tensors > 2
    assert events.operator_events(run) == found[""].operators


def test_views_and_inplace_operators_allocate_nothing():
    source = torch.ones(8, 8)
    found = events.count(lambda: source[2:4].view(-1).mul_(source[0, 0].expand(16)))[""]
    assert found.tensors == 0 and found.operators >= 3


def test_turns_are_interleaved_and_warmed_up():
    order = []

    def run(name, seconds):
        def turn():
            order.append(name)
            return {"part": seconds, "twice": 2 * seconds}

        return turn

    samples = timing.take_turns([run("a", 1e-3), run("b", 2e-3), run("c", 3e-3)], seconds=0.0, min_repeats=7)
    assert [sample["part"] for sample in samples] == [[1e-3] * 7, [2e-3] * 7, [3e-3] * 7]
    assert samples[1]["twice"] == [4e-3] * 7
    rounds = [order[i : i + 3] for i in range(6, len(order), 3)]  # after two warm-ups of each
    assert order[:6] == ["a", "a", "b", "b", "c", "c"]
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds) and len(rounds) == 7
    assert len({tuple(each) for each in rounds}) > 1


def test_long_runs_are_warmed_up_once_and_short_ones_repeated_longer(monkeypatch, clock):
    calls = []
    timing.take_turns([timing.timed(lambda: calls.append(time.sleep(2 * timing.LONG)), "part")], seconds=0.0)
    assert len(calls) == 1 + timing.MIN_REPEATS
    monkeypatch.setattr(timing, "PATIENCE", 100.0)
    naps = timing.take_turns([timing.timed(lambda: time.sleep(0.002), "nap")], seconds=0.001)[0]["nap"]
    assert naps == pytest.approx([0.002] * timing.ENOUGH)
    monkeypatch.setattr(timing, "PATIENCE", 2.0)
    naps = timing.take_turns([timing.timed(lambda: time.sleep(0.002), "nap")], seconds=0.001)[0]["nap"]
    assert len(naps) == timing.MIN_REPEATS  # 20 would take 40 ms, and 2 are allowed


def test_stopwatches_add_up_by_name(clock):
    watches = timing.Stopwatches()
    for nap in (0.003, 0.001):
        with watches("nap"):
            time.sleep(nap)
    with watches("nothing"):
        pass
    assert watches.seconds == pytest.approx({"nap": 0.004, "nothing": 0.0})
    assert watches.each() == pytest.approx({"nap": 0.002, "nothing": 0.0})


def test_stages_are_measured_on_real_windows_and_taken_off_again():
    params = params_of((5,), (3, 2))
    path, plain = Fused(copies(params), 5, m=1), Fused(copies(params), 5, m=1)
    grads = make_grads(params, 5)
    watches = timing.Stopwatches()
    with path.stages():
        path.window(grads, watches)
    assert watches.times == {"window": 5, "flush_first": 1, "flush": 3, "closing": 1, "clip": 1, "update": 1}
    plain.window(grads)
    for mine, other in zip(path.params, plain.params, strict=True):
        assert torch.equal(mine, other)
    watches = timing.Stopwatches()
    path.window(grads, watches)
    assert set(watches.times) == {"window"}


@pytest.mark.compiled
def test_settle_sees_how_many_micro_batches_were_held():
    params = params_of((5,))
    grads = make_grads(params, 7)
    path = Fused(params, 7, m=3)
    path.m, path.flushes = None, []
    path.settle(grads)
    assert (path.m, path.flushes) == (3, [3, 3])
    assert path.bytes() == floor(7, 3).bytes_per_element * 5


def test_noise_goes_round_and_is_the_same_for_the_same_seed():
    noise, again, other = Noise(3), Noise(3), Noise(4)
    large = noise.fill(torch.empty(Noise.BLOCK + 10))
    assert torch.equal(large, again.fill(torch.empty(Noise.BLOCK + 10)))
    assert torch.equal(large[:10], large[-10:])
    assert large.std() == pytest.approx(0.1, rel=0.01) and abs(float(large.mean())) < 1e-3
    assert torch.equal(noise.fill(torch.empty(2, 3)).flatten(), large[10:16])  # goes on where it stopped
    assert not torch.equal(other.fill(torch.empty(10)), large[:10])


# -- the stock loop on any dtypes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["adamw", "adam", "sgd", "sgd_momentum", "lion"])
@pytest.mark.parametrize("make", [Stock, Fused], ids=["stock", "fused"])
def test_mixed_dtypes_follow_torch_on_the_sum(make, rule):
    params = [*params_of((5, 3)), *params_of((4,), (2, 2), dtype=FP32)]
    exact = copies(params, torch.float64)
    kinds = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "lion": PlainLion}
    optimizer = (
        kinds[rule](exact, lr=0.05)
        if rule in kinds
        else torch.optim.SGD(exact, lr=0.05, momentum=0.9 if rule == "sgd_momentum" else 0.0)
    )
    path = make(copies(params), 3, lr=0.05, rule=rule)
    for seed in (1, 2):
        grads = make_grads(params, 3, seed)
        path.window(grads)
        for param, pieces in zip(exact, zip(*grads, strict=True), strict=True):
            param.grad = torch.stack([piece.double() for piece in pieces]).sum(dim=0)
        torch.nn.utils.clip_grad_norm_(exact, 1.0)
        optimizer.step()
    for mine, main_param, expected in zip(path.params, path.main_params, exact, strict=True):
        torch.testing.assert_close(main_param.detach().double(), expected.detach(), rtol=1e-4, atol=1e-6)
        assert torch.equal(mine, main_param.to(mine.dtype))
        assert mine.grad is None


def test_bytes_of_mixed_dtypes():
    stock = Stock([*params_of((10,)), *params_of((3,), dtype=FP32)], 4)
    assert stock.bytes() == 90 * 10 + (3 * 12 + 12 + 28) * 3


# -- the report ----------------------------------------------------------------------------------------------------


@pytest.mark.compiled
@pytest.mark.parametrize(("k", "defer"), [(1, 1), (4, 1), (4, 4), (8, 3)])
def test_rows_of_a_report(k, defer):
    params = [*params_of((100,)), *params_of((30,), dtype=FP32)]
    report = bench.measure(params, k, defer, "adamw", 0.0)
    rows = {(row.stage, row.path): row for row in report.rows}
    low, full = floor(k, defer), floor(k, defer, FP32, FP32)
    window = rows["window", "gradacc_fused"]
    assert window.bytes == window.floor_bytes == low.bytes_per_element * 100 + full.bytes_per_element * 30
    assert window.floor_launches == low.launches
    accumulate = rows["accumulate", "gradacc_fused"]
    assert accumulate.floor_launches == accumulate.op_calls == -(-k // defer) - 1
    update = [table.row("update").bytes_per_element for table in (low, full)]
    assert rows["update", "gradacc_fused"].bytes == update[0] * 100 + update[1] * 30
    torch_window = rows["window", "torch"]
    assert torch_window.bytes == (10 * k + 50) * 100 + (12 * (k - 1) + 40) * 30
    assert sum(rows[stage, "torch"].bytes for stage in ("accumulate", "clip", "update")) == torch_window.bytes
    assert ("closing", "torch") not in rows
    for row in report.rows:
        assert row.ms > 0 or row.op_calls == 0
        assert row.gb_s is None or row.gb_s == pytest.approx(row.bytes / row.ms / 1e6)
        assert row.floor_ms == pytest.approx(row.floor_bytes / report.copy_gb_s / 1e6)
    stages = [rows[stage, "gradacc_fused"] for stage in bench.STAGES[:-1]]
    assert sum(row.bytes for row in stages) == window.bytes
    assert sum(row.op_calls for row in stages) <= window.op_calls
    assert window.op_calls < torch_window.op_calls


def invoke(monkeypatch, tmp_path, *arguments):
    monkeypatch.chdir(tmp_path)
    return CliRunner().invoke(cli._app(), ["bench", *arguments], env={"COLUMNS": "160"})


MODEL = """
import torch

def make():
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16)).to(torch.bfloat16)

def some():
    return [param for param in make().parameters() if param.dim() == 2]

def frozen():
    return make().requires_grad_(False)

def number():
    return 3

def broken():
    return [1, 2]

CONSTANT = 3
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "my_model_of_test.py").write_text(MODEL)
    (tmp_path / "importing.py").write_text("import no_such_package_of_ours")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_command_writes_table_picture_and_csv(monkeypatch, here):
    done = invoke(
        monkeypatch, here, "--model", "my_model_of_test:make", "--seconds", "0", "--output", "out", "--k", "3"
    )
    assert done.exit_code == 0, done.output
    assert "4 tensors, 176 elements, 176 in bfloat16" in done.output
    assert "k=3, adamw, at most 1 micro-batch(es) held (defer=1)" in done.output
    rows = list(csv.DictReader((here / "out" / "bench.csv").open()))
    assert {row["stage"] for row in rows} == set(bench.STAGES)
    window = next(row for row in rows if (row["stage"], row["path"]) == ("window", "gradacc_fused"))
    assert int(window["floor_bytes"]) == 54 * 176
    for row in rows:
        assert f"{float(row['ms']):.3f}" in done.output
    picture = (here / "out" / "bench.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000


def test_command_takes_parameters_dtype_and_rule(monkeypatch, here):
    done = invoke(
        monkeypatch, here, "--model", "my_model_of_test:some", "--seconds", "0", "--dtype", "float32", "--optimizer",
        "sgd", "--k", "2", "--defer", "2",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "1 tensors, 128 elements, 128 in float32" in done.output
    rows = list(csv.DictReader((here / "bench_output" / "bench.csv").open()))
    window = next(row for row in rows if (row["stage"], row["path"]) == ("window", "torch"))
    assert int(window["bytes"]) == (12 + 12 + 12) * 128  # one add, norm and clip, sgd on fp32


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("my_model_of_test", "must be module:callable, got 'my_model_of_test'"),
        (":make", "must be module:callable"),
        ("no_such_module_of_ours:make", "there is no module 'no_such_module_of_ours' in"),
        ("importing:make", "there is no module 'no_such_package_of_ours' in what 'importing' imports"),
        ("my_model_of_test:made", "module 'my_model_of_test' has no 'made'"),
        ("my_model_of_test:CONSTANT", "'CONSTANT' is of type int and cannot be called"),
        ("my_model_of_test:frozen", "no parameter that requires a gradient (4 parameters in all)"),
        ("my_model_of_test:number", "must return a torch.nn.Module or an iterable of parameters, got int"),
        ("my_model_of_test:broken", "item 0 is of type int"),
    ],
)
def test_models_that_cannot_be_had_are_refused(monkeypatch, here, spec, message):
    done = invoke(monkeypatch, here, "--model", spec, "--seconds", "0")
    assert done.exit_code != 0
    assert message in str(done.exception)
    assert not (here / "bench_output").exists()


def test_defer_is_checked():
    assert model.defer_of("auto") == "auto" and model.defer_of("4") == 4
    for text in ("0", "-1", "many", "1.5"):
        with pytest.raises(model.ModelError, match="--defer must be auto or a positive number"):
            model.defer_of(text)


def test_parameters_of_other_devices_are_refused():
    with pytest.raises(model.ModelError, match="parameter 0 is on meta"):
        model.parameters(torch.nn.Linear(2, 2, device="meta"))


def test_copies_leave_the_model_alone():
    layer = torch.nn.Linear(3, 2)
    before = [param.detach().clone() for param in layer.parameters()]
    mine = model.parameters(layer, BF16)
    Fused(mine, 1, lr=0.5).window(make_grads(mine, 1))
    assert all(param.dtype == BF16 for param in mine)
    for param, kept in zip(layer.parameters(), before, strict=True):
        assert torch.equal(param, kept) and param.grad is None


@pytest.mark.parametrize("command", ["bench", "floor"])
def test_help_names_every_option(command):
    done = CliRunner().invoke(cli._app(), [command, "--help"], env={"COLUMNS": "160"})
    wanted = {
        "bench": ("--model", "--defer", "--optimizer", "--dtype", "--output", "--seconds"),
        "floor": ("--elements", "--grad-dtype", "--param-dtype", "--rule", "--closing"),
    }
    assert done.exit_code == 0 and all(option in done.output for option in wanted[command])
