"""The ledger of a planned window: each piece of this rank exactly once, in order, with the counts it promised."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from ..results import Scalar
from .plan import Piece, Plan, counted

COUNT_TOLERANCE = 1e-6  # relative: fractional counts summed in another order


class Ledger:
    """What of a plan has run on one rank. Its checks return why something is wrong, or "".

    Args:
        plan: The window's plan.
        rank: Whose pieces are expected.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        self._pieces = plan.of_rank(rank)
        self._counts = plan.counts
        self._number = 0  # of the piece that is expected
        self._samples = 0  # of it that have run, where it came in parts
        self._on_device: list[tuple[str, str, torch.Tensor, float]] = []

    @property
    def remaining(self) -> int:
        """Pieces that have not run completely."""
        return len(self._pieces) - self._number

    def describe(self, piece: Piece) -> str:
        """A piece by its position, and which samples where it is a part."""
        whole = next((planned for planned in self._pieces if planned.index == piece.index), None)
        part = "" if whole is None or whole.samples == piece.samples else f", samples {piece.samples}"
        return f"piece {piece.index} (of {len(self._pieces)} on this rank{part})"

    def position(self) -> str:
        """Which piece is next."""
        return self.describe(self._pieces[self._number]) if self.remaining else "the end of the plan"

    def unexpected(self, piece: Piece) -> str:
        """Why this piece must not run now."""
        name = self.describe(piece)
        if not self.remaining:
            return f"{name} came after the last one: every planned piece has run"
        expected = self._pieces[self._number]
        following = expected.samples[self._samples : self._samples + len(piece.samples)]
        if piece.index == expected.index and piece.rank == expected.rank and piece.samples == following:
            planned = expected.counts
            if piece.samples != expected.samples:
                planned = counted(self._counts, piece.samples, expected.padding)
            return "" if piece.counts == planned else f"{name} counts otherwise than the plan: it is of another one"
        if any(piece.index == planned.index for planned in self._pieces[: self._number]):
            return f"{name} came twice"
        rest = f" (its samples from {expected.samples[self._samples]} on)" if self._samples else ""
        return f"{name} came where {self.describe(expected)}{rest} was expected: pieces run in the plan's order, once"

    def broken_promise(self, piece: Piece, counts: Mapping[str, Scalar]) -> str:
        """Why counts that were seen are not the planned ones; those on a device wait for ``late_broken_promise``."""
        for name, seen in counts.items():
            if name not in piece.counts:
                return f"{self.describe(piece)} counts {name!r}, which the plan does not"
            promised = piece.counts[name]
            if isinstance(seen, torch.Tensor) and seen.device.type != "cpu":
                self._on_device.append((self.describe(piece), name, seen.detach().clone(), promised))
            elif not _equal(float(seen), promised):
                return f"{self.describe(piece)} has {float(seen):g} {name}, and the plan promised {promised:g}"
        return ""

    def late_broken_promise(self) -> str:
        """The same for counts on a device: one sync, and only where there were any."""
        if not self._on_device:
            return ""
        values = torch.stack([seen.to(torch.float64).reshape(()) for _, _, seen, _ in self._on_device]).tolist()
        for (piece, name, _, promised), value in zip(self._on_device, values, strict=True):
            if not _equal(value, promised):
                return f"{piece} has {value:g} {name}, and the plan promised {promised:g}"
        return ""

    def enter(self, piece: Piece) -> None:
        """The piece (or part) has run, and its gradients are taken."""
        self._samples += len(piece.samples)
        if self._samples == len(self._pieces[self._number].samples):
            self._number, self._samples = self._number + 1, 0

    def missing(self) -> str:
        """Which pieces did not run."""
        if not self.remaining:
            return ""
        first = self._pieces[self._number]
        names = [f"{first.index}" + (f" (from sample {first.samples[self._samples]} on)" if self._samples else "")]
        names += [str(piece.index) for piece in self._pieces[self._number + 1 :]]
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        return f"{len(names)} of {len(self._pieces)} planned pieces did not run: {shown}"


def _equal(seen: float, promised: float) -> bool:
    return math.isclose(seen, promised, rel_tol=COUNT_TOLERANCE, abs_tol=0.0)
