"""plan_batch: every sample once, within the limits, in order, as many pieces on every rank, few shapes on request."""

from __future__ import annotations

import math
import random
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradacc_fused as gf

LENGTHS = st.lists(st.integers(0, 60), min_size=1, max_size=80)
LIMITS = st.builds(
    gf.Limits,
    max_samples=st.none() | st.integers(1, 9),
    max_sequence_length=st.none() | st.just(60),
    max_tokens=st.none() | st.integers(60, 300),
    layout=st.sampled_from(["padded", "packed"]),
)
OPTIONS = st.fixed_dictionaries(
    {
        "world_size": st.integers(1, 5),
        "strategy": st.sampled_from(["in_order", "balanced"]),
        "max_shapes": st.none() | st.integers(1, 4),
    }
)


@settings(max_examples=400, deadline=None)
@given(lengths=LENGTHS, limits=LIMITS, options=OPTIONS)
def test_every_sample_once_and_within_the_limits(lengths, limits, options):
    plan = gf.plan_batch(lengths, limits=limits, counts={"active_tokens": lengths}, **options)
    real = [piece for piece in plan.pieces if not piece.padding]
    assert sorted(plan.order) == list(range(len(lengths)))
    assert [plan.order[place] for place in plan.inverse] == list(range(len(lengths)))
    for piece in plan.pieces:
        held = [lengths[sample] for sample in piece.samples]
        rows, columns = piece.shape
        tokens = sum(held) if limits.layout == "packed" else len(held) * max(held)
        assert limits.max_samples is None or len(held) <= limits.max_samples
        assert limits.max_tokens is None or tokens <= limits.max_tokens
        assert limits.max_tokens is None or rows * columns <= limits.max_tokens
        if limits.layout == "packed":
            assert rows == 1 and columns >= sum(held)
        else:
            assert rows >= len(held) and columns >= max(held)
        if options["max_shapes"] is None:
            assert rows * columns == tokens
    assert options["max_shapes"] is None or len(plan.shapes) <= options["max_shapes"]
    if options["strategy"] == "in_order":
        assert plan.order == tuple(range(len(lengths)))
    # ranks
    assert len(plan.pieces) % options["world_size"] == 0
    for rank in range(options["world_size"]):
        assert plan.of_rank(rank) == tuple(piece for piece in plan.pieces if piece.rank == rank)
        assert len(plan.of_rank(rank)) * options["world_size"] == len(plan.pieces)
    # counts
    assert plan.totals == {"total_samples": len(lengths), "total_active_tokens": sum(lengths)}
    for name in ("samples", "active_tokens"):
        assert math.fsum(piece.counts[name] for piece in plan.pieces) == plan.totals[f"total_{name}"]
    assert all(piece.counts["samples"] == len(piece.samples) for piece in real)
    assert all(set(piece.counts.values()) == {0.0} for piece in plan.pieces if piece.padding)
    assert len(real) == len(plan.pieces) or all(len(piece.samples) == 1 for piece in real)


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS, limits=LIMITS, options=OPTIONS)
def test_results_come_back_in_the_original_order(lengths, limits, options):
    plan = gf.plan_batch(lengths, limits=limits, **options)
    rows = [len(piece.samples) if limits.layout == "packed" else piece.shape[0] for piece in plan.pieces]
    outputs = [torch.full((count, 2), -1.0) for count in rows]
    for piece, output in zip(plan.pieces, outputs, strict=True):
        if not piece.padding:
            output[: len(piece.samples), 0] = torch.tensor(piece.samples, dtype=torch.float32)
    restored = plan.restore(outputs)
    assert torch.equal(restored[:, 0], torch.arange(len(lengths), dtype=torch.float32))
    rank = options["world_size"] - 1
    mine = plan.restore([outputs[piece.index] for piece in plan.of_rank(rank)], rank=rank)
    held = {sample for piece in plan.of_rank(rank) if not piece.padding for sample in piece.samples}
    for sample in range(len(lengths)):
        assert (mine[sample] is None) == (sample not in held)
        assert sample not in held or float(mine[sample][0]) == sample


def test_by_hand():
    lengths = [3, 1, 4, 1, 5, 9, 2]
    plan = gf.plan_batch(lengths, limits=gf.Limits(max_samples=3, max_tokens=12), counts={"active_tokens": [1] * 7})
    assert [piece.samples for piece in plan.pieces] == [(0, 1, 2), (3, 4), (5,), (6,)]
    assert [piece.shape for piece in plan.pieces] == [(3, 4), (2, 5), (1, 9), (1, 2)]
    assert [piece.counts["active_tokens"] for piece in plan.pieces] == [3, 2, 1, 1]
    packed = gf.plan_batch(lengths, limits=gf.Limits(max_tokens=12, layout="packed"))
    assert [piece.samples for piece in packed.pieces] == [(0, 1, 2, 3), (4,), (5, 6)]
    assert [piece.shape for piece in packed.pieces] == [(1, 9), (1, 5), (1, 11)]
    even = gf.plan_batch(lengths, limits=gf.Limits(max_tokens=13, layout="packed"), strategy="balanced")
    assert sorted(piece.shape for piece in even.pieces) == [(1, 12), (1, 13)]


def test_ranks_by_hand():
    """Three pieces for two ranks: the largest is halved. One sample for two: the second gets a piece of weight 0."""
    plan = gf.plan_batch([2, 2, 2, 2, 2], limits=gf.Limits(max_samples=2), world_size=2)
    assert [piece.samples for piece in plan.of_rank(0)] == [(0,), (2, 3)]
    assert [piece.samples for piece in plan.of_rank(1)] == [(1,), (4,)]
    alone = gf.plan_batch([7], counts={"active_tokens": [6]}, world_size=2)
    (padding,) = alone.of_rank(1)
    assert padding.padding and padding.samples == (0,) and padding.shape == (1, 7)
    assert padding.counts == {"samples": 0.0, "active_tokens": 0.0}
    assert alone.totals == {"total_samples": 1.0, "total_active_tokens": 6.0}
    assert alone.restore([["kept"], ["dropped"]]) == ["kept"]


def test_B2_varied_lengths_have_few_shapes():
    random.seed(0)
    lengths = [random.randint(1, 2048) for _ in range(1000)]
    limits = gf.Limits(max_samples=64, max_tokens=16384)
    assert len(gf.plan_batch(lengths, limits=limits).shapes) > 100
    for strategy in ("in_order", "balanced"):
        plan = gf.plan_batch(lengths, limits=limits, strategy=strategy, max_shapes=4)
        assert len(plan.shapes) <= 4 and sorted(plan.order) == list(range(1000))


def test_balanced_costs_less_than_in_order():
    random.seed(1)
    lengths = [random.randint(1, 512) for _ in range(500)]
    limits = gf.Limits(max_tokens=4096)

    def computed(strategy):
        return sum(rows * columns for rows, columns in (p.shape for p in gf.plan_batch(
            lengths, limits=limits, strategy=strategy).pieces))  # fmt: skip

    assert computed("balanced") < 1.05 * sum(lengths) < computed("in_order")
    packed = gf.plan_batch(
        lengths, limits=gf.Limits(max_tokens=4096, layout="packed"), strategy="balanced", world_size=4
    )
    totals = [piece.shape[1] for piece in packed.pieces]
    assert max(totals) - min(totals) < 512 and len(totals) == 32  # 126 thousand tokens: 31 pieces at least


def test_samples_are_lengths_or_have_one():
    expected = gf.plan_batch([2, 3], limits=gf.Limits(max_samples=1)).pieces
    for samples in (
        [torch.tensor(2), torch.tensor(3)],
        torch.tensor([2, 3]),
        [[1, 1], [1, 1, 1]],
        [torch.ones(2), torch.ones(3)],
        ("ab", "abc"),
    ):
        assert gf.plan_batch(samples, limits=gf.Limits(max_samples=1)).pieces == expected


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS, limits=LIMITS, options=OPTIONS)
def test_halves_hold_the_same_samples_and_counts(lengths, limits, options):
    plan = gf.plan_batch(lengths, limits=limits, counts={"active_tokens": lengths}, **options)
    for piece in plan.pieces:
        if len(piece.samples) == 1:
            with pytest.raises(ValueError, match=f"piece {piece.index} has one sample, which cannot be split"):
                plan.split(piece)
            continue
        halves = plan.split(piece)
        assert halves[0].samples + halves[1].samples == piece.samples
        assert abs(len(halves[0].samples) - len(halves[1].samples)) <= 1
        for half in halves:
            held = [lengths[sample] for sample in half.samples]
            assert half.shape == ((1, sum(held)) if limits.layout == "packed" else (len(held), max(held)))
            assert (half.index, half.rank, half.padding) == (piece.index, piece.rank, piece.padding)
        for name, count in piece.counts.items():
            assert math.fsum(half.counts[name] for half in halves) == count


def test_pieces_that_are_cut_already():
    plan = gf.plan_pieces([2, 1], counts={"active_tokens": torch.tensor([3, 1, 5])}, lengths=[4, 6, 5])
    assert [piece.samples for piece in plan.pieces] == [(0, 1), (2,)]
    assert [piece.shape for piece in plan.pieces] == [(2, 6), (1, 5)]
    assert [piece.counts["active_tokens"] for piece in plan.pieces] == [4, 5]
    assert plan.totals == {"total_samples": 3.0, "total_active_tokens": 9.0}
    assert plan.restore([[10, 11], [12]]) == [10, 11, 12]
    assert gf.plan_pieces([1]).pieces[0].shape == (1, 0)


def test_which_rank_this_is():
    plan = gf.plan_batch([1, 1], limits=gf.Limits(max_samples=1), world_size=2)
    assert (plan.this_rank(1), gf.plan_batch([1]).this_rank()) == (1, 0)
    with pytest.raises(ValueError, match="rank must be from 0 to 1, got 2"):
        plan.this_rank(2)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for world_size in (2, 3):
        torch.distributed.init_process_group("fake", rank=1, world_size=world_size, store=FakeStore())
        try:
            if world_size == 2:
                assert plan.this_rank() == 1
            else:
                with pytest.raises(ValueError, match="the pieces of 2 ranks, and there are 3"):
                    plan.this_rank()
        finally:
            torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gf.plan_batch([]), "samples must have at least one sample, got none"),
        (lambda: gf.plan_batch([1, -2]), r"samples\[1\] must have a length of 0 or more, got -2"),
        (lambda: gf.plan_batch([1], world_size=0), "world_size must be at least 1, got 0"),
        (lambda: gf.plan_batch([1], strategy="sorted"), "strategy must be one of in_order, balanced, got 'sorted'"),
        (lambda: gf.plan_batch([1], max_shapes=0), "max_shapes must be at least 1"),
        (lambda: gf.plan_batch([1], counts={"samples": [1]}), r"counts\['samples'\] is there already"),
        (
            lambda: gf.plan_batch([1], counts={"x": [1, 2]}),
            r"counts\['x'\] must have one value per sample \(1\), got 2",
        ),
        (lambda: gf.plan_batch([1], counts={"x": [math.nan]}), r"counts\['x'\]\[0\] must be 0 or more and finite"),
        (
            lambda: gf.plan_batch([5, 99], limits=gf.Limits(max_tokens=60)),
            r"samples\[1\] fits no piece: it has 99 tokens, and max_tokens is 60\. Shorten the sample or raise",
        ),
        (
            lambda: gf.plan_batch([5, 99], limits=gf.Limits(max_sequence_length=60)),
            r"samples\[1\] fits no piece: it has 99 tokens, and max_sequence_length is 60",
        ),
        (lambda: gf.plan_batch(torch.tensor([3, -1])), r"samples\[1\] must have a length of 0 or more, got -1"),
        (lambda: gf.plan_pieces([]), "sizes must have at least one piece, got none"),
        (lambda: gf.plan_pieces([1, 0]), r"sizes\[1\] must be at least 1 sample, got 0"),
        (lambda: gf.plan_pieces([2], lengths=[1]), r"lengths must have one value per sample \(2\), got 1"),
        (lambda: gf.plan_pieces([2], counts={"x": [1]}), r"plan_pieces: counts\['x'\] must have one value per sample"),
        (lambda: gf.Limits(max_samples=0), r"max_samples must be at least 1 \(None: no limit\), got 0"),
        (lambda: gf.Limits(layout="ragged"), "layout must be one of padded, packed, got 'ragged'"),
        (lambda: gf.plan_batch([1]).of_rank(1), "rank must be from 0 to 0, got 1"),
        (lambda: gf.plan_batch([1]).restore([]), r"outputs must have one entry per piece \(1\), got 0"),
        (lambda: gf.plan_batch([1, 1]).restore([[0]]), r"outputs\[0\] must have a result for each of the piece's 2"),
        (lambda: gf.plan_batch([1]).restore([None]), "must have a result .*got NoneType.*gf.PieceOutput"),
        (lambda: gf.plan_batch([1]).restore([torch.tensor(1.0)]), "must have a result .*got Tensor"),
        (
            lambda: gf.plan_batch([3, 4], limits=gf.Limits(layout="packed")).restore([torch.arange(7)]),
            r"outputs\[0\] must have a result for each of the piece's 2 samples, got 7",
        ),
        (lambda: gf.plan_batch([1], counts={"micro_batches": [1]}), r"counts\['micro_batches'\] is there already"),
        (lambda: gf.plan_batch([1], counts={"total_samples": [1]}), r"counts\['total_samples'\] is there already"),
    ],
)
def test_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: gf.plan_batch([3.0]),
            r"samples\[0\] must be a length in tokens .* or have a len\(\), got float",
        ),
        (
            lambda: gf.plan_batch([1], counts={"a": 3}),
            r"counts\['a'\] must be a sequence .* per sample, got int",
        ),
        (lambda: gf.plan_batch([1], limits={"max_samples": 1}), r"limits must be gf.Limits\(...\), got dict"),
        (lambda: gf.plan_batch([1], world_size=2.0), "world_size must be an int, got 2.0"),
        (lambda: gf.Limits(max_samples=1.5), r"max_samples must be an int or None \(no limit\), got 1.5"),
        (lambda: gf.plan_pieces(4), "sizes must list the samples of each piece, got 4"),
    ],
)
def test_other_types_are_refused(call, message):
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize("strategy", ["in_order", "balanced"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_the_work_grows_with_the_samples(layout, strategy):
    """In lines of Python run, which no busy machine changes: not with their square."""

    def lines(count):
        draw = random.Random(2)
        lengths = [draw.randint(1, 2048) for _ in range(count)]
        limits = gf.Limits(max_samples=64, max_tokens=16384, layout=layout)
        found = 0

        def tick(frame, event, argument):
            nonlocal found
            found += 1
            return tick

        sys.settrace(tick)
        try:
            gf.plan_batch(lengths, limits=limits, strategy=strategy, max_shapes=4, world_size=8)
        finally:
            sys.settrace(None)
        return found

    assert lines(4000) < 5 * lines(1000)
