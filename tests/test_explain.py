"""gf.explain: the chain of factors of the last step, whose product is what a token's gradient really got."""

from __future__ import annotations

import pytest
import torch
from models import Scalar, scalar

import gradacc_fused as gf


def used_gradient(model, before) -> float:
    return before - model.value


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_product_is_what_a_token_got(backend, reduction):
    """Tokens of gradient 1 in pieces of 3 and 1; the host halves, a scaler multiplies by 8, the clip takes half."""
    model, opt = scalar(backend, host_scale=0.5, max_grad_norm=0.5)
    with opt.window() as window:
        for tokens in ([1.0] * 3, [1.0]):
            loss = (model.loss_mean if reduction == "mean" else model.loss_sum)(tokens)
            window.backward(loss * 0.5 * 8, weight=len(tokens), reduction=reduction, loss_scale=8.0)
    found = gf.explain(opt)
    assert found.columns == ("micro-batch 0", "micro-batch 1")
    names = [factor.name for factor in found.factors]
    assert names == ["loss", "host", "DDP", "scaler", "weight", "denominator", "unscale", "clip"]
    values = {factor.name: factor.values for factor in found.factors}
    assert values["loss"] == (pytest.approx((1 / 3, 1.0)) if reduction == "mean" else (1.0, 1.0))
    assert values["weight"] == ((3.0, 1.0) if reduction == "mean" else (1.0, 1.0))
    assert values["host"] == (0.5, 0.5) and values["scaler"] == (8.0, 8.0) and values["unscale"] == (0.25, 0.25)
    assert values["denominator"] == (0.25, 0.25) and values["DDP"] == (1.0, 1.0)
    # four tokens got the product each
    assert sum(n * product for n, product in zip((3, 1), found.products, strict=True)) == pytest.approx(-model.value)
    assert found.products == pytest.approx((0.125, 0.125), rel=1e-5)
    text = str(found)
    assert "product" in text and "already on the loss, as host_scale declares" in text and "total_norm 1" in text


def test_terms_have_a_column_each(backend):
    model, opt = scalar(backend)
    planned = gf.plan_pieces([1, 1], counts={"active_tokens": [3, 2]})
    terms = {"ce": "active_tokens", "kl": gf.Term("samples", 0.3), "mean": gf.Term("active_tokens", reduction="mean")}
    with opt.window(planned, terms=terms) as window:
        for piece in planned.pieces:
            window.backward({name: model.p.sum() for name in terms}, piece=piece)
    found = gf.explain(opt)
    assert found.columns == ("ce", "kl", "mean")
    assert found.products == pytest.approx((1 / 5, 0.3 / 2, 1 / 5))
    # two pieces of gradient 1 for the sums, a mean of 1 over 3 and 2 tokens
    assert -model.value == pytest.approx(2 * found.products[0] + 2 * found.products[1] + 5 * found.products[2])


def test_late_terms_have_a_column_each_too(backend):
    model, opt = scalar(backend)
    terms = {"a": gf.Term("tokens", 0.5), "b": gf.Term("tokens", 3.0, reduction="mean")}
    with opt.window(terms=terms) as window:
        for count in (5, 3):
            window.backward({"a": model.p.sum() * count, "b": model.p.sum()}, counts={"total_tokens": count})
    found = gf.explain(opt)
    assert found.columns == ("a", "b") and found.products == pytest.approx((0.5 / 8, 3 / 8))
    assert -model.value == pytest.approx(8 * sum(found.products))  # eight tokens of gradient 1 in each term


def test_a_piece_that_is_not_read_and_the_other_modes(backend):
    model, opt = scalar(backend)
    with opt.window() as window:
        window.backward(model.loss_mean([1.0, 1.0]), weight=2)
        window.backward(model.loss_mean([float("nan")]), weight=0)
    found = gf.explain(opt)
    assert found.products == (0.5, 0.0) and "a micro-batch of weight 0 is not read" in str(found)
    model, opt = scalar(backend, accumulation_steps=2, weighting="equal")
    for _ in range(2):
        model.loss_mean([1.0]).backward()
        opt.step()
    assert gf.explain(opt).products == (0.5, 0.5)
    model, opt = scalar(backend)
    model.loss_mean([1.0]).backward()
    opt.step()
    assert gf.explain(opt).products == (1.0,)


def test_many_micro_batches_fit_the_screen(backend):
    model, opt = scalar(backend)
    with opt.window() as window:
        for _ in range(20):
            window.backward(model.loss_mean([1.0]), weight=1)
    found = gf.explain(opt)
    assert len(found.products) == 20 and "and 12 more" in str(found)
    assert max(map(len, str(found).splitlines())) < 230


def test_before_the_first_step_there_is_nothing_to_explain(backend):
    _, opt = scalar(backend)
    with pytest.raises(ValueError, match="has not made a step yet"):
        gf.explain(opt)


def test_a_data_parallel_wrapper_that_divides_too(backend):
    """Four ranks by torch's fake process group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        for host_scale in (1.0, 0.25):
            model = Scalar()
            wrapped = torch.nn.parallel.DistributedDataParallel(Forward(model))
            inner = torch.optim.SGD(model.parameters(), lr=1.0)
            opt = gf.GradAccumOptimizer(inner, backend=backend, host_scale=host_scale)
            with wrapped.no_sync(), opt.window() as window:  # the fake group cannot reduce
                window.backward(wrapped([8.0]), weight=1)
            found = gf.explain(opt)
            assert next(factor for factor in found.factors if factor.name == "DDP").values == (0.25,)
            assert found.products == (0.25 if host_scale == 1.0 else 1.0,)
            noted = "DistributedDataParallel divides by 4 ranks and nothing undoes it" in str(found)
            assert noted == (host_scale == 1.0)
            del wrapped
    finally:
        torch.distributed.destroy_process_group()


class Forward(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, tokens):
        return self.inner.loss_mean(tokens)


def test_a_living_scaler_that_nobody_declared(backend):
    model, opt = scalar(backend)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with opt.window() as window:
        window.backward(scaler.scale(model.loss_mean([1.0])), weight=1)
    assert "a GradScaler with scale 1024 is alive" in str(gf.explain(opt))
    with opt.window() as window:
        window.backward(scaler.scale(model.loss_mean([1.0])), weight=1, loss_scale=scaler.get_scale())
    found = gf.explain(opt)
    assert found.products == (1.0,) and not found.notes
