"""Cuts a logical batch into pieces that need not be equal, before the first of them runs."""

from __future__ import annotations

import bisect
import heapq
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch

from .plan import Piece, Plan, counted, totals_of

LAYOUTS = ("padded", "packed")
STRATEGIES = ("in_order", "balanced")


@dataclass(frozen=True)
class Limits:
    """What one piece may hold; None: no limit.

    Attributes:
        max_samples: Samples.
        max_sequence_length: Tokens of any one sample.
        max_tokens: Tokens as they are computed: in a padded piece rows times the longest row, in a packed one the sum.
        layout: "padded": a row per sample, all as long as the longest. "packed": samples behind each other in one row.

    Raises:
        ValueError: A limit is below 1, or no such layout.
    """

    max_samples: int | None = None
    max_sequence_length: int | None = None
    max_tokens: int | None = None
    layout: str = "padded"

    def __post_init__(self) -> None:
        for name in ("max_samples", "max_sequence_length", "max_tokens"):
            limit = getattr(self, name)
            if limit is not None and (isinstance(limit, bool) or not isinstance(limit, Integral)):
                raise TypeError(f"Limits: {name} must be an int or None (no limit), got {limit!r}.")
            if limit is not None and limit < 1:
                raise ValueError(f"Limits: {name} must be at least 1 (None: no limit), got {limit}.")
        if self.layout not in LAYOUTS:
            raise ValueError(f"Limits: layout must be one of {', '.join(LAYOUTS)}, got {self.layout!r}.")

    def tokens(self, count: int, longest: int, total: int) -> int:
        """Tokens that a piece of so many samples computes."""
        return total if self.layout == "packed" else count * longest

    def hold(self, count: int, longest: int, total: int) -> bool:
        """Whether a piece of ``count`` samples, the longest and all together of so many tokens, is within them."""
        few = self.max_samples is None or count <= self.max_samples
        return few and (self.max_tokens is None or self.tokens(count, longest, total) <= self.max_tokens)


# -- lengths and counts --------------------------------------------------------------------------------------------


def _lengths_of(samples: Any, argument: str = "plan_batch: samples") -> list[int]:
    """Of each sample: the number itself, or how many items it has."""
    if isinstance(samples, torch.Tensor) and samples.dim() == 1 and not samples.is_floating_point():
        samples = samples.tolist()
    lengths = []
    for index, sample in enumerate(samples):
        length = _length_of(sample, argument, index)
        if length < 0:
            raise ValueError(f"{argument}[{index}] must have a length of 0 or more, got {length}.")
        lengths.append(length)
    return lengths


def _length_of(sample: Any, argument: str, index: int) -> int:
    if not isinstance(sample, torch.Tensor) or sample.dim() == 0:
        try:
            return operator.index(sample)  # an int of Python's, NumPy's or torch's
        except TypeError:
            pass
    try:
        return len(sample)
    except TypeError:
        raise TypeError(
            f"{argument}[{index}] must be a length in tokens (an int) or have a len(), got {type(sample).__name__}."
        ) from None


def _check_counts(
    counts: Mapping[str, Sequence[float]], size: int, where: str = "plan_batch"
) -> dict[str, list[float]]:
    found = {}
    for given, values in counts.items():
        name = given.removeprefix("total_")
        if name in ("samples", "micro_batches"):
            raise ValueError(f"{where}: counts[{given!r}] is there already: every sample, every piece counts 1.")
        if not isinstance(values, (torch.Tensor, Sequence)) and not hasattr(values, "tolist"):
            raise TypeError(
                f"{where}: counts[{given!r}] must be a sequence with one value per sample, got {type(values).__name__}."
            )
        values = list(values.tolist() if hasattr(values, "tolist") else values)
        if len(values) != size:
            raise ValueError(f"{where}: counts[{name!r}] must have one value per sample ({size}), got {len(values)}.")
        for index, value in enumerate(values):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{where}: counts[{name!r}][{index}] must be 0 or more and finite, got {value}.")
        found[name] = values
    return found


def _check_fits(lengths: Sequence[int], limits: Limits) -> None:
    """Every sample fits a piece of its own."""
    for index, length in enumerate(lengths):
        for name, limit in (("max_sequence_length", limits.max_sequence_length), ("max_tokens", limits.max_tokens)):
            if limit is not None and length > limit:
                raise ValueError(
                    f"plan_batch: samples[{index}] fits no piece: it has {length} tokens, and {name} is {limit}. "
                    "Shorten the sample or raise the limit."
                )


# -- shapes --------------------------------------------------------------------------------------------------------


class _Shapes:
    """Which shape a piece gets, and so what fits in one.

    Args:
        lengths: Of all samples.
        limits: As given.
        most: Distinct shapes at most; None: each piece is as large as it has to be.
    """

    def __init__(self, lengths: Sequence[int], limits: Limits, most: int | None) -> None:
        self._limits = limits
        self._packed = limits.layout == "packed"
        self._steps: list[int] | None = None
        if most is None:
            return
        longest = max(lengths, default=0)
        if self._packed:
            whole = limits.max_tokens or sum(lengths)
            least = max(longest, -(-whole // most), 1)
            self._steps = sorted({max(least, -(-whole * step // most)) for step in range(1, most + 1)})
        else:
            ordered = sorted(lengths)
            self._steps = sorted({ordered[-(-len(ordered) * step // most) - 1] for step in range(1, most + 1)})

    def _step(self, tokens: int) -> int:
        assert self._steps is not None
        return self._steps[bisect.bisect_left(self._steps, tokens)]

    def _rows(self, length: int, samples: int) -> int:
        """Rows of every padded piece whose rows have this length; ``samples`` where nothing limits them."""
        limits = self._limits
        rows = [limits.max_samples] if limits.max_samples is not None else []
        rows += [limits.max_tokens // length] if limits.max_tokens is not None and length > 0 else []
        return min(rows, default=samples)

    def hold(self, count: int, longest: int, total: int) -> bool:
        if self._steps is None:
            return self._limits.hold(count, longest, total)
        if self._packed:
            return self._limits.hold(count, longest, total) and total <= self._steps[-1]
        length = self._step(longest)
        return count <= self._rows(length, count) and self._limits.hold(count, length, total)

    def of(self, count: int, longest: int, total: int, samples: int) -> tuple[int, int]:
        if self._packed:
            return (1, total if self._steps is None else self._step(total))
        if self._steps is None:
            return (count, longest)
        length = self._step(longest)
        return (self._rows(length, samples), length)


# -- strategies ----------------------------------------------------------------------------------------------------

Groups = list[list[int]]


def _runs(order: Sequence[int], lengths: Sequence[int], fits: Callable[[int, int, int], bool]) -> Groups:
    """Runs of samples, each as long as it may be."""
    groups: Groups = []
    longest = total = 0
    for sample in order:
        length = lengths[sample]
        if groups and fits(len(groups[-1]) + 1, max(longest, length), total + length):
            groups[-1].append(sample)
            longest, total = max(longest, length), total + length
        else:
            groups.append([sample])
            longest = total = length
    return groups


def _even(order: Sequence[int], lengths: Sequence[int], fits: Callable[[int, int, int], bool], least: int) -> Groups:
    """At least so many packed pieces of even totals: each sample, longest first, into the emptiest piece."""
    groups: Groups = [[] for _ in range(least)]
    emptiest = [(0, group) for group in range(least)]  # (total, group), a heap
    for sample in order:
        length = lengths[sample]
        while emptiest and not fits(len(groups[emptiest[0][1]]) + 1, 0, emptiest[0][0]):
            heapq.heappop(emptiest)  # it has as many samples as it may
        total, group = emptiest[0] if emptiest else (0, len(groups))
        if emptiest and fits(len(groups[group]) + 1, length, total + length):
            heapq.heapreplace(emptiest, (total + length, group))
            groups[group].append(sample)
        else:  # the emptiest has no room: none has
            heapq.heappush(emptiest, (length, len(groups)))
            groups.append([sample])
    return [sorted(group) for group in groups if group]


def _split_to_multiple(groups: Groups, world_size: int) -> Groups:
    """Halve the largest pieces until every rank has as many, as far as they have more than one sample."""
    # A heap by size; a piece's key is where it was and which half of halves it is, so keys keep the order.
    largest: list[tuple[int, tuple[int, ...]]] = [(-len(group), (number,)) for number, group in enumerate(groups)]
    heapq.heapify(largest)
    parts: dict[tuple[int, ...], list[int]] = {(number,): group for number, group in enumerate(groups)}
    while len(parts) % world_size and -largest[0][0] > 1:
        _, key = heapq.heappop(largest)
        whole = parts.pop(key)
        for half, group in enumerate((whole[: len(whole) // 2], whole[len(whole) // 2 :])):
            place = (*key, half)
            parts[place] = group
            heapq.heappush(largest, (-len(group), place))
    return [parts[key] for key in sorted(parts)]


def _in_turns(groups: Groups, cost: Callable[[list[int]], int], world_size: int) -> Groups:
    """Pieces of like cost run at the same time, and no rank always has the dearest of them."""
    ordered = sorted(groups, key=cost, reverse=True)
    steps = [ordered[start : start + world_size] for start in range(0, len(ordered), world_size)]
    return [group for number, step in enumerate(steps) for group in (step[::-1] if number % 2 else step)]


def plan_batch(
    samples: Any,
    *,
    limits: Limits | None = None,
    counts: Mapping[str, Sequence[float]] | None = None,
    world_size: int = 1,
    strategy: str = "in_order",
    max_shapes: int | None = None,
) -> Plan:
    """Cut a logical batch into pieces within limits.

    Args:
        samples: Lengths in tokens (ints, or an integer tensor [N]), or the samples themselves: whatever has a ``len``.
        limits: What a piece may hold; None: everything.
        counts: Per sample, what it contributes to each denominator: ``active_tokens``, ``advantage_tokens``, or a name
            of your own. ``samples`` is always there. Nothing is guessed: tokens that the loss masks out are not active.
        world_size: Processes that share the batch; each gets as many pieces. Pieces are halved where that does not come
            out even, and where there are too few samples a piece of weight 0 is added.
        strategy: "in_order": pieces are runs of the batch. "balanced": packed pieces of even totals, padded pieces of
            samples of like length; those that run at the same time cost alike.
        max_shapes: At most so many distinct shapes: lengths are rounded up, and padded pieces of one length all have
            the rows that fit, the further ones empty. None: each piece is as large as it has to be.

    Returns:
        The plan; nothing was run or moved.

    Raises:
        ValueError: An argument is out of its range, or a sample fits no piece; its index, length and the limit are
            named.
    """
    limits = Limits() if limits is None else limits
    if not isinstance(limits, Limits):
        raise TypeError(f"plan_batch: limits must be gf.Limits(...), got {type(limits).__name__}.")
    lengths = _lengths_of(samples)
    if not lengths:
        raise ValueError("plan_batch: samples must have at least one sample, got none.")
    if not isinstance(world_size, Integral):
        raise TypeError(f"plan_batch: world_size must be an int, got {world_size!r}.")
    if world_size < 1:
        raise ValueError(f"plan_batch: world_size must be at least 1, got {world_size}.")
    if strategy not in STRATEGIES:
        raise ValueError(f"plan_batch: strategy must be one of {', '.join(STRATEGIES)}, got {strategy!r}.")
    if max_shapes is not None and max_shapes < 1:
        raise ValueError(f"plan_batch: max_shapes must be at least 1 (None: any number), got {max_shapes}.")
    per_sample = _check_counts(counts or {}, len(lengths))
    _check_fits(lengths, limits)
    shapes = _Shapes(lengths, limits, max_shapes)
    if strategy == "in_order":
        groups = _split_to_multiple(_runs(range(len(lengths)), lengths, shapes.hold), world_size)
    else:
        order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
        if limits.layout == "packed":
            groups = _even(order, lengths, shapes.hold, _least_pieces(lengths, limits, world_size))
        else:
            groups = [sorted(run) for run in _runs(order, lengths, shapes.hold)]
        groups = _split_to_multiple(groups, world_size)
        groups = _in_turns(groups, lambda group: _cost(group, lengths, limits), world_size)
    pieces = []
    for index, group in enumerate(groups):
        held = [lengths[sample] for sample in group]
        shape = shapes.of(len(group), max(held), sum(held), len(lengths))
        pieces.append(Piece(index, index % world_size, tuple(group), shape, counted(per_sample, group)))
    missing = -len(pieces) % world_size
    cheapest = min(pieces, key=lambda piece: piece.shape[0] * piece.shape[1]) if missing else pieces[0]
    for _ in range(missing):
        nothing = counted(per_sample, cheapest.samples, padding=True)
        pieces.append(
            Piece(len(pieces), len(pieces) % world_size, cheapest.samples, cheapest.shape, nothing, padding=True)
        )
    packed = limits.layout == "packed"
    return Plan(
        tuple(pieces), totals_of(per_sample, len(lengths)), world_size, tuple(lengths), per_sample, packed
    )  # fmt: skip


def plan_pieces(
    sizes: Iterable[int],
    *,
    counts: Mapping[str, Sequence[float]] | None = None,
    lengths: Any = None,
) -> Plan:
    """The plan of a logical batch that somebody else has cut already: a loader's micro-batches, taken in turn.

    Args:
        sizes: Samples of each piece.
        counts: As for ``plan_batch``: one value per sample of the whole logical batch, in the order of the pieces.
        lengths: Tokens of each sample, for the pieces' shapes; None: 0.

    Raises:
        ValueError: A size is below 1, or there is another number of counts or lengths than samples.
    """
    if not isinstance(sizes, Iterable):
        raise TypeError(f"plan_pieces: sizes must list the samples of each piece, got {sizes!r}.")
    sizes = list(sizes)
    if not sizes:
        raise ValueError("plan_pieces: sizes must have at least one piece, got none.")
    for index, size in enumerate(sizes):
        if size < 1:
            raise ValueError(f"plan_pieces: sizes[{index}] must be at least 1 sample, got {size}.")
    total = sum(sizes)
    tokens = [0] * total if lengths is None else _lengths_of(lengths, "plan_pieces: lengths")
    if len(tokens) != total:
        raise ValueError(f"plan_pieces: lengths must have one value per sample ({total}), got {len(tokens)}.")
    per_sample = _check_counts(counts or {}, total, "plan_pieces")
    pieces, start = [], 0
    for index, size in enumerate(sizes):
        group = tuple(range(start, start + size))
        shape = (size, max(tokens[start : start + size]))
        pieces.append(Piece(index, 0, group, shape, counted(per_sample, group)))
        start += size
    return Plan(tuple(pieces), totals_of(per_sample, total), 1, tuple(tokens), per_sample)


def _cost(group: Sequence[int], lengths: Sequence[int], limits: Limits) -> int:
    held = [lengths[sample] for sample in group]
    return limits.tokens(len(held), max(held), sum(held))


def _least_pieces(lengths: Sequence[int], limits: Limits, world_size: int) -> int:
    """Packed pieces that cannot be done without, a multiple of the ranks where there are samples enough."""
    by_tokens = 1 if limits.max_tokens is None else -(-sum(lengths) // limits.max_tokens)
    by_samples = 1 if limits.max_samples is None else -(-len(lengths) // limits.max_samples)
    least = max(by_tokens, by_samples, 1)
    return min(len(lengths), -(-least // world_size) * world_size)
