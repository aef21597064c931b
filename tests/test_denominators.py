"""Each loss term is divided by what it declares, before backward (early) or at the boundary (late)."""

from __future__ import annotations

import math

import pytest
import torch
from models import Scalar, scalar
from planned import TERMS, Net, gradient_difference, losses_of, plan, sgd, values, whole_gradient

import gradacc_fused as gf

SPLITS = (1, 3, 5, 12)


@pytest.mark.parametrize("max_samples", SPLITS)
@pytest.mark.parametrize("strategy", ["in_order", "balanced"])
def test_terms_of_different_denominators_are_those_of_the_whole_batch(backend, max_samples, strategy):
    model = Net()
    opt, before, truth = sgd(model, backend), values(model), whole_gradient(model)
    planned = plan(max_samples, strategy=strategy)
    with opt.window(planned, terms=TERMS) as window:
        for piece in planned.pieces:
            window.backward(losses_of(model, piece.samples), piece=piece)
    assert gradient_difference(model, before, truth) < 1e-6
    result = opt.last_result
    assert float(result.loss_mean) == pytest.approx(float(truth["loss"]), rel=1e-6)
    assert result.loss_sum is None  # there is no one denominator
    total = sum(float(value) * declared(name).coefficient for name, value in result.terms.items())
    assert total == pytest.approx(float(truth["loss"]), rel=1e-6)
    assert (result.samples, result.tokens) == (12, 43)


def declared(name):
    return TERMS[name] if isinstance(TERMS[name], gf.Term) else gf.Term(TERMS[name])


@pytest.mark.parametrize("terms", ["total_active_tokens", {"a": "active_tokens", "b": gf.Term("active_tokens", 0.5)}])
@pytest.mark.parametrize("kind", ["number", "tensor"])
def test_early_and_late_agree_bit_for_bit_where_both_apply(backend, terms, kind):
    found = []
    for early in (True, False):
        model = Net()
        opt, planned = sgd(model, backend, max_grad_norm=0.1), plan(4)
        with opt.window(planned if early else None, terms=terms) as window:
            for piece in planned.pieces:
                losses = losses_of(model, piece.samples)
                loss = (
                    losses["cross_entropy"]
                    if isinstance(terms, str)
                    else {"a": losses["cross_entropy"], "b": losses["decay"]}
                )
                count = piece.counts["active_tokens"]
                counts = {"active_tokens": count if kind == "number" else torch.tensor(count)}
                window.backward(loss, piece=piece, counts=counts) if early else window.backward(loss, counts=counts)
        result = opt.last_result
        assert float(result.weight_sum) == 43 and float(result.loss_sum) == pytest.approx(float(result.loss_mean) * 43)
        found.append((*values(model).values(), result.total_norm, result.loss_mean, *result.terms.values()))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_mean_losses_are_declared(backend):
    """A mean over what the piece counts: the same logical batch."""
    changes = []
    for reduction in ("sum", "mean"):
        model, opt = scalar(backend)
        planned = gf.plan_pieces([3, 1])
        with opt.window(planned, terms=gf.Term("samples", reduction=reduction)) as window:
            for piece, x in zip(planned.pieces, ([1.0, 1, 1], [5.0]), strict=True):
                window.backward(model.loss_sum(x) if reduction == "sum" else model.loss_mean(x), piece=piece)
        changes.append(model.value)
    assert changes == [-2.0, -2.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_low_precision_do_not_overflow(backend, dtype):
    """4096 tokens whose gradients sum to 131072 in a piece: beyond fp16; the early factor is a power of two."""
    model = Scalar().to(dtype)
    opt = gf.GradAccumOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), backend=backend)
    planned = gf.plan_pieces([1, 1], counts={"active_tokens": [4096, 4096]})
    with opt.window(planned, terms="active_tokens") as window:
        for piece in planned.pieces:
            window.backward(model.p.sum() * 32 * 4096.0 if dtype is torch.bfloat16 else Big.apply(model.p), piece=piece)
    assert not opt.last_result.skipped and model.value == -32.0


class Big(torch.autograd.Function):
    """131072 * p, in fp32: the factor that reaches backward is multiplied before it is cast."""

    @staticmethod
    def forward(ctx, p):
        return p.float().sum() * 131072.0

    @staticmethod
    def backward(ctx, grad):
        return (grad * 131072.0).to(torch.float16).reshape(1)


def test_a_piece_without_a_count_is_not_read_for_that_term(backend):
    """The second piece has no active token: its cross entropy is 0/0, its KL counts."""
    model, opt = scalar(backend)
    planned = gf.plan_pieces([1, 1], counts={"active_tokens": [2, 0]})
    with opt.window(planned, terms={"ce": gf.Term("active_tokens", reduction="mean"), "kl": "samples"}) as window:
        window.backward({"ce": model.loss_mean([2, 4]), "kl": model.loss_sum([1])}, piece=planned.pieces[0])
        window.backward({"ce": model.loss_sum([1]) * math.nan, "kl": model.loss_sum([3])}, piece=planned.pieces[1])
    assert model.value == -(3.0 + 2.0)
    assert float(opt.last_result.terms["ce"]) == 0.0 and not opt.last_result.skipped


def test_a_count_of_zero_in_all_makes_no_step_and_says_so(backend):
    model, opt = scalar(backend, start=1.0)
    planned = gf.plan_pieces([1, 1], counts={"active_tokens": [0, 0]})
    with pytest.warns(UserWarning, match="total weight is 0"), opt.window(planned, terms="active_tokens") as window:
        for piece in planned.pieces:
            window.backward(model.loss_sum([1]) * math.nan, piece=piece)
    assert model.value == 1.0 and opt.last_result.skipped


def test_the_first_term_may_have_no_count_at_all(backend):
    model, opt = scalar(backend)
    planned = gf.plan_pieces([1, 1], counts={"active_tokens": [0, 0]})
    with opt.window(planned, terms={"ce": "active_tokens", "kl": "samples"}) as window:
        for piece in planned.pieces:
            window.backward({"ce": model.loss_sum([1]) * math.nan, "kl": model.loss_sum([4])}, piece=piece)
    assert model.value == -4.0


def test_padding_pieces_count_nothing(backend):
    """One sample for two ranks: the second rank's piece repeats it with weight 0, its pure sum too."""
    model, opt = scalar(backend, start=1.0)
    planned = gf.plan_batch([3], counts={"active_tokens": [2]}, world_size=2)
    terms = {"ce": "active_tokens", "decay": None}
    with opt.window(planned, terms=terms, rank=1) as window:
        piece = planned.of_rank(1)[0]
        window.backward({"ce": model.loss_sum([9]), "decay": model.loss_sum([9])}, piece=piece)
    assert model.value == 1.0 and float(opt.last_result.loss_mean) == 0.0


def test_a_loss_scale_is_taken_off(backend):
    model, opt = scalar(backend, host_scale=0.5)
    planned = gf.plan_pieces([3, 1])
    with opt.window(planned, terms="samples") as window:
        for piece, x in zip(planned.pieces, ([1.0, 1, 1], [5.0]), strict=True):
            window.backward(model.loss_sum(x) * 0.5 * 1024, piece=piece, loss_scale=1024.0)
    assert model.value == -2.0 and float(opt.last_result.total_norm) == 2.0


def opened(opt, *args, **options):
    return opt.window(*args, **options).__enter__()


TWO = {"ce": "active_tokens", "kl": "samples"}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda m, o, p: opened(o, p).backward({"ce": m.p.sum(), "kl": m.p.sum()}, piece=p.pieces[0]),
            gf.DenominatorError,
            r"nobody said what divides 'ce', 'kl', and the logical batch has 3 pieces.*'samples', 'active_tokens', "
            r"'advantage_tokens'.*'micro_batches'.*None \(a pure sum\)",
        ),
        (
            lambda m, o, p: opened(o, p).backward(m.loss_sum([1]), piece=p.pieces[0]),
            gf.DenominatorError,
            "nobody said what divides 'loss'",
        ),
        (
            lambda m, o, p: opened(o, p, terms={"ce": None}).backward({"ce": m.p, "z": m.p}, piece=p.pieces[0]),
            gf.DenominatorError,
            "nobody said what divides 'z'",
        ),
        (
            lambda m, o, p: opened(o, p, terms=TWO).backward({"ce": m.p.sum()}, piece=p.pieces[0]),
            gf.DenominatorError,
            "term 'kl' was declared and is not among the losses",
        ),
        (
            lambda m, o, p: o.window(p, terms="tokens"),
            gf.DenominatorError,
            r"term 'loss' is divided by 'tokens', which the plan does not count\. Pass counts=\{'tokens': \.\.\.\}",
        ),
        (
            lambda m, o, p: o.window(terms=TWO),
            gf.DenominatorError,
            r"different denominators \('ce' by 'active_tokens', 'kl' by 'samples'\).*Pass a plan",
        ),
        (
            lambda m, o, p: opened(o, terms="active_tokens").backward(m.p.sum()),
            gf.DenominatorError,
            r"divided by 'active_tokens', and nobody said how many.*Pass counts=\{'active_tokens': n\}",
        ),
        (
            lambda m, o, p: opened(o, terms="active_tokens").backward(m.p.sum(), counts={"active_tokens": -1}),
            gf.DenominatorError,
            "must be a finite number >= 0, got -1",
        ),
        (
            lambda m, o, p: opened(o, p, terms="samples").backward(m.p.sum(), weight=1, piece=p.pieces[0]),
            ValueError,
            "weight and reduction are what terms declare",
        ),
        (
            lambda m, o, p: opened(o, p, terms="samples").backward(m.p.sum()),
            ValueError,
            "backward must be told which piece it is: piece=",
        ),
        (
            lambda m, o, p: opened(o).backward(m.p.sum(), piece=p.pieces[0]),
            ValueError,
            "need opt.window",
        ),
        (
            lambda m, o, p: o.window(p, terms={"c": gf.Term("samples", across_samples=True)}),
            gf.WindowError,
            "term 'c' compares samples with each other, and the logical batch has 3 pieces",
        ),
        (lambda m, o, p: gf.Term(None, reduction="mean"), ValueError, "a mean needs a denominator"),
        (lambda m, o, p: o.window("active_tokens"), TypeError, "plan must be a gf.Plan, got str.*terms="),
        (lambda m, o, p: o.window(p, terms=3), TypeError, "terms must be a count's name, a Term or a mapping, got int"),
        (
            lambda m, o, p: opened(o, p, terms=TWO).backward(m.p.sum(), piece=p.pieces[0]),
            gf.DenominatorError,
            r"the terms 'ce', 'kl' were declared, and the loss is one tensor. Pass a mapping",
        ),
        (
            lambda m, o, p: opened(o, p, terms="samples").backward((m.p.sum(), 1), piece=p.pieces[0]),
            ValueError,
            "got tuple. A loss with outputs is a gf.PieceOutput",
        ),
        (
            lambda m, o, p: opened(o, p, terms="samples").backward(m.p.sum(), piece=0),
            TypeError,
            "piece must be one of plan.pieces, got int",
        ),
        (
            lambda m, o, p: opened(o, p, terms="samples").backward(m.p, piece=p.pieces[0], counts={"samples": "4"}),
            TypeError,
            r"counts\['samples'\] must be a number or a tensor, got str",
        ),
        (lambda m, o, p: gf.Term("samples", reduction="max"), ValueError, "reduction must be 'mean' or 'sum'"),
        (lambda m, o, p: gf.Term("samples", coefficient=math.inf), ValueError, "coefficient must be a finite number"),
        (lambda m, o, p: o.window(p, terms={"a": 3}), TypeError, "must be a count's name, a Term or None"),
        (
            lambda m, o, p: opened(o, p, terms="samples").backward(torch.ones(2), piece=p.pieces[0]),
            ValueError,
            "loss term 'loss' must be a tensor with one element, got",
        ),
        (lambda m, o, p: o.window(plan(world_size=2), terms="samples"), ValueError, "pieces of 2 ranks.*Pass rank="),
        (
            lambda m, o, p: opened(o).backward(m.p.sum(), loss_scale=0.0),
            ValueError,
            "loss_scale must be a positive finite number",
        ),
    ],
)  # fmt: skip
def test_refused_and_nothing_moved(host_backend, call, error, message):
    model, opt = scalar(host_backend, start=1.0)
    with pytest.raises(error, match="(?s)" + message):
        call(model, opt, plan())
    assert model.value == 1.0 and opt.last_result is None and model.p.grad is None


def test_late_losses_across_samples_are_refused_at_the_second_micro_batch(backend):
    model, opt = scalar(backend, start=1.0)
    with pytest.raises(gf.WindowError, match="term 'loss' compares samples.*this is micro-batch 1"):  # noqa: SIM117
        with opt.window(terms=gf.Term("samples", across_samples=True)) as window:
            for _ in range(2):
                window.backward(model.loss_sum([1]), counts={"samples": 1})
    assert model.value == 1.0


def test_one_piece_needs_no_declaration(backend):
    model, opt = scalar(backend)
    planned = gf.plan_batch([1, 1])
    with opt.window(planned) as window:
        window.backward(model.loss_mean([2.0, 4.0]), piece=planned.pieces[0])
    assert model.value == -3.0
