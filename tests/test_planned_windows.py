"""Windows of a plan: each piece once, in order, with its counts; whatever fails, nothing moves; memory may run out."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from models import assert_unmoved, scalar, snapshot
from planned import (
    DEPTHS,
    SIZE,
    TERMS,
    TOKENS,
    Allocator,
    Net,
    gradient_difference,
    losses_of,
    plan,
    sgd,
    values,
    whole_gradient,
)  # fmt: skip

import gradacc_fused as gf

# -- the ledger ----------------------------------------------------------------------------------------------------


def run_pieces(opt, model, pieces, planned=None, step=0, **options):
    with opt.window(planned or plan(), terms=TERMS, **options) as window:
        for piece in pieces:
            window.backward(losses_of(model, piece.samples, step), piece=piece)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([0, 1], "1 of 3 planned pieces did not run: 2"),
        ([], "3 of 3 planned pieces did not run: 0, 1, 2"),
        ([0, 0, 1, 2], r"piece 0 \(of 3 on this rank\) came twice"),
        ([0, 2, 1], r"piece 2 \(of 3.*\) came where piece 1 \(of 3.*\) was expected"),
        ([0, 1, 2, 2], r"piece 2 .* came after the last one"),
    ],
)
def test_each_planned_piece_exactly_once_in_order(backend, order, message):
    model = Net()
    opt, planned = sgd(model, backend), plan()
    before = snapshot(opt)
    with pytest.raises(gf.WindowError, match=message):
        run_pieces(opt, model, [planned.pieces[i] for i in order], planned)
    assert_unmoved(before, snapshot(opt))
    assert all(param.grad is None for param in model.parameters())
    truth, start = whole_gradient(model), values(model)
    run_pieces(opt, model, planned.pieces, planned)
    assert gradient_difference(model, start, truth) < 1e-6


def test_a_piece_of_another_plan_is_refused(backend):
    model = Net()
    opt = sgd(model, backend)
    with pytest.raises(gf.WindowError, match=r"piece 0 .*came where piece 0 .* was expected"):
        run_pieces(opt, model, plan(max_samples=6).pieces)
    counts = {"active_tokens": [1] * SIZE, "advantage_tokens": TOKENS}
    for other in (plan(counts=counts), plan(max_samples=2, counts=counts)):  # the same samples, but not their counts
        with pytest.raises(gf.WindowError, match=r"piece 0 .*counts otherwise than the plan"):
            run_pieces(opt, model, other.pieces)


@pytest.mark.parametrize("kind", ["number", "tensor"])
def test_a_promised_count_that_is_not_met_is_refused_before_the_step(backend, kind):
    model, opt = scalar(backend)
    planned = gf.plan_pieces([2, 1], counts={"active_tokens": [3, 1, 5]})
    for seen, good in (({"active_tokens": 4.0}, True), ({"active_tokens": 3.0}, False), ({"samples": 2}, True)):
        counts = {name: torch.tensor(value) if kind == "tensor" else value for name, value in seen.items()}
        with opt.window(planned, terms="active_tokens") if good else pytest.raises(gf.WindowError) as caught:
            window = caught if good else opt.window(planned, terms="active_tokens").__enter__()
            window.backward(model.loss_sum([1]), piece=planned.pieces[0], counts=counts)
            window.backward(model.loss_sum([1]), piece=planned.pieces[1])
        if not good:
            assert "piece 0 (of 2 on this rank) has 3 active_tokens, and the plan promised 4" in str(caught.value)
            opt._leave_window(window)
    with pytest.raises(gf.WindowError, match="counts 'advantage_tokens', which the plan does not"):  # noqa: SIM117
        with opt.window(planned, terms="active_tokens") as window:
            window.backward(model.loss_sum([1]), piece=planned.pieces[0], counts={"advantage_tokens": 1})


def test_each_rank_runs_its_own_pieces(backend):
    """Two ranks' windows, one after the other on one process: their gradients add up to the whole batch's."""
    planned, model = plan(max_samples=4, world_size=2), Net()
    before, truth = values(model), whole_gradient(model)
    total = {name: torch.zeros_like(value) for name, value in before.items()}
    for rank in range(2):
        copied = copy.deepcopy(model)
        opt = sgd(copied, backend)
        with opt.window(planned, terms=TERMS, rank=rank) as window:
            for piece in planned.of_rank(rank):
                window.backward(losses_of(copied, piece.samples), piece=piece)
        for name, value in values(copied).items():
            total[name] += value - before[name]
    for name, param in model.named_parameters():
        param.data.add_(total[name])
    assert gradient_difference(model, before, truth) < 1e-6


def test_a_parameter_written_in_an_open_window_discards_it(backend):
    model = Net()
    opt, planned = sgd(model, backend), plan()
    for position in range(4):
        before, kept = snapshot(opt), values(model)["layers.1.bias"]
        with pytest.raises(gf.WindowError, match=rf"parameter 3 was written .*before micro-batch {position}\)"):  # noqa: SIM117
            with opt.window(planned, terms=TERMS) as window:
                for piece in planned.pieces:
                    if piece.index == position:
                        write(model)
                    window.backward(losses_of(model, piece.samples), piece=piece)
                if position == 3:
                    write(model)
        with torch.no_grad():
            model.layers[1].bias.copy_(kept)
        assert_unmoved(before, snapshot(opt))


def test_a_parameter_written_in_a_window_without_a_plan_is_noticed_at_its_end(backend):
    model, opt = scalar(backend)
    with (
        pytest.raises(gf.WindowError, match=r"parameter 0 was written .*before micro-batch 2\)"),
        opt.window() as window,
    ):
        window.backward(model.loss_sum([1]), weight=1)
        with torch.no_grad():
            model.p.add_(1.0)
        window.backward(model.loss_sum([1]), weight=1)
    assert model.value == 1.0


@torch.no_grad()
def write(model):
    model.layers[1].bias.add_(1.0)


def test_a_loss_scale_that_changes_discards_the_window(backend):
    model, opt = scalar(backend)
    with pytest.raises(gf.WindowError, match="the loss scale was 4, and micro-batch 1 has 2"):  # noqa: SIM117
        with opt.window() as window:
            window.backward(model.loss_sum([1]) * 4, weight=1, loss_scale=4.0)
            window.backward(model.loss_sum([1]) * 2, weight=1, loss_scale=2.0)
    assert model.value == 0.0 and model.p.grad is None
    with opt.window() as window:
        window.backward(model.loss_sum([6]) * 2, weight=3, reduction="sum", loss_scale=2.0)
    assert model.value == -2.0 and float(opt.last_result.loss_mean) == 0.0


# -- failures ------------------------------------------------------------------------------------------------------


class Trained:
    """A noisy model with AdamW, an attached scheduler and averages, all advanced by one window."""

    def __init__(self, backend) -> None:
        self.allocator = Allocator()
        self.model = Net(self.allocator, noisy=True)
        inner = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.opt = gf.GradAccumOptimizer(inner, backend=backend, max_grad_norm=1.0)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.opt, lambda n: 0.5**n)
        self.opt.attach(scheduler=self.scheduler)
        self.averages = torch.optim.swa_utils.AveragedModel(self.model)
        self.opt.register_step_post_hook(lambda *_: self.averages.update_parameters(self.model))

    def window(self, step, fail=None, **options):
        planned = plan(max_samples=4)
        with self.opt.window(planned, terms=TERMS, **options) as window:
            for piece in planned.pieces:
                self.allocator.place = None if fail is None or fail[0] != piece.index else fail[1]
                random.random()
                window.backward(losses_of(self.model, piece.samples, step), piece=piece)

    def everything(self) -> list[torch.Tensor]:
        counts = [self.scheduler.last_epoch, self.opt.param_groups[0]["lr"], self.averages.n_averaged]
        return [*snapshot(self.opt), *map(torch.as_tensor, counts), *self.averages.parameters()]

    def noise(self) -> list[torch.Tensor]:
        python = torch.tensor(random.getstate()[1], dtype=torch.int64)
        return [torch.get_rng_state(), python, *(buffer.clone() for buffer in self.model.buffers())]


@pytest.mark.filterwarnings("ignore:BatchNorm")
@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("position", range(3))
def test_W8_a_piece_that_fails_anywhere_moves_nothing(host_backend, position, depth, error):
    trained, twin = Trained(host_backend), Trained(host_backend)
    torch.manual_seed(5)
    trained.window(0)
    trained.allocator.error = error
    before, noise = [value.clone() for value in trained.everything()], trained.noise()
    with pytest.raises(error, match="planted") as caught:
        trained.window(1, fail=(position, depth), restore_state=True)
    if hasattr(caught.value, "__notes__"):
        assert f"The piece in hand was piece {position} (of 3 on this rank)" in caught.value.__notes__[0]
    assert_unmoved(before, trained.everything())
    assert_unmoved(noise, trained.noise())
    assert all(param.grad is None for param in trained.model.parameters())
    # the next window is right: as in a run in which the failed one never was
    trained.window(1)
    torch.manual_seed(5)
    for step in range(2):
        twin.window(step)
    assert_unmoved(trained.everything(), twin.everything())
    assert_unmoved(list(trained.model.buffers()), list(twin.model.buffers()))


@pytest.mark.filterwarnings("ignore:BatchNorm")
def test_W8_a_piece_that_fails_in_its_backward_on_every_backend(backend):
    trained = Trained(backend)
    trained.window(0)
    before = [value.clone() for value in trained.everything()]
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        trained.window(1, fail=(1, (1, "backward")))
    assert_unmoved(before, trained.everything())


def test_without_restore_state_generators_and_buffers_keep_what_the_attempt_did(backend):
    trained = Trained(backend)
    noise = trained.noise()
    with pytest.raises(torch.OutOfMemoryError), pytest.warns(UserWarning, match="BatchNorm"):
        trained.window(0, fail=(2, (1, "backward")))
    after = trained.noise()
    assert not torch.equal(noise[0], after[0]) and not torch.equal(noise[2], after[2])


def test_all_buffers_of_a_module_that_is_named_are_restored(backend):
    model, opt = scalar(backend)
    model.register_buffer("seen", torch.zeros(()))
    for restore, expected in ((model, 0.0), (True, 2.0)):
        with pytest.raises(ZeroDivisionError), opt.window(restore_state=restore):
            model.seen += 1
            model.seen = model.seen + 1  # another tensor
            raise ZeroDivisionError
        assert float(model.seen) == expected


@pytest.mark.parametrize("guarded", [False, True])
def test_W8_a_swallowed_failure_of_run_cannot_be_committed(backend, guarded):
    model = Net()
    opt, planned = sgd(model, backend), plan()
    before = snapshot(opt)

    def fails(piece):
        raise ValueError("in the forward")

    with pytest.raises(gf.WindowError, match="cannot be .*it is discarded.*in piece 1"):  # noqa: SIM117
        with opt.window(planned, terms=TERMS) as window:
            window.run(planned.pieces[0], lambda piece: losses_of(model, piece.samples))
            with pytest.raises(ValueError, match="in the forward"):
                window.run(planned.pieces[1], fails)
            if guarded:
                window.run(planned.pieces[2], lambda piece: losses_of(model, piece.samples))
    assert_unmoved(before, snapshot(opt))


# -- memory runs out -----------------------------------------------------------------------------------------------


def run_all(window, planned, fn, **options):
    return [window.run(piece, fn, **options) for piece in planned.pieces]


@pytest.mark.parametrize("defer", [1, "auto"])
@pytest.mark.parametrize("most_rows", [1, 2, 3, 5])
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_piece_that_runs_out_of_memory_is_split_and_the_batch_stays_the_same(host_backend, depth, most_rows, defer):
    model = Net()
    opt, planned = sgd(model, host_backend, defer=defer), plan(max_samples=6)
    before, truth = values(model), whole_gradient(model)
    model.allocator.place, model.allocator.most_rows = depth, most_rows
    with opt.window(planned, terms=TERMS) as window:
        outputs = run_all(
            window,
            planned,
            lambda piece: gf.PieceOutput(losses_of(model, piece.samples), torch.tensor(piece.samples)),
            split_on_oom=True,
        )
    assert model.allocator.failures > 0
    assert gradient_difference(model, before, truth) < 1e-6
    assert planned.restore(outputs).tolist() == list(range(SIZE))
    result = opt.last_result
    assert (result.samples, result.tokens) == (SIZE, sum(TOKENS))
    assert float(result.loss_mean) == pytest.approx(float(truth["loss"]), rel=1e-6)


def test_a_split_piece_on_every_backend(backend):
    model = Net()
    opt, planned = sgd(model, backend), plan(max_samples=6)
    before, truth = values(model), whole_gradient(model)
    model.allocator.place, model.allocator.most_rows = (1, "backward"), 3
    with opt.window(planned, terms=TERMS) as window:
        run_all(window, planned, lambda piece: losses_of(model, piece.samples), split_on_oom=True)
    assert gradient_difference(model, before, truth) < 1e-6 and opt.last_result.micro_batches == 4


@pytest.mark.parametrize("position", range(3))
@pytest.mark.parametrize("depth", DEPTHS)
def test_memory_that_runs_out_once_in_any_piece(host_backend, depth, position):
    """The allocator fails the first time only: what is held is added to the main grads and the piece runs as it is."""
    model = Net()
    opt, planned = sgd(model, host_backend), plan()
    before, truth = values(model), whole_gradient(model)
    seen = []

    def fn(piece):
        seen.append(piece.samples)
        model.allocator.place = depth if piece.index == position and model.allocator.failures == 0 else None
        return losses_of(model, piece.samples)

    with opt.window(planned, terms=TERMS) as window:
        assert run_all(window, planned, fn, split_on_oom=True) == [None] * 3
    assert gradient_difference(model, before, truth) < 1e-6
    assert model.allocator.failures == 1 and len(seen) > 3


def test_what_is_held_is_given_up_before_a_piece_is_split(backend):
    model = Net()
    opt, planned = sgd(model, backend, defer=3), plan()
    runs = []

    def fn(piece):
        runs.append(piece.samples)
        fails = piece.index == 1 and model.allocator.failures == 0
        model.allocator.place = (0, "forward") if fails else None
        return losses_of(model, piece.samples)

    with opt.window(planned, terms=TERMS) as window:
        run_all(window, planned, fn, split_on_oom=True)
    holds = backend != "reference"
    whole = planned.pieces[1].samples
    expected = (
        [planned.pieces[0].samples, whole, whole] if holds else [planned.pieces[0].samples, whole, whole[:2], whole[2:]]
    )
    assert runs == [*expected, planned.pieces[2].samples]


def test_a_single_sample_that_does_not_fit_discards_the_window(backend):
    model = Net()
    opt, planned = sgd(model, backend), plan()
    before = snapshot(opt)
    model.allocator.place, model.allocator.most_rows = (1, "backward"), 0
    with pytest.raises(torch.OutOfMemoryError) as caught, opt.window(planned, terms=TERMS) as window:
        run_all(window, planned, lambda piece: losses_of(model, piece.samples), split_on_oom=True)
    notes = "\n".join(getattr(caught.value, "__notes__", ["activation checkpointing, discarded"]))
    assert "activation checkpointing" in notes and "discarded" in notes
    assert_unmoved(before, snapshot(opt))
    assert all(param.grad is None for param in model.parameters())


def test_without_split_on_oom_it_is_raised_as_it_came(backend):
    model = Net()
    opt, planned = sgd(model, backend), plan()
    model.allocator.place, model.allocator.most_rows = (1, "backward"), 4
    with pytest.raises(torch.OutOfMemoryError, match="planted"), opt.window(planned, terms=TERMS) as window:
        run_all(window, planned, lambda piece: losses_of(model, piece.samples))
    assert model.allocator.failures == 1


@pytest.mark.filterwarnings("ignore:BatchNorm")
def test_a_retried_piece_finds_generators_and_running_statistics_as_they_were(backend):
    """The allocator fails once in the last backward; on retry the whole piece sees the same dropout and statistics."""
    found = []
    for fails in (False, True):
        torch.manual_seed(11)
        allocator = Allocator()
        model = Net(allocator, noisy=True)
        torch.manual_seed(12)
        opt, planned, tries = sgd(model, backend, defer=2), plan(), []

        def fn(piece, model=model, tries=tries, fails=fails, allocator=allocator):
            tries.append(piece.index)
            allocator.place = (0, "backward") if fails and tries == [0, 1] else None
            return losses_of(model, piece.samples)

        with opt.window(planned, terms=TERMS, restore_state=True) as window:
            run_all(window, planned, fn, split_on_oom=True)
        found.append([*values(model).values(), *model.buffers(), torch.get_rng_state()])
        assert len(tries) >= 3 + fails
    if backend != "reference":  # it holds nothing that could be given up, so there the piece is split
        assert_unmoved(*found)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        MemoryError(),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you ..."
        ),
    ],
)
def test_what_counts_as_running_out_of_memory(backend, error):
    model, opt = scalar(backend)
    planned = gf.plan_pieces([2])

    def fn(piece):
        if len(piece.samples) == 2:
            raise error
        return model.loss_sum([float(piece.samples[0] + 1)])

    with opt.window(planned, terms="samples") as window:
        window.run(planned.pieces[0], fn, split_on_oom=True)
    assert model.value == -1.5 and opt.last_result.micro_batches == 2


def test_an_allocation_that_the_machine_refuses_is_met_by_splitting(backend):
    """A real one: four samples ask for more than the address space has."""
    model, opt = scalar(backend)
    planned = gf.plan_pieces([4])

    def fn(piece):
        if len(piece.samples) > 1:
            torch.empty(len(piece.samples) << 60, dtype=torch.uint8)
        return model.loss_sum([1.0] * len(piece.samples))

    with opt.window(planned, terms="samples") as window:
        window.run(planned.pieces[0], fn, split_on_oom=True)
    assert model.value == -1.0 and opt.last_result.micro_batches == 4


def test_statistics_of_a_piece_are_averaged_over_its_parts_with_a_warning(backend):
    model, opt = scalar(backend)
    planned = gf.plan_pieces([3, 1])

    def fn(piece):
        if len(piece.samples) == 3:
            raise MemoryError
        return {"aux": model.p.sum() * {(0,): 3.0, (1, 2): 6.0, (3,): 7.0}[piece.samples]}

    with opt.window(planned, terms={"aux": "micro_batches"}) as window:
        with pytest.warns(UserWarning, match="piece 0 ran out of memory and is split, so term 'aux'"):
            window.run(planned.pieces[0], fn, split_on_oom=True)
        window.run(planned.pieces[1], fn, split_on_oom=True)
    assert model.value == pytest.approx(-((3 * 1 + 6 * 2) / 3 + 7) / 2)


def test_a_term_across_samples_is_not_split(backend):
    model, opt = scalar(backend)
    planned = gf.plan_pieces([3])

    def fn(piece):
        raise MemoryError

    with pytest.raises(gf.WindowError, match="ran out of memory and term 'c' compares its samples: no split"):  # noqa: SIM117
        with opt.window(planned, terms={"c": gf.Term("samples", across_samples=True)}) as window:
            window.run(planned.pieces[0], fn, split_on_oom=True)


def test_a_piece_that_nobody_declared_is_not_split(backend):
    model, opt = scalar(backend)
    planned = gf.plan_pieces([2])

    def fn(piece):
        if len(piece.samples) == 2:
            raise MemoryError
        return model.p.sum()

    with pytest.raises(gf.DenominatorError, match="piece 0 ran out of memory, and nobody said what divides"):  # noqa: SIM117
        with opt.window(planned) as window:
            window.run(planned.pieces[0], fn, split_on_oom=True)
    assert model.value == 0.0


def test_memory_that_runs_out_after_a_piece_was_taken_discards_the_window(backend, monkeypatch):
    """Swallowed and run again, the piece would count twice."""
    model, opt = scalar(backend, defer=1)
    planned = gf.plan_pieces([1, 1])
    flush, left = opt._engine.flush, [torch.OutOfMemoryError("planted")]

    def fails_once(*arguments, **keywords):
        if left:
            raise left.pop()
        return flush(*arguments, **keywords)

    monkeypatch.setattr(opt._engine, "flush", fails_once)
    with pytest.raises(gf.WindowError, match="cannot be used, it is discarded.*OutOfMemoryError was raised"):  # noqa: SIM117
        with opt.window(planned, terms="samples") as window:
            for piece in (planned.pieces[0], planned.pieces[1], planned.pieces[1]):
                try:
                    window.backward(model.loss_sum([1]), piece=piece)
                except torch.OutOfMemoryError:
                    window.backward(model.loss_sum([1]), piece=piece)
    assert model.value == 0.0


@pytest.mark.parametrize("inner", [torch.optim.SGD, torch.optim.RMSprop])
def test_what_is_raised_before_the_step_restores_and_after_it_says_that_it_moved(backend, inner):
    model = Net()
    opt = gf.GradAccumOptimizer(inner(model.parameters(), lr=0.1), backend=backend)
    planned = plan()
    for when, moved in (("pre", False), ("post", True)):
        before, noise = snapshot(opt), torch.get_rng_state()
        register = opt.register_step_pre_hook if when == "pre" else opt.register_step_post_hook
        handle = register(raises)
        with pytest.raises(ZeroDivisionError) as caught, opt.window(planned, terms=TERMS, restore_state=True) as window:
            torch.rand(3)
            for piece in planned.pieces:
                window.backward(losses_of(model, piece.samples), piece=piece)
        handle.remove()
        notes = " ".join(getattr(caught.value, "__notes__", ["may have moved" if moved else "nothing was applied"]))
        assert ("may have moved" if moved else "nothing was applied") in notes
        assert torch.equal(noise, torch.get_rng_state()) == (not moved)
        assert any(not torch.equal(a, b) for a, b in zip(before, snapshot(opt), strict=False)) == moved


def raises(*_):
    raise ZeroDivisionError("in a hook")


def test_what_would_reach_the_other_ranks_of_data_parallel_is_refused(backend):
    """A piece of weight 0 and a split of one's own; two ranks by torch's fake process group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        model = Net()
        opt = sgd(model, backend)
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        padded = gf.plan_batch([1], world_size=2)
        with pytest.raises(gf.WindowError, match="piece 1 counts nothing, and DistributedDataParallel would average"):  # noqa: SIM117
            with opt.window(padded, terms="samples") as window:
                window.run(padded.of_rank(1)[0], lambda piece: wrapped(torch.zeros(1, 6)).sum())
        planned = gf.plan_batch([1] * 4, world_size=2, limits=gf.Limits(max_samples=2))
        model.allocator.place, model.allocator.most_rows = (1, "forward"), 1
        with pytest.raises(gf.WindowError, match="piece 1 ran out of memory and DistributedDataParallel holds"):  # noqa: SIM117
            with opt.window(planned, terms="samples") as window:
                window.run(planned.of_rank(1)[0], lambda piece: wrapped(torch.zeros(2, 6)).sum(), split_on_oom=True)
    finally:
        torch.distributed.destroy_process_group()


def test_run_needs_a_plan_and_results_for_every_sample(backend):
    model, opt = scalar(backend)
    with pytest.raises(ValueError, match="the window has no plan"), opt.window() as window:
        window.run(gf.plan_pieces([1]).pieces[0], lambda piece: model.p.sum())
    planned = gf.plan_pieces([2])
    with pytest.raises(ValueError, match="a result for each of the piece's 2 samples, got 1"):  # noqa: SIM117
        with opt.window(planned, terms="samples") as window:
            window.run(planned.pieces[0], lambda piece: gf.PieceOutput(model.p.sum(), [1]))
    assert model.value == 0.0


def test_outputs_are_kept_without_their_graph(backend):
    model, opt = scalar(backend)
    planned = gf.plan_pieces([2])
    with opt.window(planned, terms="samples") as window:
        outputs = window.run(
            planned.pieces[0], lambda piece: gf.PieceOutput(model.loss_sum([1, 1]), [model.p * 2, (model.p, "text")])
        )
    assert not outputs[0].requires_grad and not outputs[1][0].requires_grad and outputs[1][1] == "text"
