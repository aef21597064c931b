"""The floor: bytes and launches that an accumulation window cannot do without, as a table for any sizes and rules.

Bytes are those that cross the memory bus where nothing stays in a cache: every tensor is read or written once per pass.
The only place that holds the formula; the benchmark, the reports and ``gradacc-fused floor`` all ask here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from .layout import math_dtype

MOMENTS = {"adamw": 2, "adam": 2, "sgd": 0, "sgd_momentum": 1, "lion": 1}
CLOSINGS = ("unstored", "stored", "reduced")
LOW_PRECISION = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Pass:
    """One kind of pass over the parameters.

    Attributes:
        name: "flush_first", "flush", "closing", "norm", "clip" or "update"; of other loops what they call it.
        times: How often a window runs it.
        bytes_per_element: Read and written by one such pass.
        launches: Kernel launches of one such pass; on CPU operator events.
        micro_batches: Micro-batches that it adds or measures.
    """

    name: str
    times: int
    bytes_per_element: int
    launches: int
    micro_batches: int = 0

    @property
    def bytes_per_micro_batch(self) -> float | None:
        """Bytes per element and micro-batch that it adds or measures; None where it does neither."""
        return self.bytes_per_element / self.micro_batches if self.micro_batches else None

    @property
    def window_bytes(self) -> int:
        """Bytes per element in a window."""
        return self.times * self.bytes_per_element


@dataclass(frozen=True)
class Floor:
    """A window's passes in the order they run.

    Attributes:
        k: Micro-batches in the window.
        m: Micro-batches whose gradients may be held; 0 for loops that hold none.
        passes: The rows. Those that this window does not run are left out.
        buffer_bytes: Bytes per element that the main grads take; 0 where the window needs none.
        held_bytes: Bytes per element of gradients held beyond the newest.
    """

    k: int
    m: int
    passes: tuple[Pass, ...]
    buffer_bytes: int = 0
    held_bytes: int = 0

    @property
    def bytes_per_element(self) -> int:
        """Bytes per element of the window."""
        return sum(row.window_bytes for row in self.passes)

    @property
    def launches(self) -> int:
        """Launches of the window for one device and rule."""
        return sum(row.times * row.launches for row in self.passes)

    def launches_by_pass(self) -> dict[str, int]:
        """Launches of the window by name of the pass."""
        found: dict[str, int] = {}
        for row in self.passes:
            found[row.name] = found.get(row.name, 0) + row.times * row.launches
        return found

    def row(self, name: str) -> Pass:
        """The pass of that name.

        Raises:
            KeyError: This window does not run it.
        """
        for row in self.passes:
            if row.name == name:
                return row
        raise KeyError(f"a window with k={self.k}, m={self.m} has no pass {name!r}")


@dataclass(frozen=True)
class Published:
    """What a loop that people run moves: bf16 gradients and parameters, fp32 main params, AdamW."""

    name: str
    k: int
    bytes_per_element: int


# At k = 8, in 1,500 to 4,200 launches for 147 tensors.
PUBLISHED = (
    Published("apex DistributedFusedAdam", 8, 118),
    Published("Megatron", 8, 130),
    Published("torch AMP", 8, 172),
    Published("DeepSpeed BF16_Optimizer", 8, 258),
)


def update_state_bytes(param_dtype: torch.dtype, rule: str, main_params: bool = True) -> int:
    """Bytes per element that an update reads and writes beside the gradient: parameter, main param, moments.

    Args:
        param_dtype: Of the parameter. fp16 and bf16 have an fp32 main param that is updated, and are written from it.
        rule: A key of ``MOMENTS``.
        main_params: False: low-precision parameters are updated as they are.

    Raises:
        ValueError: No such rule.
    """
    if rule not in MOMENTS:
        raise ValueError(f"floor: rule must be one of {', '.join(MOMENTS)}, got {rule!r}.")
    state = math_dtype(param_dtype).itemsize
    moments = MOMENTS[rule] * 2 * state
    if param_dtype in LOW_PRECISION and main_params:
        return moments + 2 * state + param_dtype.itemsize
    return moments + 2 * param_dtype.itemsize


def floor(
    k: int,
    m: int = 1,
    grad_dtype: torch.dtype = torch.bfloat16,
    param_dtype: torch.dtype = torch.bfloat16,
    rule: str = "adamw",
    closing: str = "unstored",
    main_params: bool = True,
) -> Floor:
    """The passes of a window of k micro-batches that holds the gradients of up to m.

    Args:
        k: Micro-batches in the window.
        m: ``defer``: micro-batches whose gradients may be held. With k <= m there is no sum in memory at all.
        grad_dtype: Of the gradients.
        param_dtype: Of the parameters; the sum is fp64 for fp64 parameters, else fp32.
        rule: A key of ``MOMENTS``.
        closing: "unstored": the last sum is measured and not written. "stored": it is written in the same pass, because
            something reads the main grads. "reduced": it is written, reduced over processes, and measured in a pass of
            its own.
        main_params: Whether low-precision parameters have fp32 main params.

    Raises:
        ValueError: ``k`` or ``m`` is below 1, or no such rule or closing.
    """
    if k < 1 or m < 1:
        raise ValueError(f"floor: k and m must be at least 1, got k={k}, m={m}.")
    flushes = -(-k // m) - 1
    return floor_of_flushes([m] * flushes, k - flushes * m, grad_dtype, param_dtype, rule, closing, main_params)


def floor_of_flushes(
    flushed: Sequence[int],
    held: int,
    grad_dtype: torch.dtype = torch.bfloat16,
    param_dtype: torch.dtype = torch.bfloat16,
    rule: str = "adamw",
    closing: str = "unstored",
    main_params: bool = True,
) -> Floor:
    """The passes of a window whose flushes are known.

    A pass over j gradients reads each once, reads the sum so far (the first flush finds none) and writes it. The
    closing pass only measures; the update reads the same once more.

    Args:
        flushed: Micro-batches that each flush added, in order.
        held: Micro-batches that the closing pass found held.
        grad_dtype: Of the gradients.
        param_dtype: Of the parameters.
        rule: A key of ``MOMENTS``.
        closing: One of ``CLOSINGS``; see ``floor``.
        main_params: Whether low-precision parameters have fp32 main params.
    """
    if closing not in CLOSINGS:
        raise ValueError(f"floor: closing must be one of {', '.join(CLOSINGS)}, got {closing!r}.")
    grad, total = grad_dtype.itemsize, math_dtype(param_dtype).itemsize
    earlier = total if flushed else 0  # bytes of the sum so far, to be read
    stored = closing != "unstored"
    source = total if stored else earlier + held * grad
    first, further = flushed[:1], Counter(flushed[1:])
    rows = [
        *(Pass("flush_first", 1, m * grad + total, 1, m) for m in first),
        *(Pass("flush", times, m * grad + 2 * total, 1, m) for m, times in further.items()),
        Pass("closing", 1, held * grad + earlier + (total if stored else 0), 1, held),
        Pass("norm", int(closing == "reduced"), total, 1),
        Pass("clip", 1, 0, 0),
        Pass("update", 1, source + update_state_bytes(param_dtype, rule, main_params), 1),
    ]
    most = max([*flushed, held])
    buffer = total if flushed or stored else 0
    return Floor(sum(flushed) + held, most, tuple(row for row in rows if row.times), buffer, (most - 1) * grad)


def further_flush(m: int, grad_dtype: torch.dtype = torch.bfloat16, param_dtype: torch.dtype = torch.bfloat16) -> Pass:
    """A flush of m micro-batches into main grads that hold earlier ones, whether or not a window has room for it."""
    return replace(floor(3 * m, m, grad_dtype, param_dtype).row("flush"), times=1)


def stock(
    k: int,
    grad_dtype: torch.dtype = torch.bfloat16,
    param_dtype: torch.dtype = torch.bfloat16,
    rule: str = "adamw",
    first: str = "zero",
) -> Floor:
    """What torch's operators move: the sum, ``clip_grad_norm_``, the fused step (Lion: ours in
    plain torch), and the copy back to the parameters.

    Low-precision parameters have fp32 main params and main grads. For others, and with ``first="take"``, the first
    micro-batch's gradient is the sum that the others are added to, and the parameters are updated as they are.

    Args:
        k: Micro-batches in the window.
        grad_dtype: Of the gradients.
        param_dtype: Of the parameters.
        rule: A key of ``MOMENTS``.
        first: "zero": main grads are zeroed and every micro-batch is added. "copy": the first one is copied. "take": no
            main grads.

    Raises:
        ValueError: No such rule or first.
    """
    if first not in ("zero", "copy", "take"):
        raise ValueError(f"floor: first must be 'zero', 'copy' or 'take', got {first!r}.")
    if rule not in MOMENTS:
        raise ValueError(f"floor: rule must be one of {', '.join(MOMENTS)}, got {rule!r}.")
    main = first != "take" and param_dtype in LOW_PRECISION
    grad = grad_dtype.itemsize
    total = math_dtype(param_dtype).itemsize if main else grad
    step = total if main else param_dtype.itemsize  # the fused step has moments of the parameter's dtype
    zeroes, copies = main and first == "zero", main and first == "copy"
    # bytes and launches of a step; torch has no fused Lion: two lerps, sign, mul, add
    stepped = (2 * total + 11 * step, 5) if rule == "lion" else (total + 2 * step * (1 + MOMENTS[rule]), 1)
    rows = [
        Pass("zero", int(zeroes), total, 1),
        Pass("copy", int(copies), grad + total, 1, 1),
        Pass("add", k if zeroes else k - 1, grad + 2 * total, 1, 1),
        Pass("norm", 1, total, 1),
        Pass("clip", 1, 2 * total, 1),
        Pass("update", 1, *stepped),
        Pass("copy_back", int(main), step + param_dtype.itemsize, 1),
    ]
    return Floor(k, 0, tuple(row for row in rows if row.times), total)


def pass_bytes(floors: Iterable[tuple[Floor, int]]) -> dict[str, int]:
    """Bytes of a window by pass, over parts of a model that differ in dtype.

    Args:
        floors: Each part's floor and elements.

    Returns:
        Bytes in a window (not per element) by name of the pass, in the order they run.
    """
    found: dict[str, int] = {}
    for table, elements in floors:
        for row in table.passes:
            found[row.name] = found.get(row.name, 0) + row.window_bytes * elements
    return found
