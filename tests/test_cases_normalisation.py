"""CASES N and L3: the denominator belongs to the logical batch."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from models import Scalar, scalar

import gradacc_fused as gf

A, B = [1.0, 1.0, 1.0], [5.0]


def weight_of(tokens, kind):
    return torch.tensor(len(tokens)) if kind == "device" else len(tokens)


@pytest.mark.parametrize("kind", ["host", "device"])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("order", [(A, B), (B, A)], ids=["AB", "BA"])
def test_N1_tokens_of_uneven_micro_batches(backend, reduction, order, kind):
    model, opt = scalar(backend)
    with opt.window() as window:
        for tokens in order:
            loss = model.loss_sum(tokens) if reduction == "sum" else model.loss_mean(tokens)
            window.backward(loss, weight=weight_of(tokens, kind), reduction=reduction)
    assert model.value == -2.0


def test_N1_in_counting_mode(backend):
    model, opt = scalar(backend, accumulation_steps=2, weighting="given")
    for tokens in (A, B):
        model.loss_mean(tokens).backward()
        opt.step(weight=len(tokens))
    assert model.value == -2.0
    opt.backward(model.loss_sum(A), weight=3, reduction="sum")
    opt.step()
    opt.backward(model.loss_mean(B), weight=1)
    opt.step()
    assert model.value == -4.0


def test_N2_equal_micro_batches_and_the_logged_loss(backend):
    model, opt = scalar(backend, start=1.0, accumulation_steps=2, weighting="equal")
    for tokens in ([1.0], [1.0]):
        loss = model.loss_mean(tokens)
        loss.backward()
        opt.step(loss=loss)
    assert model.value == 0.0  # 1 - gradient 1
    assert float(opt.last_result.loss_mean) == 1.0  # the full batch's


def ignored(model, form):
    """The loss of a micro-batch whose labels are all ignored."""
    logits = model.p * torch.ones(4, 3)
    labels = torch.full((4,), -100)
    if form == "mean":
        return torch.nn.functional.cross_entropy(logits, labels)
    if form == "sum":
        return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    return (logits[:, 0] * 0.0).sum() / torch.zeros(())


@pytest.mark.parametrize("kind", ["host", "device"])
@pytest.mark.parametrize("form", ["mean", "sum", "zero-over-zero"])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_N3_a_micro_batch_without_active_tokens_is_not_read(backend, form, position, kind):
    model, opt = scalar(backend, start=1.0)
    pieces = [A, B]
    pieces.insert(position, [])
    with opt.window() as window:
        for tokens in pieces:
            reduction = "mean" if form == "mean" else "sum"
            loss = ignored(model, form) if not tokens else model.loss_sum(tokens)
            if tokens and reduction == "mean":
                loss = loss / len(tokens)
            window.backward(loss, weight=weight_of(tokens, kind), reduction=reduction, tokens=len(tokens))
    result = opt.last_result
    assert model.value == -1.0  # 1 - 2
    assert float(result.loss_sum) == 8.0 and float(result.loss_mean) == 2.0 and result.tokens == 4
    assert not result.skipped and float(result.total_norm) == 2.0


def test_N3_in_counting_mode_and_boundary_mode(backend):
    model, opt = scalar(backend, accumulation_steps=3, weighting="given")
    for tokens in (A, [], B):
        loss = model.loss_mean(tokens) if tokens else ignored(model, "mean")
        loss.backward()
        opt.step(weight=len(tokens))
    assert model.value == -2.0
    model, opt = scalar(backend)
    for tokens in (A, [], B):
        opt.backward(model.loss_mean(tokens) if tokens else ignored(model, "mean"), weight=len(tokens))
    opt.step()
    assert model.value == -2.0


def test_N3_nothing_but_ignored_micro_batches_makes_no_step(backend):
    model, opt = scalar(backend, start=1.0)
    with pytest.warns(UserWarning, match="total weight is 0"), opt.window() as window:
        window.backward(ignored(model, "mean"), weight=0)
        window.backward(ignored(model, "mean"), weight=0)
    assert model.value == 1.0 and opt.last_result.skipped
    with opt.window() as window:
        window.backward(model.loss_sum(A), weight=3, reduction="sum")
    assert model.value == 0.0


def test_N4_active_tokens_three_none_one(backend):
    model, opt = scalar(backend)
    with opt.window() as window:
        for tokens in ([1.0, 2.0, 4.0], [], [1.0]):
            window.backward(model.loss_sum(tokens) + 0 * model.p.sum(), weight=len(tokens), reduction="sum")
    assert model.value == -2.0


def test_N7_nobody_declared_the_denominator(backend):
    with pytest.raises(ValueError, match=r"accumulation_steps=4 needs weighting.*'equal'.*'given'"):
        scalar(backend, accumulation_steps=4)
    model, opt = scalar(backend)
    with (
        pytest.raises(gf.DenominatorError, match=r"micro-batch 1 has no weight.*weight=<active tokens>"),
        opt.window() as window,
    ):
        window.backward(model.loss_mean(A))
        window.backward(model.loss_mean(B))
    assert model.value == 0.0
    with pytest.raises(gf.DenominatorError, match="micro-batch 0 has no weight"), opt.window() as window:
        window.backward(model.loss_mean(A))
        window.backward(model.loss_mean(B), weight=1)
    with pytest.raises(gf.DenominatorError, match="micro-batch 1 has no weight"), opt.window() as window:
        window.backward(model.loss_mean(A), weight=3)
        window.backward(model.loss_mean(B))
    assert model.value == 0.0
    model, opt = scalar(backend, accumulation_steps=2, weighting="given")
    model.loss_mean(A).backward()
    with pytest.raises(gf.DenominatorError, match="micro-batch 0 has no weight"):
        opt.step()
    opt.step(weight=3)  # nothing was lost by the refused call
    model.loss_mean(B).backward()
    opt.step(weight=1)
    assert model.value == -2.0
    model, opt = scalar(backend)
    opt.backward(model.loss_mean(A))
    with pytest.raises(gf.DenominatorError, match="micro-batch 1 has no weight"):
        opt.backward(model.loss_mean(B))


def test_a_single_micro_batch_needs_no_weight(backend):
    model, opt = scalar(backend)
    with opt.window() as window:
        window.backward(model.loss_mean(A + B))
    assert model.value == -2.0


def test_N7_a_plan_and_a_loss_that_nobody_declared(backend):
    model, opt = scalar(backend)
    planned = gf.plan_pieces([3, 1], counts={"active_tokens": [1, 1, 1, 1]})
    with pytest.raises(gf.DenominatorError, match="(?s)nobody said what divides 'loss'.*'active_tokens'.*a pure sum"):  # noqa: SIM117
        with opt.window(planned) as window:
            window.backward(model.loss_sum(A), piece=planned.pieces[0])
    assert model.value == 0.0


def test_N5_an_auxiliary_loss_per_window_or_per_token(backend):
    """Coefficient 0.1, values 2 and 4: their mean 0.3; weighted by tokens (3, 1) 0.25. Beside a cross entropy of 2."""
    planned = gf.plan_pieces([3, 1], counts={"active_tokens": [1, 1, 1, 1]})
    for auxiliary, expected in (
        (gf.Term("micro_batches", 0.1), 0.3),
        (gf.Term("active_tokens", 0.1, reduction="mean"), 0.25),
    ):
        model, opt = scalar(backend)
        with opt.window(planned, terms={"ce": "active_tokens", "aux": auxiliary}) as window:
            for piece, tokens, value in zip(planned.pieces, (A, B), (2.0, 4.0), strict=True):
                window.backward({"ce": model.loss_sum(tokens), "aux": model.p.sum() * value}, piece=piece)
        assert model.value == pytest.approx(-(2.0 + expected), rel=1e-6)


@pytest.mark.parametrize("sizes", [[2], [1, 1]])
def test_N6_per_token_or_per_sequence_and_never_by_the_split(backend, sizes):
    """Sequences of 1 and 3 tokens with token gradients [4] and [0, 0, 0]: 4/4 per token, (4 + 0)/2 per sequence."""
    sequences = [[4.0], [0.0, 0.0, 0.0]]
    planned = gf.plan_pieces(sizes, counts={"active_tokens": [1, 3]})
    for denominator, expected in (("active_tokens", 1.0), ("samples", 2.0)):
        model, opt = scalar(backend)
        with opt.window(planned, terms=denominator) as window:
            for piece in planned.pieces:
                mine = [sequences[sample] for sample in piece.samples]
                of_sequence = model.loss_sum if denominator == "active_tokens" else model.loss_mean
                window.backward(sum(of_sequence(tokens) for tokens in mine), piece=piece)
        assert model.value == -expected


@pytest.mark.parametrize(("sizes", "ratio"), [([2, 2], 2.0), ([1, 1, 1, 1], 4.0)])
def test_N10_a_model_that_ignores_the_token_count(sizes, ratio):
    """It takes the count of the logical batch and returns its own piece's mean: k times too large."""
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])

    class Model(Scalar):
        def forward(self, piece, token_count):
            return self.loss_mean(x[list(piece.samples)])  # should be the sum over token_count

    model = Model()
    planned = gf.plan_pieces(sizes, counts={"active_tokens": [1] * 4})
    count = planned.totals["total_active_tokens"]
    report = gf.check_split(lambda piece: model(piece, count), planned, model, terms=gf.Term(None))
    assert report.ratio == ratio and not report.equal and report.first == "p"
    assert "the number of pieces: each piece's loss is divided by its own count" in str(report)
    right = gf.check_split(lambda piece: model.loss_sum(x[list(piece.samples)]), planned, model, terms="active_tokens")
    assert right.equal and right.ratio == 1.0 and right.loss_whole == right.loss_split
    assert "the split does not matter" in str(right)
    twice = gf.check_split(
        lambda piece: model.loss_sum(x[list(piece.samples)]) / (1 if len(piece.samples) == 4 else len(sizes)),
        planned, model, terms="samples",
    )  # fmt: skip
    assert twice.ratio == 1 / ratio and "divides by it once more" in str(twice)
    assert model.p.grad is None


def test_N10_both_runs_see_the_same_noise_and_leave_nothing_behind():
    """Packed shapes, dropout, BatchNorm's buffers and a term across samples: what differs is the split alone."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1)).eval()
    noise, shapes = [], []

    def fn(piece):
        shapes.append(piece.shape)
        noise.append(float(torch.rand(())))
        rows = torch.tensor(piece.samples, dtype=torch.float32)
        return {"c": model.train()(torch.stack([rows, -rows], 1).repeat(2, 1)).square().sum()}

    before = [torch.get_rng_state(), *(buffer.clone() for buffer in model.buffers())]
    planned = gf.plan_batch([2, 3, 4], limits=gf.Limits(max_tokens=5, layout="packed"))
    report = gf.check_split(fn, planned, model, terms={"c": gf.Term("samples", across_samples=True)})
    assert shapes == [(1, 9), (1, 5), (1, 4)] and noise[0] == noise[1]
    assert not report.equal and report.first
    after = [torch.get_rng_state(), *model.buffers()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    with pytest.raises(ValueError, match="model must have a parameter that requires grad"):
        gf.check_split(fn, planned, torch.nn.ReLU())


def test_N12_tokens_of_the_mask_or_of_an_advantage_are_an_explicit_choice(backend):
    """Three tokens in the mask, of which one has an advantage of exactly 0; a quadratic term lives on the mask."""
    advantages, mask = [[2.0, 0.0], [4.0, 9.0]], [[1, 1], [1, 0]]
    with_advantage = [
        sum(m and a != 0 for m, a in zip(*rows, strict=True)) for rows in zip(mask, advantages, strict=True)
    ]
    counts = {"active_tokens": [sum(row) for row in mask], "advantage_tokens": with_advantage}
    planned = gf.plan_pieces([1, 1], counts=counts)
    assert planned.totals == {"total_samples": 2.0, "total_active_tokens": 3.0, "total_advantage_tokens": 2.0}
    for denominator, expected in (("active_tokens", 6.0 / 3), ("advantage_tokens", 6.0 / 2)):
        model, opt = scalar(backend)
        with opt.window(planned, terms={"policy": denominator, "quadratic": "active_tokens"}) as window:
            for piece in planned.pieces:
                (sample,) = piece.samples
                masked = [a * m for a, m in zip(advantages[sample], mask[sample], strict=True)]
                quadratic = model.p.sum() * 0.5 * sum(mask[sample])
                window.backward({"policy": model.loss_sum(masked), "quadratic": quadratic}, piece=piece)
        assert model.value == pytest.approx(-(expected + 0.5), rel=1e-6)


@pytest.mark.parametrize("k", [2, 4])
def test_N8_a_host_that_divides_too_is_declared(backend, k):
    pieces = [A, B] * (k // 2)
    model, opt = scalar(backend, accumulation_steps=k, weighting="given", host_scale=1 / k)
    for tokens in pieces:
        loss = model.loss_mean(tokens) / k
        loss.backward()
        opt.step(weight=len(tokens), loss=loss)
    assert model.value == -2.0
    model, opt = scalar(backend, host_scale=1 / k, start=1.0)
    with opt.window() as window:
        for tokens in pieces:
            window.backward(model.loss_sum(tokens) / k, weight=len(tokens), reduction="sum")
    assert model.value == -1.0
    assert float(opt.last_result.loss_mean) == 2.0 and float(opt.last_result.total_norm) == 2.0


def test_N9_the_order_of_micro_batches_does_not_matter(backend):
    values = set()
    for order in itertools.permutations([[1.0], [2.0, 4.0], [8.0, 16.0, 1.0]]):
        model, opt = scalar(backend)
        with opt.window() as window:
            for samples in order:
                window.backward(model.loss_mean(samples), weight=len(samples))
        values.add(model.value)
    assert max(values) - min(values) <= 1e-6 * 32 / 6
    assert abs(max(values) + 32 / 6) <= 1e-6 * 32 / 6


def test_N11_running_mean_form_and_sum_form(backend):
    """n = (3, 0, 1): a running mean, m += (g - m) * n / total so far, is the same gradient."""
    pieces = [[1.0, 2.5, 3.25], [], [7.5]]
    running, seen = 0.0, 0
    for tokens in pieces:
        seen += len(tokens)
        if tokens:
            running += (sum(tokens) / len(tokens) - running) * len(tokens) / seen
    model, opt = scalar(backend)
    with opt.window() as window:
        for tokens in pieces:
            loss = model.loss_mean(tokens) if tokens else ignored(model, "mean")
            window.backward(loss, weight=len(tokens))
    assert math.isclose(-model.value, running, rel_tol=1e-6)


def test_L3_one_record_per_real_step(backend):
    model, opt = scalar(backend, start=1.0)
    with opt.window() as window:
        for tokens in (A, B):
            window.backward(
                model.loss_sum(tokens), weight=len(tokens), reduction="sum", samples=1, tokens=len(tokens)
            )  # fmt: skip
    result = opt.last_result
    assert float(result.loss_sum) == 8.0
    assert result.tokens == 4 and result.samples == 2 and result.effective_batch_size == 2
    assert float(result.loss_mean) == 2.0
    assert float(result.weight_sum) == 4.0 and result.micro_batches == 2 and result.lr == (1.0,)
    first = float(result.total_norm)
    with opt.window() as window:
        window.backward(model.loss_sum([7.0]), weight=1, reduction="sum")
    assert opt.last_result is not result and float(result.total_norm) == first == 2.0  # a result outlives the next step


def test_L3_what_was_not_given_is_none(backend):
    model, opt = scalar(backend, accumulation_steps=2, weighting="equal")
    for number in range(2):
        loss = model.loss_mean([1.0])
        loss.backward()
        opt.step(loss=loss if number else None)
    result = opt.last_result
    assert result.loss_sum is None and result.loss_mean is None and result.samples is None and result.tokens is None


@pytest.mark.parametrize("weight", [-1, math.nan, math.inf, "3", torch.ones(2)], ids=str)
def test_a_weight_that_is_no_weight_is_refused(backend, weight):
    model, opt = scalar(backend)
    expected = "must be a finite number >= 0|must have one element"
    with pytest.raises(gf.DenominatorError, match=expected), opt.window() as window:
        window.backward(model.loss_mean(A), weight=weight if weight != "3" else "three")
    assert model.value == 0.0 and model.p.grad is None
