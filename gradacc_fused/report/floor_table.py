"""``gradacc-fused floor``: the table of bytes and launches, printed."""

from __future__ import annotations

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from ..floor import PUBLISHED, Floor, floor, stock


def _add_rows(table: Table, title: str, found: Floor, elements: int) -> None:
    for row in found.passes:
        share = row.bytes_per_micro_batch
        table.add_row(
            f"{title}{row.name}", str(row.times), str(row.bytes_per_element), "" if share is None else f"{share:g}",
            str(row.launches), str(row.window_bytes), f"{row.window_bytes * elements / 1e9:.3f}",
        )  # fmt: skip


def show(
    k: int, m: int, elements: int, grad_dtype: torch.dtype, param_dtype: torch.dtype, rule: str, closing: str
) -> Floor:
    """Print the floor of a window pass by pass, and what others move; returns it.

    Args:
        k: Micro-batches in the window.
        m: Micro-batches whose gradients may be held.
        elements: Of all parameters together.
        grad_dtype: Of the gradients.
        param_dtype: Of the parameters.
        rule: A key of ``floor.MOMENTS``.
        closing: One of ``floor.CLOSINGS``.
    """
    found = floor(k, m, grad_dtype, param_dtype, rule, closing)
    console = Console()
    console.print(
        f"floor of a window: k={k}, m={m}, {str(grad_dtype)[6:]} gradients, {str(param_dtype)[6:]} parameters, {rule}, "
        f"{closing} closing pass; {elements:,} elements"
    )
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for number, column in enumerate(("pass", "times", "B/element", "per piece", "launches", "B in all", "GB in all")):
        table.add_column(column, justify="right" if number else "left")
    _add_rows(table, "", found, elements)
    table.add_section()
    total = found.bytes_per_element
    table.add_row("[bold]window", "", "", "", str(found.launches), str(total), f"{total * elements / 1e9:.3f}")
    console.print(table)
    console.print(
        f"memory: {found.buffer_bytes} bytes per element of main grads ({found.buffer_bytes * elements / 1e9:.3f} GB), "
        f"{found.held_bytes} of gradients held ({found.held_bytes * elements / 1e9:.3f} GB)"
    )
    _show_others(console, k, grad_dtype, param_dtype, rule, total, elements)
    return found


def _show_others(
    console: Console, k: int, grad_dtype: torch.dtype, param_dtype: torch.dtype, rule: str, ours: int, elements: int
) -> None:
    others = [("torch: foreach sum, clip, fused step", stock(k, grad_dtype, param_dtype, rule).bytes_per_element)]
    if rule == "adamw" and grad_dtype == param_dtype == torch.bfloat16:
        others += [(row.name, row.bytes_per_element) for row in PUBLISHED if row.k == k]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for number, column in enumerate(("what others move", "B/element", "GB", "floors")):
        table.add_column(column, justify="right" if number else "left")
    for name, moved in others:
        table.add_row(name, str(moved), f"{moved * elements / 1e9:.3f}", f"{moved / ours:.2f}")
    console.print(table)
