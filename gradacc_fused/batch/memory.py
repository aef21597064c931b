"""The largest micro-batch that fits a memory budget, and the accumulation steps that keep the effective batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ..report.events import peak_bytes
from .out_of_memory import is_out_of_memory, release
from .planner import Limits

if TYPE_CHECKING:
    from ..optimizer import GradAccumOptimizer

MOST_SAMPLES = 65536  # tried at most, where nothing else limits them
FASTEST_GROWTH = 8  # of what is tried next over what is known to fit: a wrong prediction must not exhaust memory


@dataclass(frozen=True)
class MicroBatch:
    """What ``find_micro_batch`` found; ``str()`` is a table.

    Attributes:
        samples: The largest micro-batch that fits.
        accumulation_steps: Micro-batches of a logical batch of ``effective_batch`` samples; None if none was given.
        sizes: Their samples, as even as they can be.
        bytes_per_sample: Slope of the line through what fits and the next larger measurement.
        fixed_bytes: Its intercept: what a micro-batch takes whatever its size (gradients, workspaces).
        usable_bytes: The budget less the head-room and ``bytes_to_come``.
        budget_bytes: Bytes that were free.
        bytes_to_come: What the optimizer's windows will still allocate.
        peaks: Bytes measured, by samples; None where memory ran out.
        limits: Limits for ``plan_batch``: those given, with ``max_samples`` as found.
    """

    samples: int
    accumulation_steps: int | None
    sizes: tuple[int, ...]
    bytes_per_sample: float
    fixed_bytes: float
    usable_bytes: int
    budget_bytes: int
    bytes_to_come: int
    peaks: Mapping[int, int | None]
    limits: Limits

    def __str__(self) -> str:
        lines = [f"{'samples':>10} {'peak bytes':>18}"]
        for samples, peak in sorted(self.peaks.items()):
            known = "out of memory" if peak is None else f"{peak:,}"
            lines.append(f"{samples:>10} {known:>18}{'  <- largest that fits' if samples == self.samples else ''}")
        lines.append(f"{self.bytes_per_sample:,.0f} bytes per sample + {self.fixed_bytes:,.0f}")
        lines.append(f"{self.usable_bytes:,} usable of {self.budget_bytes:,} ({self.bytes_to_come:,} to come)")
        if self.accumulation_steps is not None:
            lines.append(f"{self.accumulation_steps} accumulation step(s) of {', '.join(map(str, self.sizes))} samples")
        return "\n".join(lines)


def find_micro_batch(
    fn: Callable[[int], object],
    limits: Limits | None = None,
    *,
    effective_batch: int | None = None,
    optimizer: GradAccumOptimizer | None = None,
    device: torch.device | str | None = None,
    budget_bytes: int | None = None,
    head_room: float = 0.15,
) -> MicroBatch:
    """Measure the peak memory of micro-batches, and find the largest that fits.

    One sample is measured, then two; the line through the two largest measurements predicts the largest that fits,
    which is measured in turn, until one fits and the next does not.

    Args:
        fn: ``fn(samples)`` runs forward and backward of a micro-batch of so many samples, as long as they come
            (``limits.max_sequence_length``). It must leave nothing behind, or the next measurement misses it (a warning
            says so); ``.grad`` of the optimizer's parameters is cleared here.
        limits: ``max_samples`` is the most that is tried; with ``max_sequence_length``, ``max_tokens`` limits it too.
        effective_batch: Samples of the logical batch: gives ``accumulation_steps``, and no larger one is tried.
        optimizer: Makes its state now, and leaves room for the main grads and held gradients of its windows.
        device: Where ``fn`` runs; None: the optimizer's, else the CPU.
        budget_bytes: Bytes that may be allocated beyond what is allocated now. None: on a CUDA device what is free, and
            what torch keeps there unused. Required on the CPU.
        head_room: Share of the budget that stays free, for fragments and workspaces: 0.1 to 0.2 is usual.

    Returns:
        The micro-batch. On the CPU what torch's allocator gave is measured, on CUDA the caching allocator's peak.

    Raises:
        ValueError: An argument is out of its range.
        MemoryError: One sample does not fit; it says by how much, and what to do.
    """
    limits = limits or Limits()
    where = _device(optimizer, device)
    _check_limits(limits)
    _check(effective_batch, budget_bytes, head_room, where)
    to_come = 0
    if optimizer is not None:
        _ = optimizer.state
        to_come = optimizer._engine.bytes_to_come()
    budget = _free_bytes(where) if budget_bytes is None else budget_bytes
    usable = int(budget * (1 - head_room)) - to_come
    most = _most_samples(limits, effective_batch)
    peaks: dict[int, int | None] = {}

    def fits(samples: int) -> bool:
        if samples not in peaks:
            peaks[samples] = _peak(fn, samples, where, optimizer)
        peak = peaks[samples]
        return peak is not None and peak <= usable

    if not fits(1):
        _refuse_one_sample(peaks[1], usable, budget, to_come)
    largest, too_many = 1, most + 1
    while too_many - largest > 1:
        candidate = _candidate(peaks, largest, too_many, usable)
        if fits(candidate):
            largest = candidate
        else:
            too_many = candidate
    slope, fixed = _line(peaks, largest if peaks.get(too_many) is None else too_many)
    steps = None if effective_batch is None else -(-effective_batch // largest)
    sizes = () if effective_batch is None or steps is None else _even(effective_batch, steps)
    return MicroBatch(
        largest, steps, sizes, slope, fixed, usable, budget, to_come, peaks, replace(limits, max_samples=largest)
    )  # fmt: skip


def _device(optimizer: GradAccumOptimizer | None, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    return torch.device("cpu") if optimizer is None else optimizer._engine.layout.device


def _check(effective_batch: int | None, budget_bytes: int | None, head_room: float, device: torch.device) -> None:
    if effective_batch is not None and effective_batch < 1:
        raise ValueError(f"find_micro_batch: effective_batch must be at least 1 sample, got {effective_batch}.")
    if not 0 <= head_room < 1:
        raise ValueError(f"find_micro_batch: head_room must be a share from 0 up to 1, got {head_room}.")
    if budget_bytes is None and device.type != "cuda":
        raise ValueError(
            f"find_micro_batch: budget_bytes must be given on {device.type}: nobody can say what of the machine's "
            "memory is this process's."
        )
    if budget_bytes is not None and budget_bytes < 1:
        raise ValueError(f"find_micro_batch: budget_bytes must be at least 1, got {budget_bytes}.")


def _check_limits(limits: Limits) -> None:
    if limits.max_tokens is not None and limits.max_sequence_length is None:
        raise ValueError(
            "find_micro_batch: limits with max_tokens need max_sequence_length too: how long fn's samples are."
        )


def _most_samples(limits: Limits, effective_batch: int | None) -> int:
    bounds = [MOST_SAMPLES]
    bounds += [bound for bound in (limits.max_samples, effective_batch) if bound is not None]
    if limits.max_tokens is not None and limits.max_sequence_length is not None:
        bounds.append(max(limits.max_tokens // limits.max_sequence_length, 1))
    return min(bounds)


def _free_bytes(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _peak(
    fn: Callable[[int], object], samples: int, device: torch.device, optimizer: GradAccumOptimizer | None
) -> int | None:
    """Bytes at once beyond those before; None where memory ran out."""
    if optimizer is not None:
        optimizer._engine.clear_grads()
    release(device)
    try:
        if device.type != "cuda":
            peak, left = peak_bytes(lambda: fn(samples))
            _warn_about_what_is_left(left, samples, optimizer)
            return peak
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        fn(samples)
        torch.cuda.synchronize(device)
        _warn_about_what_is_left(torch.cuda.memory_allocated(device) - before, samples, optimizer)
        return torch.cuda.max_memory_allocated(device) - before
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    finally:
        if optimizer is not None:
            optimizer._engine.clear_grads()
    release(device)
    return None


def _warn_about_what_is_left(left: int, samples: int, optimizer: GradAccumOptimizer | None) -> None:
    if left > 0 and optimizer is None:
        warnings.warn(
            f"find_micro_batch: fn({samples}) left {left:,} bytes allocated, so later measurements miss them. Clear "
            ".grad in fn, or pass optimizer=.",
            stacklevel=4,
        )


def _candidate(peaks: Mapping[int, int | None], largest: int, too_many: int, usable: int) -> int:
    """What to measure next, between what fits and what does not."""
    if len(peaks) == 1:
        return 2
    if len(peaks) > 8:
        return (largest + too_many) // 2  # no line predicts this one
    slope, fixed = _line(peaks, largest if peaks.get(too_many) is None else too_many)
    predicted = int((usable - fixed) / slope) if slope > 0 else too_many
    return min(max(predicted, largest + 1), too_many - 1, FASTEST_GROWTH * largest)


def _line(peaks: Mapping[int, int | None], up_to: int) -> tuple[float, float]:
    """(slope, intercept) through the two largest measurements up to ``up_to``; through 0 where there is one."""
    known = [(samples, peak) for samples, peak in peaks.items() if peak is not None and samples <= up_to]
    (x, y), *others = sorted(known, reverse=True)[:2]
    if not others:
        return float(y), 0.0
    slope = (y - others[0][1]) / (x - others[0][0])
    return slope, y - slope * x


def _even(total: int, parts: int) -> tuple[int, ...]:
    each, more = divmod(total, parts)
    return tuple(each + (part < more) for part in range(parts))


def _refuse_one_sample(peak: int | None, usable: int, budget: int, to_come: int) -> None:
    needs = "runs out of memory" if peak is None else f"needs {peak:,} bytes"
    raise MemoryError(
        f"find_micro_batch: one sample {needs}, and {usable:,} are usable of {budget:,} (head-room and {to_come:,} "
        "bytes to come taken off). Use activation checkpointing (torch.utils.checkpoint), shorter sequences, bf16 "
        "parameters, or a smaller model."
    )
