"""A plan: the pieces of a logical batch, what each counts, and the way back to the original order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Piece:
    """One micro-batch of a plan, or a part of one.

    Attributes:
        index: Position of the planned piece in ``Plan.pieces``.
        rank: The process that runs it.
        samples: Positions in the logical batch, in the order they are laid out.
        shape: (rows, tokens of a row) as the tensors should be, padding included; packed: one row.
        counts: What it contributes to each denominator: ``samples``, and the counts that the plan was made with.
        padding: It repeats samples so that every rank has as many pieces: all its counts are 0, and what it puts out is
            dropped.
    """

    index: int
    rank: int
    samples: tuple[int, ...]
    shape: tuple[int, int]
    counts: Mapping[str, float]
    padding: bool = False


@dataclass(frozen=True)
class Plan:
    """Pieces that hold every sample of a logical batch exactly once.

    Attributes:
        pieces: All ranks', in the order they run: piece i runs on rank i % world_size.
        totals: The logical batch's denominators, over all ranks: ``total_samples``, and ``total_<name>`` of each count.
        world_size: Ranks, each with as many pieces.
        lengths: Tokens of each sample.
        counts: Of each sample, by name.
        packed: Whether samples lie behind each other in one row.
    """

    pieces: tuple[Piece, ...]
    totals: Mapping[str, float]
    world_size: int
    lengths: tuple[int, ...] = field(repr=False)
    counts: Mapping[str, Sequence[float]] = field(repr=False, default_factory=dict)
    packed: bool = field(repr=False, default=False)

    @property
    def order(self) -> tuple[int, ...]:
        """Positions in the logical batch, in the order the pieces run them."""
        return tuple(sample for piece in self.pieces if not piece.padding for sample in piece.samples)

    @property
    def inverse(self) -> tuple[int, ...]:
        """Where in ``order`` each sample of the logical batch is."""
        places = [0] * len(self.lengths)
        for place, sample in enumerate(self.order):
            places[sample] = place
        return tuple(places)

    @property
    def shapes(self) -> frozenset[tuple[int, int]]:
        """The distinct shapes of its pieces."""
        return frozenset(piece.shape for piece in self.pieces)

    def of_rank(self, rank: int) -> tuple[Piece, ...]:
        """The pieces that a rank runs, in order."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"Plan.of_rank: rank must be from 0 to {self.world_size - 1}, got {rank}.")
        return self.pieces[rank :: self.world_size]

    def this_rank(self, rank: int | None = None) -> int:
        """A rank of the plan: the one given, else this process's in torch.distributed.

        Raises:
            ValueError: The plan has several ranks and nobody says which one this is, or another number than there are.
        """
        if rank is not None:
            return self.of_rank(rank)[0].rank
        if self.world_size == 1:
            return 0
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            raise ValueError(
                f"Plan: it has the pieces of {self.world_size} ranks, and torch.distributed is not initialised. Pass "
                "rank=..."
            )
        if torch.distributed.get_world_size() != self.world_size:
            raise ValueError(
                f"Plan: it has the pieces of {self.world_size} ranks, and there are "
                f"{torch.distributed.get_world_size()}. Plan with world_size=torch.distributed.get_world_size()."
            )
        return torch.distributed.get_rank()

    def split(self, piece: Piece) -> tuple[Piece, Piece]:
        """The two halves of a piece of this plan (or of a part of one): the same samples, counts and order.

        A half's rows are as long as its own longest sample.

        Raises:
            ValueError: It has one sample.
        """
        if len(piece.samples) < 2:
            raise ValueError(f"Plan.split: piece {piece.index} has one sample, which cannot be split.")
        middle = len(piece.samples) // 2
        return self._part(piece, piece.samples[:middle]), self._part(piece, piece.samples[middle:])

    def _part(self, piece: Piece, samples: tuple[int, ...]) -> Piece:
        held = [self.lengths[sample] for sample in samples]
        shape = (1, sum(held)) if self.packed else (len(samples), max(held))
        counts = counted(self.counts, samples, piece.padding)
        return Piece(piece.index, piece.rank, samples, shape, counts, piece.padding)

    def restore(self, outputs: Sequence[Any], rank: int | None = None) -> Any:
        """Per-sample results in the original order.

        Args:
            outputs: One per piece of the plan (of ``of_rank(rank)``): a tensor whose first dimension, or a sequence
                whose items, are its samples' results; further rows, of a padded shape, are dropped. What belongs to a
                padding piece is not looked at.
            rank: Whose pieces these are; None: all.

        Returns:
            A tensor, where every sample's result is one of the same shape; else a list, with None for samples of other
            ranks.

        Raises:
            ValueError: Another number of outputs than pieces, or of results in one than it has samples or padded rows.
        """
        pieces = self.pieces if rank is None else self.of_rank(rank)
        if len(outputs) != len(pieces):
            raise ValueError(
                f"Plan.restore: outputs must have one entry per piece ({len(pieces)}), got {len(outputs)}."
            )
        results: list[Any] = [None] * len(self.lengths)
        for number, (piece, output) in enumerate(zip(pieces, outputs, strict=True)):
            if piece.padding:
                continue
            rows = rows_of(piece, output, self.packed, f"Plan.restore: outputs[{number}]")
            for row, sample in zip(rows, piece.samples, strict=True):
                results[sample] = row
        shapes = {result.shape if isinstance(result, torch.Tensor) else None for result in results}
        return torch.stack(results) if len(shapes) == 1 and None not in shapes else results


def rows_of(piece: Piece, output: Any, packed: bool, what: str) -> list[Any]:
    """One result per sample of a piece, in its order; the empty rows of a padded shape are dropped.

    Raises:
        ValueError: ``output`` has another number of items.
    """
    samples = len(piece.samples)
    rows = len(output) if isinstance(output, (torch.Tensor, Sequence)) and _has_items(output) else None
    if rows is None or not (rows == samples or (not packed and rows == piece.shape[0])):
        got = type(output).__name__ if rows is None else rows
        raise ValueError(
            f"{what} must have a result for each of the piece's {samples} samples, got {got}. Pass a tensor [samples, "
            "...] or a list, as gf.PieceOutput(loss, outputs)."
        )
    return [output[row] for row in range(samples)]


def _has_items(output: Any) -> bool:
    return not isinstance(output, (str, bytes)) and not (isinstance(output, torch.Tensor) and output.dim() == 0)


def counted(counts: Mapping[str, Sequence[float]], samples: Sequence[int], padding: bool = False) -> dict[str, float]:
    """What these samples count together; nothing if they are padding."""
    if padding:
        return dict.fromkeys(("samples", *counts), 0.0)
    found = {name: float(math.fsum([values[sample] for sample in samples])) for name, values in counts.items()}
    return {"samples": float(len(samples)), **found}


def totals_of(counts: Mapping[str, Sequence[float]], samples: int) -> dict[str, float]:
    """The denominators of a logical batch: ``total_samples`` and ``total_<name>``."""
    totals = {"total_samples": float(samples)}
    return totals | {f"total_{name}": float(math.fsum(values)) for name, values in counts.items()}
