"""The studies: what they time is what they say, their paths compute the same, and their files have what was printed."""

from __future__ import annotations

import csv
import json
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench is not installed

from torch.profiler import ProfilerActivity, profile

from bench import collector_cost, end_to_end, scaling, study
from bench.loops import LR, Loop, make_loops, make_pieces
from bench.paths import MAX_NORM
from bench.points import GRADIENTS, PASSES, WINDOW, Point, make_source, ours, stock, taking, time_point
from gradacc_fused.demo.model import GPT
from gradacc_fused.engine import Engine

LONGEST, K = 24, 3
NAP = 0.03  # seconds


def tiny_model(dtype=torch.float32):
    torch.manual_seed(0)
    return GPT(width=16, layers=1, heads=2, longest=LONGEST).to(dtype)


def ms(seconds):
    return pytest.approx(1e3 * seconds)


def test_take_turns_calls_each_once_a_round_and_returns_what_it_returned():
    calls = []

    def sample(name):
        return lambda: calls.append(name) or (name, len(calls))

    taken = study.take_turns([sample("a"), sample("b"), sample("c")], repeats=6, warm_up=2)
    assert calls[:6] == ["a", "a", "b", "b", "c", "c"]
    rounds = [calls[start : start + 3] for start in range(6, len(calls), 3)]
    assert [sorted(names) for names in rounds] == [["a", "b", "c"]] * 6
    assert len(set(map(tuple, rounds))) > 1  # the order changes
    assert [[name for name, _ in samples] for samples in taken] == [["a"] * 6, ["b"] * 6, ["c"] * 6]


def test_take_turns_goes_on_for_its_time(clock):
    taken = study.take_turns([lambda: time.sleep(0.25)], repeats=1, seconds=2.5, warm_up=0)
    assert len(taken[0]) == 10


def test_spread():
    assert study.Spread.of([5.0, 1.0, 3.0, 2.0, 4.0]) == study.Spread(3.0, 2.0, 4.0)
    assert study.Spread.of([7.0]) == study.Spread(7.0, 7.0, 7.0)


def test_a_missing_library_is_named_with_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    study.require(plot=False)
    with pytest.raises(SystemExit, match=r"matplotlib.*gradacc_fused\[bench\]"):
        study.require(plot=True)


# -- end to end ----------------------------------------------------------------------------------------------------


def test_pieces_are_uneven_text_of_one_sequence():
    pieces = make_pieces(LONGEST, 4)
    assert [piece.inputs.shape[0] for piece in pieces] == [1] * 4
    for piece in pieces:
        assert LONGEST // 2 <= piece.tokens == piece.labels.numel() <= LONGEST
        assert torch.equal(piece.inputs[0, 1:], piece.labels[0, :-1])


def exact(windows):
    """Change of every parameter in float64: AdamW on the gradient of the whole window's mean loss."""
    model = tiny_model().double()
    pieces = make_pieces(LONGEST, K)
    start = [param.detach().clone() for param in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    for _ in range(windows):
        optimizer.zero_grad()
        loss = sum(model.loss_sum(piece.inputs, piece.labels) for piece in pieces)
        (loss / sum(piece.tokens for piece in pieces)).backward()
        assert float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)) > MAX_NORM  # it clips
        optimizer.step()
    return start, [param.detach() for param in model.parameters()]


def flat(tensors):
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


@pytest.mark.parametrize("index", [1, 2, 3], ids=["ours-defer", "ours-1", "stock"])
def test_loops_follow_adamw_on_the_whole_window(index):
    loop = make_loops(tiny_model(), make_pieces(LONGEST, K))[index]
    for _ in range(3):
        loop.window()
    start, end = map(flat, exact(3))
    assert (flat(loop.params) - end).norm() < 1e-4 * (end - start).norm()
    assert all(param.grad is None for param in loop.params)


@pytest.mark.parametrize("native", [False, True], ids=["float32", "native"])
def test_bf16_loops_end_with_equal_parameters(native):
    alone, *both, theirs = make_loops(tiny_model(torch.bfloat16), make_pieces(LONGEST, K), native)
    start = flat(alone.params)
    for loop in (alone, *both, theirs):
        loop.window()
        assert all(param.grad is None for param in loop.params)
    assert torch.equal(flat(alone.params), start)
    for mine in both:
        assert end_to_end.relative_difference(alone.model, mine, theirs) < 1e-5
        for param, main_param, other in zip(mine.params, mine.main_params, theirs.params, strict=True):
            assert torch.equal(param, main_param.bfloat16())
            torch.testing.assert_close(param, other, rtol=2**-7, atol=0)  # one step of bf16


class Sleepy(Loop):
    """Forward and backward alone, with a sleep after the last micro-batch, and one in every forward."""

    def __init__(self, name, after, in_forward=0.0):
        super().__init__(tiny_model(), make_pieces(LONGEST, K))
        self.name, self.after, self.in_forward = name, after, in_forward

    def loss_sum(self, piece):
        loss = super().loss_sum(piece)
        with self.model_watch:
            time.sleep(self.in_forward)
        self.model_watch.calls -= 1
        return loss

    def window(self):
        super().window()
        time.sleep(self.after)


def test_a_sleep_is_measured_as_overhead(clock):
    loops = [Sleepy("alone", 0.0), Sleepy("stock", 2 * NAP), Sleepy("ours", NAP)]
    alone, slow, fast = end_to_end.measure("tiny", loops, 5)
    assert alone.overhead_ms is alone.optimizer_ms is alone.overhead_to_stock is None
    for field in ("overhead", "optimizer"):
        assert getattr(fast, f"{field}_ms") == ms(NAP)
        assert getattr(slow, f"{field}_ms") == ms(2 * NAP)
        assert getattr(fast, f"{field}_to_stock") == pytest.approx(0.5)
        assert getattr(slow, f"{field}_to_stock") == 1.0
    assert fast.window_ms == fast.outside_ms == ms(NAP)
    assert (fast.k, fast.tokens) == (K, sum(piece.tokens for piece in make_pieces(LONGEST, K)))


def test_the_stopwatch_leaves_forward_and_backward_out(clock):
    sample = end_to_end.time_window(Sleepy("held", 2 * NAP, NAP))
    assert sample.window == ms((K + 2) * NAP)
    assert sample.outside == ms(2 * NAP)


def test_a_backward_that_the_stopwatch_missed_is_an_error():
    loop = Loop(tiny_model(), make_pieces(LONGEST, K))
    original = torch.autograd.backward
    loop.window = lambda: loop.loss_sum(loop.pieces[0]).backward()
    with pytest.raises(RuntimeError, match="saw 2 forwards and backwards of 6"):
        end_to_end.time_window(loop)
    assert torch.autograd.backward is original


def test_no_share_of_an_overhead_lost_in_noise():
    mine = study.Spread(1.0, 0.5, 2.0)
    assert end_to_end.share(mine, study.Spread(4.0, 0.1, 9.0)) == 0.25
    assert end_to_end.share(mine, study.Spread(4.0, -0.1, 9.0)) is None


def test_shapes_have_all_elements():
    for elements, tensors in ((10_000, 20), (1003, 10), (5, 5)):
        shapes = Point(elements, tensors, 1).shapes
        assert len(shapes) == tensors
        assert sum(shape[0] for shape in shapes) == elements


def sampled(kind, point, windows=3):
    path = kind.build(point)
    grads = [make_source(point.shapes)] * point.k
    return path, [path.sample(grads) for _ in range(windows)]


def test_ours_and_stock_end_with_equal_parameters():
    point = Point(3001, 7, 3)
    mine, deferred, theirs = (sampled(kind, point)[0].path for kind in (ours(1, 3), ours(4, 3), stock()))
    start = torch.cat([param.flatten() for param in ours(1, 3).build(point).path.params])
    assert not torch.equal(start, torch.cat([param.flatten() for param in mine.params]))
    for path in (mine, deferred):
        for param, other in zip(path.params, theirs.params, strict=True):
            torch.testing.assert_close(param, other, rtol=2**-7, atol=1e-6)


@pytest.mark.compiled
@pytest.mark.parametrize(("m", "flushes"), [(1, 2), (2, 1), (4, 0)])
def test_a_sleep_in_a_stage_is_that_stages_time(monkeypatch, clock, m, flushes):
    naps = {"flush": 0.02, "measure": 0.03, "update": 0.05}
    for method, nap in naps.items():
        original = getattr(Engine, method)

        def slow(self, *arguments, original=original, nap=nap, **keywords):
            time.sleep(nap)
            return original(self, *arguments, **keywords)

        monkeypatch.setattr(Engine, method, slow)
    samples = sampled(ours(m, 3), Point(100, 5, 3))[1]
    for sample in samples:
        assert sample[PASSES] == pytest.approx(sum(sample[s] for s in ("flush", "closing", "clip", "update")))
        assert sample[WINDOW] == pytest.approx(sample[PASSES] + sample[GRADIENTS])
        assert sample["flush"] == ms(flushes * naps["flush"])
        assert sample["closing"] == ms(naps["measure"])
        assert sample["update"] == ms(naps["update"])
        assert sample["clip"] == 0.0
        assert sample[GRADIENTS] == pytest.approx(0.0, abs=1e-9)


def test_a_stage_that_did_not_run_is_an_error():
    point = Point(100, 5, 3)
    path = ours(4, 3).build(point)
    with pytest.raises(RuntimeError, match="measure ran 0 times in a window, not 1"):
        path.sample([make_source(point.shapes)] * 2)


@pytest.mark.compiled
def test_operator_events_do_not_grow_with_the_tensors():
    counts = []
    for tensors in (5, 60):
        point = Point(1000, tensors, K)
        path, _ = sampled(ours(1, K), point)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            path.sample([make_source(point.shapes)] * K)
        counts.append(sum(event.name.startswith("gradacc_fused::") for event in profiler.events()))
    assert counts[0] == counts[1] == K + 2  # K passes, clip, update


def test_memory_decides_who_is_measured_and_how():
    point = Point(1000, 4, 2)
    kinds = [ours(1, 2), stock(), taking(2)]
    assert [kind.bytes_per_element for kind in kinds] == [20, 20, 6]
    samples, skipped, in_turns = time_point(point, kinds, 5, None)
    assert {path: len(rounds) for path, rounds in samples.items()} == dict.fromkeys((k.name for k in kinds), 5)
    assert (skipped, in_turns) == ({}, True)
    samples, skipped, in_turns = time_point(point, kinds, 5, 30_000)  # one fits, not all
    assert {path: len(rounds) for path, rounds in samples.items()} == dict.fromkeys((k.name for k in kinds), 6)
    assert (skipped, in_turns) == ({}, False)
    samples, skipped, _ = time_point(point, kinds, 5, 20_000)
    assert list(samples) == ["taking in Python"]
    assert list(skipped) == ["ours, m=1", "stock"]
    assert "22 bytes per element" in skipped["stock"]
    samples, skipped, _ = time_point(point, kinds, 5, 0)
    assert (samples, len(skipped)) == ({}, 3)
    assert all(param.grad is None for param in sampled(taking(2), point)[0].path.params)


def test_rows_of_a_curve():
    done = scaling.Study(repeats=5, largest=2000)
    done.elements([1000, 2000, 4000])
    done.tensors([2, 20])
    done.k([1, 3])
    assert [(s.elements, s.path) for s in done.skipped] == [(4000, "ours, m=4"), (4000, "stock")]
    for row in done.rows:
        assert row.ns_per_element == pytest.approx(row.ms * 1e6 / row.elements)
        assert row.low_ms <= row.ms <= row.high_ms
        assert row.in_turns
        if row.path == "stock":
            assert (row.stage, row.to_stock) == (WINDOW, 1.0)
    windows = [row for row in done.rows if row.stage == WINDOW]
    xs = {
        curve: [getattr(row, curve) for row in windows if row.curve == curve] for curve in ("elements", "tensors", "k")
    }
    assert xs == {"elements": [1000] * 2 + [2000] * 2, "tensors": [2] * 4 + [20] * 4, "k": [1] * 3 + [3] * 3}
    first, second = (row for row in windows if row.curve == "k" and row.path == "ours, m=1")
    assert (first.to_first, second.to_first) == (1.0, second.ms / first.ms)


def test_threads_are_measured_in_processes_of_their_own(monkeypatch):
    monkeypatch.setattr(scaling, "ELEMENTS_OF_THREADS", (500, 1_000_000))
    done = scaling.Study(repeats=5, largest=1000)
    done.threads(counts=[1], processes=1)
    assert {(row.threads, row.elements, row.path) for row in done.rows} == {(1, 500, "ours, m=4"), (1, 500, "stock")}
    assert all(row.ms > 0 for row in done.rows if row.stage == WINDOW)
    assert scaling.thread_counts()[0] == 1


def source_and_taker(make):
    grads = make_source([(1,)] * 6)
    taker = make([torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16)) for _ in grads])
    torch.autograd.backward(taker.params, grads)
    return grads, taker


@pytest.mark.parametrize("make", [collector_cost.PlainLoop, collector_cost.CheckedLoop])
def test_the_loops_take_all_gradients(make):
    grads, taker = source_and_taker(make)
    if make is collector_cost.CheckedLoop:
        taker.params[2].grad = None
    taker.take()
    assert all(param.grad is None for param in taker.params)
    for index, (grad, held) in enumerate(zip(grads, taker.held[0], strict=True)):
        missing = index == 2 and make is collector_cost.CheckedLoop
        assert held is None if missing else torch.equal(held, grad)
    taker.drop()
    assert taker.held == []


@pytest.mark.compiled
def test_our_taking_holds_all_and_flushes_nothing():
    grads, taker = source_and_taker(collector_cost.Ours)
    taker.take()
    assert all(param.grad is None for param in taker.params)
    norm = float(torch.stack(grads).double().norm())
    assert float(taker.optimizer.flush().total_norm) == pytest.approx(norm, rel=1e-6)
    assert collector_cost.operator_events(taker, grads) == 0
    flushing = collector_cost.Ours([torch.nn.Parameter(param.detach().clone()) for param in taker.params])
    flushing.take = lambda: (flushing.optimizer.step(), flushing.optimizer.flush())
    assert collector_cost.operator_events(flushing, grads) >= 2 * collector_cost.WINDOW  # so the count can see them


@pytest.mark.compiled
def test_a_sleep_is_measured_as_taking(monkeypatch, clock):
    def slowed(kind, nap):
        class Slow(kind):
            def take(self):
                super().take()
                time.sleep(nap)

        return Slow

    takers = slowed(collector_cost.Ours, 0.002), slowed(collector_cost.PlainLoop, 0.005)
    monkeypatch.setattr(collector_cost, "TAKERS", takers)
    mine, slow = collector_cost.measure(10, 5)
    assert (mine.us, slow.us) == pytest.approx((2000.0, 5000.0))
    assert slow.ns_per_parameter == pytest.approx(500_000.0)
    assert slow.ours_is_faster_by == pytest.approx(2.5)
    assert mine.ours_is_faster_by == 1.0


# -- programs ------------------------------------------------------------------------------------------------------


def check_files(rows, folder, pictures, printed):
    written = json.loads((folder / "rows.json").read_text())
    environment = written["environment"]
    assert environment["torch"] == torch.__version__
    assert environment["threads"] == torch.get_num_threads()
    assert {"machine", "gradacc_fused", "instruction_set"} <= set(environment)
    assert written["rows"] == [vars(row) for row in rows]
    table = list(csv.DictReader((folder / "rows.csv").open()))
    assert [line["path"] for line in table] == [row.path for row in rows]
    assert {line["env_torch"] for line in table} == {torch.__version__}
    assert sorted(file.name for file in (folder / "plots").iterdir()) == pictures
    for picture in pictures:
        assert (folder / "plots" / picture).read_bytes().startswith(b"\x89PNG")
    assert f"torch: {torch.__version__}" in printed
    return written


def arguments(folder):
    files = ["--json", str(folder / "rows.json"), "--csv", str(folder / "rows.csv"), "--plot", str(folder / "plots")]
    return ["--quick", *files]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_end_to_end(tmp_path, capsys, monkeypatch, dtype):
    monkeypatch.setattr(end_to_end, "SIZES", {"0.25M": end_to_end.Size(16, 1, 2, LONGEST)})
    rows = end_to_end.main([*arguments(tmp_path), "--size", "0.25M", "--dtype", dtype])
    pictures = ["end_to_end_optimizer.png", "end_to_end_overhead.png"]
    written = check_files(rows, tmp_path, pictures, capsys.readouterr().out)
    assert written["difference_of_trainings"]["0.25M"] < 0.02
    assert [row.path for row in rows][::3] == ["forward/backward", "stock"]
    assert {row.dtype for row in rows} == {dtype}


def test_scaling(tmp_path, capsys):
    rows = scaling.main([*arguments(tmp_path), "--curve", "elements", "--curve", "k", "--largest", "10000"])
    printed = capsys.readouterr().out
    written = check_files(rows, tmp_path, ["scaling_elements.png", "scaling_k.png"], printed)
    assert written["skipped"][0]["reason"] == "more than 10,000 elements"
    assert "skipped: elements, 500,000,000 elements, stock" in printed


@pytest.mark.compiled
def test_collector_cost(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(collector_cost, "QUICK_COUNTS", (3, 5))
    rows = collector_cost.main(arguments(tmp_path))
    check_files(rows, tmp_path, ["collector_cost.png"], capsys.readouterr().out)
    assert [row.parameters for row in rows] == [3] * 3 + [5] * 3


def test_too_few_repeats_are_refused(capsys):
    with pytest.raises(SystemExit):
        scaling.main(["--repeats", "4"])
    assert "at least 5, got 4" in capsys.readouterr().err
