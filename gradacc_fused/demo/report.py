"""The demo from end to end: train, compare, measure, print, draw."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import text
from .measure import Measured, events_by_tensors, measure
from .model import GPT
from .train import Piece, Training, Usual, Whole, Windowed, first_gradients, relative_difference

SHARES = (10, 7, 5, 2)  # samples of the micro-batches; sorted by length, so tokens are uneven as well
LONGEST = 96
NOISE = 0.03  # of a window's time: what two runs of the same loop differ by on a quiet machine


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table


def _train(console: Console, model: GPT, batches: list[list[bytes]]) -> list[Training]:
    trainings = [Training(make(copy.deepcopy(model))) for make in (Whole, Windowed, Usual)]
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )
    with bar:
        task = bar.add_task("training three times", total=len(batches))
        for batch in batches:
            whole, pieces = _tensors(batch)
            for training in trainings:
                training.step(whole, pieces)
            bar.update(task, advance=1, description=f"loss per token {trainings[1].losses[-1]:.3f}")
    return trainings


def _tensors(batch: list[bytes]) -> tuple[Piece, list[Piece]]:
    return text.tensors(batch), [text.tensors(piece) for piece in text.split(batch, SHARES)]


def _draw(trainings: list[Training], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    colours = ("tab:gray", "tab:blue", "tab:orange")
    for training, style, colour in zip(trainings, ("-", "--", ":"), colours, strict=True):
        left.plot(training.losses, style, color=colour, label=training.trainer.name, linewidth=2)
    left.set(xlabel="real step", ylabel="logged loss per token", title="loss curves")
    left.legend()
    for training, colour in zip(trainings[1:], colours[1:], strict=True):
        gaps = [max(abs(mine - whole), 1e-9) for mine, whole in zip(training.losses, trainings[0].losses, strict=True)]
        right.semilogy(gaps, color=colour, label=training.trainer.name)
    right.set(xlabel="real step", ylabel="|logged loss - whole batch's|", title="distance from whole-batch training")
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _print_comparison(console: Console, trainings: list[Training], numbers: dict[str, Any]) -> None:
    table = _table(
        "Against whole-batch training (norms relative to it)", "training", "first gradient", "change of parameters",
        "loss_sum", "loss_mean", "token_count",
    )  # fmt: skip
    keys = (None, "window", "usual")
    for training, key in zip(trainings, keys, strict=True):
        assert training.first is not None
        gradient = "" if key is None else f"{numbers[f'grad_rel_diff_{key}']:.2e}"
        change = "" if key is None else f"{numbers[f'rel_diff_{key}']:.2e}"
        first = training.first
        table.add_row(
            training.trainer.name, gradient, change, f"{first.loss_sum:.4f}", f"{first.loss_mean:.6f}",
            str(first.token_count),
        )  # fmt: skip
    console.print(table)


def _print_cost(console: Console, ours: Measured, stock: Measured, tensors: int) -> None:
    table = _table(
        f"One window: {len(SHARES)} micro-batches, {tensors} tensors", "path", "ms", "ms beside fwd/bwd",
        "operator events beside fwd/bwd",
    )  # fmt: skip
    for name, path in (("gradacc_fused window", ours), ("stock loop", stock)):
        visible = path.ms_added > NOISE * path.ms
        added = f"{path.ms_added:.2f}" if visible else f"below noise ({NOISE:.0%})"
        table.add_row(name, f"{path.ms:.2f}", added, str(path.op_calls))
    console.print(table)
    few, many = events_by_tensors((10, 400), len(SHARES))
    console.print(f"operator events of our window with 10 tensors: {few}, with 400 tensors: {many}")


def run(windows: int = 60, output: Path = Path("demo_output"), seed: int = 0, repeats: int = 15) -> dict[str, Any]:
    """Run the demo; returns the numbers of its last line.

    Args:
        windows: Real steps of each training.
        output: Folder for the picture; made if it is not there.
        seed: Of the model's initial values and the text's order.
        repeats: Windows timed.
    """
    console = Console()
    torch.manual_seed(seed)
    model = GPT(longest=LONGEST)
    samples = text.paragraphs(LONGEST, seed)
    batches = list(text.logical_batches(samples, sum(SHARES), windows))
    tensors = len(list(model.parameters()))
    console.print(
        f"GPT of {sum(p.numel() for p in model.parameters()):,} parameters in {tensors} tensors; {len(samples):,} "
        f"paragraphs of Python's own documentation; logical batches of {sum(SHARES)} samples in micro-batches of "
        f"{', '.join(map(str, SHARES))}; {windows} real steps"
    )
    whole, pieces = _tensors(batches[0])
    gradients = first_gradients(model, whole, pieces)
    start = [param.detach().clone() for param in model.parameters()]
    trainings = _train(console, model, batches)
    changes = [
        [param.detach() - before for param, before in zip(training.trainer.model.parameters(), start, strict=True)]
        for training in trainings
    ]
    ours, stock = measure(model, pieces, repeats)
    first = trainings[1].first
    assert first is not None
    numbers: dict[str, Any] = {
        "grad_rel_diff_window": relative_difference(gradients[Windowed.name], gradients[Whole.name]),
        "grad_rel_diff_usual": relative_difference(gradients[Usual.name], gradients[Whole.name]),
        "rel_diff_window": relative_difference(changes[1], changes[0]),
        "rel_diff_usual": relative_difference(changes[2], changes[0]),
        "op_calls_per_window": ours.op_calls,
        "stock_op_calls_per_window": stock.op_calls,
        "tensors": tensors,
        "micro_batches": len(SHARES),
        "ms_window": round(ours.ms, 3),
        "ms_stock_window": round(stock.ms, 3),
        "loss_sum": first.loss_sum,
        "loss_mean": first.loss_mean,
        "token_count": first.token_count,
        "loss_first": trainings[1].losses[0],
        "loss_last": trainings[1].losses[-1],
    }
    _print_comparison(console, trainings, numbers)
    _print_cost(console, ours, stock, tensors)
    output.mkdir(parents=True, exist_ok=True)
    _draw(trainings, output / "loss_curve.png")
    console.print(f"loss curves: {output / 'loss_curve.png'}")
    print(json.dumps(numbers))
    return numbers
